"""The demo model's tokenizer and chat format: how conversations become token ids, and which are learned."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, START, END)
VOCAB_SIZE = 2048
ANSWER_TOKENS_MAX = 300

CALLS = 'Call a function by <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>.'
"""The end of a system prompt with functions."""
CHAT_TEMPLATE = (
    "{%- if tools -%}"
    "{{ '<|im_start|>system\\n' }}"
    "{%- if messages[0]['role'] == 'system' -%}{{ messages[0]['content'] + '\\n\\n' }}{%- endif -%}"
    "{{ 'Functions:\\n' }}"
    "{%- for tool in tools -%}"
    "{%- set function = tool['function'] -%}"
    "{%- set parameters = function['parameters'] or {} -%}"
    "{{ function['name'] + '(' }}"
    "{%- for name in parameters['properties'] or {} -%}"
    "{{ ('' if loop.first else ', ') + name }}"
    "{%- if name not in (parameters['required'] or []) -%}{{ '?' }}{%- endif -%}"
    "{%- endfor -%}"
    "{{ ')' }}"
    "{%- if function['description'] -%}{{ ': ' + function['description'] }}{%- endif -%}"
    "{{ '\\n' }}"
    "{%- endfor -%}"
    '{{ \'Call a function by <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>.<|im_end|>\\n\' }}'
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if not (tools and loop.first and message['role'] == 'system') -%}"
    "{%- set content = message['content'] or '' -%}"
    "{%- if message['role'] == 'assistant' and '</think>' in content -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}"  # as templates of reasoning models do
    "{%- endif -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + content }}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{ '\\n' if content or not loop.first else '' }}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}"
    "{{ '}\\n</tool_call>' }}"
    "{%- endfor -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

Messages = Sequence[tuple[str, str]]


def render(messages: Messages, ask: bool = False) -> str:
    """The text that `CHAT_TEMPLATE` renders; with `ask` it ends with the head of the assistant's answer."""
    text = "".join(f"{START}{role}\n{content}{END}\n" for role, content in messages)
    return text + f"{START}assistant\n" if ask else text


def with_functions(system: str, functions: Sequence[tuple[str, Sequence[str], str]]) -> str:
    """The system prompt that `CHAT_TEMPLATE` writes for functions: names, parameters, and what each does."""
    lines = [
        f"{name}({', '.join(parameters)}){': ' if description else ''}{description}"
        for name, parameters, description in functions
    ]
    return (f"{system}\n\n" if system else "") + "\n".join(("Functions:", *lines, CALLS))


def call_text(name: str, arguments: Mapping[str, object]) -> str:
    """A call as `CHAT_TEMPLATE` writes it, which is what the model is to write."""
    shown = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {shown}}}\n</tool_call>'


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE in which every digit, and every line break, stands alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex("\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, context_len: int) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_len,
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [START],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, f"the tokenizer has no {token}"
    return int(found)


def answer_spans(ids: Sequence[int], tokenizer: Tokenizer) -> list[range]:
    """The ranges of the assistant's tokens in a rendered conversation, each with its end token."""
    start, end = token_id(tokenizer, START), token_id(tokenizer, END)
    header = tokenizer.encode("assistant\n").ids
    spans = []
    for index in (i for i, token in enumerate(ids) if token == start):
        first = index + 1 + len(header)
        if first < len(ids) and list(ids[index + 1 : first]) == header:
            last = next((i for i in range(first, len(ids)) if ids[i] == end), len(ids) - 1)
            spans.append(range(first, last + 1))
    return spans
