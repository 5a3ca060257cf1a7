"""The fields that an engine of another make is sent: those on a list, and no others.

What may be generated is what was reserved, and a request goes where operators send it. Engines have fields
of their own by which a caller could undo both: llama.cpp's `n_predict` wins over `max_tokens`, `best_of` and
`use_beam_search` compute more sequences than are answered, `kv_transfer_params` names another host. Nobody
can list all of them, so the list is of what is harmless. A field that is left out is named to its caller.
Names are compared as they are, since some engines read `Max_Tokens` as `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from shared.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from shared.validation import Parsed

MAXIMA: Final = ("max_tokens", "max_completion_tokens")
"""The fields that state how much may be generated. One of them is sent, with what was reserved."""

_BOTH: Final = frozenset(
    {
        *("model", "frequency_penalty", "logit_bias", "logprobs", "n", "presence_penalty", "seed", "stop"),
        *("stream", "stream_options", "temperature", "top_p", "user", "service_tier"),
    }
)
OPENAI_CHAT: Final = _BOTH | {
    *("messages", "audio", "function_call", "functions", "metadata", "modalities", "moderation"),
    *("parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "reasoning_effort", "response_format", "safety_identifier", "store"),
    *("tool_choice", "tools", "top_logprobs", "verbosity", "web_search_options"),
}
"""The fields of https://platform.openai.com/docs/api-reference/chat/create, the deprecated ones too."""
OPENAI_COMPLETION: Final = _BOTH | {"prompt", "best_of", "echo", "suffix"}
"""The fields of https://platform.openai.com/docs/api-reference/completions/create."""

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
        *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
        *("no_stop_trim", "return_token_ids", "return_tokens_as_token_ids"),
        # with whom cached prompts are shared: it only ever narrows that
        "cache_salt",
    }
)
"""Fields of vLLM (https://docs.vllm.ai/en/latest/serving/openai_compatible_server), SGLang
(https://docs.sglang.ai/basic_usage/openai_api_completions.html) and llama.cpp (tools/server/README.md) that
change neither how much is generated nor where data goes."""

_TOKENIZE: Final = frozenset(
    {
        *("model", "prompt", "messages", "tools", "tokens", "return_token_strs"),
        *("add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    }
)
"""The fields of vLLM's `/tokenize` and `/detokenize`; there are none of OpenAI's."""
_PASSED: Final[Mapping[type[Struct], frozenset[str]]] = {
    ChatRequest: OPENAI_CHAT | EXTENSIONS,
    CompletionRequest: OPENAI_COMPLETION | EXTENSIONS,
    TokenizeRequest: _TOKENIZE,
    DetokenizeRequest: _TOKENIZE,
}
_OPTIONS: Final = frozenset({"include_usage", "include_obfuscation", "continuous_usage_stats"})
"""The fields of `stream_options`: OpenAI's, and one of vLLM's that changes what is shown."""

_object: Final = msgspec.json.Decoder(dict[str, Raw] | None)


class Passed(Struct, frozen=True):
    """The fields of one request that an engine of another make is sent."""

    fields: dict[str, Raw]
    """The fields as they came, without those of `MAXIMA`."""
    left_out: tuple[str, ...]
    """The names of the fields that it is not sent, those within `stream_options` too."""


def passed_on(parsed: Parsed[Any]) -> Passed:
    """Choose the fields of a request that an engine of another make is sent."""
    request = parsed.request
    passes = _PASSED[type(request)]
    if isinstance(request, CompletionRequest) and request.best_of not in (None, request.n or 1):
        passes -= {"best_of"}  # as many sequences are computed, and `n` of them were reserved
    fields = {name: value for name, value in parsed.fields.items() if name in passes}
    left_out = [name for name in parsed.fields if name not in passes and name not in MAXIMA]
    if isinstance(request, ChatRequest) and None not in (request.max_tokens, request.max_completion_tokens):
        left_out.append("max_tokens")
    if isinstance(request, GenerationRequest) and request.stream_options is not None:
        options = _object.decode(fields["stream_options"]) or {}
        known = {name: value for name, value in options.items() if name in _OPTIONS}
        if len(known) < len(options):
            fields["stream_options"] = Raw(msgspec.json.encode(known))
            left_out += [f"stream_options.{name}" for name in options if name not in _OPTIONS]
    return Passed(fields, tuple(left_out))


def with_usage(options: Raw | None) -> Raw:
    """`stream_options` that ask for usage, besides what the caller's own ask for."""
    asked = {} if options is None else _object.decode(options) or {}
    return Raw(msgspec.json.encode({**asked, "include_usage": True}))
