"""The fields of several APIs that an engine of another make is sent, by the rules of
`gateway.request.outbound`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Raw

from shared.apis.prediction import Prediction, known_prediction
from shared.apis.tools import Tool, known_tools
from shared.wire.errors import InvalidRequest

Cleaner = Callable[[Raw, list[str]], Raw]
"""Leaves out of a field's value what an engine of another make is not sent, and adds the names of that to a
list. Raises InvalidRequest for what it may not be sent at all."""
Nested = tuple[tuple[str, Cleaner], ...]
"""The fields that are looked into, in this order."""

MAXIMA: Final = ("max_tokens", "max_completion_tokens")
"""The fields that state how much OpenAI's chats and completions may generate."""

OPENAI: Final = frozenset(
    {
        *("model", "frequency_penalty", "logit_bias", "logprobs", "n", "presence_penalty", "seed", "stop"),
        *("stream", "stream_options", "temperature", "top_p", "user", "service_tier"),
    }
)
"""The fields that both of them have."""
EXTENSIONS: Final = frozenset(
    {
        # which token comes next
        *("top_k", "min_p", "typical_p", "tfs_z", "top_a", "top_n_sigma", "do_sample"),
        *("repetition_penalty", "repeat_penalty", "repeat_last_n", "no_repeat_ngram_size"),
        *("mirostat", "mirostat_tau", "mirostat_eta", "dynatemp_range", "dynatemp_exponent"),
        *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("xtc_probability", "xtc_threshold", "bad_words", "bad_words_ids", "allowed_token_ids"),
        # the form of the answer
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        *("response_format", "json_schema", "grammar", "regex", "ebnf"),
        # where it ends, within the maximum
        *("stop_token_ids", "min_tokens", "ignore_eos"),
        # how the prompt is written, and what of the answer is shown
        *("chat_template_kwargs", "enable_thinking", "include_reasoning", "separate_reasoning", "echo"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "prompt_logprobs"),
        "thinking_token_budget",
        *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
        *("no_stop_trim", "return_token_ids", "return_tokens_as_token_ids"),
    }
)
"""Fields of vLLM (https://docs.vllm.ai/en/latest/serving/openai_compatible_server), SGLang
(https://docs.sglang.ai/basic_usage/openai_api_completions.html) and llama.cpp (tools/server/README.md) that
change neither how much is generated nor where data goes."""
_OPTIONS: Final = frozenset({"include_usage", "include_obfuscation", "continuous_usage_stats"})
"""The fields of `stream_options`: OpenAI's, and one of vLLM's that changes what is shown."""
_SCALARS: Final = (b"true", b"false", b"null")
"""The values that they have."""
_TEMPLATE_OWN: Final = frozenset({"chat_template", "conversation", "messages", "tokenize"})
"""The names in `chat_template_kwargs` by which the caller would write another prompt than its messages'."""

_object: Final = msgspec.json.Decoder(dict[str, Raw] | None)
_tools: Final = msgspec.json.Decoder(list[Tool] | None)
_prediction: Final = msgspec.json.Decoder(Prediction | None)


def stream_options(value: Raw, left_out: list[str]) -> Raw:
    return _kept(
        "stream_options", value, left_out, lambda name, raw: name in _OPTIONS and bytes(raw) in _SCALARS
    )


def template_arguments(value: Raw, left_out: list[str]) -> Raw:
    """The variables of a chat template, without those by which the caller would write another prompt."""
    return _kept("chat_template_kwargs", value, left_out, lambda name, _: name not in _TEMPLATE_OWN)


def shaped_tools(value: Raw, left_out: list[str]) -> Raw:
    """The tools of a request that was read, without what their shapes do not have."""
    if not (tools := _tools.decode(value)):
        return value
    known, surplus = known_tools(tools, value)
    left_out += surplus
    return known


def shaped_prediction(value: Raw, left_out: list[str]) -> Raw:
    """The prediction of a request that was read, without what its shape does not have."""
    if (prediction := _prediction.decode(value)) is None:
        return value
    known, surplus = known_prediction(prediction, value)
    left_out += surplus
    return known


NESTED: Final[Nested] = (("stream_options", stream_options), ("chat_template_kwargs", template_arguments))


def _kept(name: str, value: Raw, left_out: list[str], keeps: Callable[[str, Raw], bool]) -> Raw:
    """An object without the names that are not to be kept."""
    try:
        held = _object.decode(value) or {}
    except msgspec.ValidationError:
        raise InvalidRequest(f"{name} must be an object.", param=name) from None
    known = {one: raw for one, raw in held.items() if keeps(one, raw)}
    if len(known) == len(held):
        return value
    left_out += [f"{name}.{one}" for one in held if one not in known]
    return Raw(msgspec.json.encode(known))


def with_usage(options: Raw | None) -> Raw:
    """`stream_options` that ask for usage, besides what the caller's own ask for."""
    asked = {} if options is None else _object.decode(options) or {}
    return Raw(msgspec.json.encode({**asked, "include_usage": True}))
