"""The fields that an engine of another make is sent: those on a list, and no others, at every depth that it
reads.

Rules:

1. What may be generated is what was reserved, and a request goes where operators send it. Engines have fields
   of their own by which a caller could undo both: llama.cpp's `n_predict` wins over `max_tokens`, `best_of`
   and `use_beam_search` compute more sequences than are answered, `kv_transfer_params` names another host.
   Nobody can list all of them, so the list is of what is harmless, or is counted. Operators may add to it
   (`pass_fields`).
2. Messages and tools are sent in OpenAI's shapes for them, and nothing beside: vLLM takes a part of type
   `text` with an `image_url` for an image. A tool that the engine would call itself is refused.
3. Engines fetch what a URL names from where they stand. An image is sent with the request (`data:`), or
   comes from a host that operators allow (`image_hosts`).
4. A field that is left out is named to its caller. Names are compared as they are, since some engines read
   `Max_Tokens` as `max_tokens`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct

from gateway.config import ANY, ModelConfig
from shared.errors import InvalidRequest
from shared.openai import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    ImagePart,
    TokenizeRequest,
    Unshown,
)
from shared.validation import Parsed, invalid_value

MAXIMA: Final = ("max_tokens", "max_completion_tokens")
"""The fields that state how much may be generated. One of them is sent, with what was reserved."""

_SET_HERE: Final = frozenset({*MAXIMA, "cache_salt"})
"""The fields that are sent with another value than the caller's, or not at all."""

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
WITHHELD: Final = frozenset(
    {
        *("audio", "modalities", "moderation", "store", "web_search_options"),
        *("prompt_cache_options", "prompt_cache_retention"),
    }
)
"""Those of them that are not sent: they keep a request or send it elsewhere, or cost what nobody counts."""

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
    ChatRequest: (OPENAI_CHAT - WITHHELD) | EXTENSIONS,
    CompletionRequest: OPENAI_COMPLETION | EXTENSIONS,
    TokenizeRequest: _TOKENIZE,
    DetokenizeRequest: _TOKENIZE,
}
_OPTIONS: Final = frozenset({"include_usage", "include_obfuscation", "continuous_usage_stats"})
"""The fields of `stream_options`: OpenAI's, and one of vLLM's that changes what is shown."""
_SCALARS: Final = (b"true", b"false", b"null")
"""The values that they have."""

_TEMPLATE_OWN: Final = frozenset({"chat_template", "conversation", "messages", "tokenize"})
"""The names in `chat_template_kwargs` by which the caller would write another prompt than its messages'."""
TOOLS_MAX: Final = 1024
_DATA_URL: Final = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,")
_BASE64: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
_HTTP_URL: Final = re.compile(r"https?://([a-z0-9.-]{1,253})(?::[0-9]{1,5})?(?:[/?][!-\[\]-~]{0,8192})?")
"""What all readers of URLs take for the same host: no user, no escapes, and none of the characters that some
of them repair."""

_object: Final = msgspec.json.Decoder(dict[str, Raw] | None)


# -- tools ----------------------------------------------------------------------------------------


class FunctionSpec(Unshown, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: Raw = Raw(b"null")
    strict: bool | None = None


class FunctionTool(Unshown, tag_field="type", tag="function"):
    function: FunctionSpec


class CustomSpec(Unshown, omit_defaults=True):
    name: str
    description: str | None = None
    format: Raw = Raw(b"null")


class CustomTool(Unshown, tag_field="type", tag="custom"):
    custom: CustomSpec


class _Tools(Unshown):
    tools: Annotated[list[FunctionTool | CustomTool], Meta(max_length=TOOLS_MAX)] | None


_decode_tools: Final = msgspec.json.Decoder(_Tools).decode
_raw_tools: Final = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_SPECS: Final = {"function": FunctionSpec, "custom": CustomSpec}


def _known_tools(raw: Raw, left_out: list[str]) -> Raw:
    """The tools without what their shapes do not have, which is added to `left_out`. Raises InvalidRequest
    for a tool that the engine, or its maker, would call itself."""
    try:
        tools = _decode_tools(b'{"tools":%b}' % bytes(raw)).tools
    except msgspec.ValidationError as error:
        raise invalid_value(str(error), _Tools) from None
    encoded = msgspec.json.encode(tools)
    if tools is None or len(encoded) == len(raw):  # nothing makes it longer, so nothing was left out
        return raw
    surplus: dict[str, None] = {}
    for tool in _raw_tools(raw):
        for name, value in tool.items():
            if name == "type":
                continue
            if (spec := _SPECS.get(name)) is None or f'"{name}"'.encode() != bytes(tool["type"]):
                surplus[f"tools.{name}"] = None
                continue
            known = spec.__struct_fields__
            of_spec = _object.decode(value) or {}
            surplus |= dict.fromkeys(f"tools.{name}.{key}" for key in of_spec if key not in known)
    left_out += surplus
    return Raw(encoded)


# -- images ---------------------------------------------------------------------------------------


def check_images(messages: Iterable[ChatMessage], hosts: Sequence[str]) -> None:
    """Raises InvalidRequest for an image that is neither in the request nor on one of these hosts."""
    for index, message in enumerate(messages):
        for at, part in enumerate(message.parts):
            if isinstance(part, ImagePart) and (problem := _problem(part.image_url.url, hosts)):
                where = f"messages[{index}].content[{at}].image_url.url"
                raise InvalidRequest(f"{where} {problem}.", param=where)


def _problem(url: str, hosts: Sequence[str]) -> str | None:
    """The reason why an image cannot be taken from this URL. None where it can."""
    if (data := _DATA_URL.match(url)) is not None:
        rest = url[data.end() :]
        if not rest or not rest.isascii() or rest.encode().translate(None, _BASE64):
            return "must hold an image in base64"
        return None
    if not url.startswith(("http://", "https://")):
        return "must be a data URL of a PNG, JPEG, GIF or WebP image in base64"
    found = _HTTP_URL.fullmatch(url)
    if found is None or not (ANY in hosts or found[1] in hosts):
        return "names a host that this model's images may not come from; send the image as a data URL"
    return None


# -- all of it ------------------------------------------------------------------------------------


class Passed(Struct, frozen=True):
    """The fields of one request that an engine of another make is sent."""

    fields: dict[str, Raw]
    """The fields as they came, without those of `MAXIMA`."""
    left_out: tuple[str, ...]
    """The names of the fields that it is not sent, those within others too."""


def shaped(parsed: Parsed[Any]) -> dict[str, Raw]:
    """The fields of a request, its messages without what their shapes do not have."""
    if not parsed.shapeless:
        return parsed.fields
    return {**parsed.fields, "messages": Raw(msgspec.json.encode(parsed.request.messages))}


def passed_on(parsed: Parsed[Any], model: ModelConfig) -> Passed:
    """Choose the fields of a request that an engine of another make is sent. Raises InvalidRequest for what
    it may not be sent at all."""
    request = parsed.request
    passes = _PASSED[type(request)]
    if model.pass_fields:
        passes = passes.union(model.pass_fields)
    if isinstance(request, CompletionRequest) and request.best_of not in (None, request.n or 1):
        passes -= {"best_of"}  # as many sequences are computed, and `n` of them were reserved
    fields = {n: value for n, value in shaped(parsed).items() if n in passes and n not in _SET_HERE}
    left_out = [name for name in parsed.fields if name not in passes and name not in _SET_HERE]
    left_out += parsed.shapeless
    if isinstance(request, ChatRequest) and None not in (request.max_tokens, request.max_completion_tokens):
        left_out.append("max_tokens")
    if isinstance(request, ChatRequest | TokenizeRequest):
        check_images(request.messages or (), model.image_hosts)
        if "tools" in fields:
            fields["tools"] = _known_tools(fields["tools"], left_out)
    if isinstance(request, GenerationRequest) and request.stream_options is not None:
        _keep("stream_options", fields, left_out, lambda n, value: n in _OPTIONS and bytes(value) in _SCALARS)
    if "chat_template_kwargs" in fields:
        _keep("chat_template_kwargs", fields, left_out, lambda name, _: name not in _TEMPLATE_OWN)
    return Passed(fields, tuple(left_out))


def _keep(name: str, fields: dict[str, Raw], left_out: list[str], keeps: Callable[[str, Raw], bool]) -> None:
    """Leave the names out of an object that are not to be kept."""
    try:
        held = _object.decode(fields[name]) or {}
    except msgspec.ValidationError:
        raise InvalidRequest(f"{name} must be an object.", param=name) from None
    known = {one: value for one, value in held.items() if keeps(one, value)}
    if len(known) < len(held):
        fields[name] = Raw(msgspec.json.encode(known))
        left_out += [f"{name}.{one}" for one in held if one not in known]


def with_usage(options: Raw | None) -> Raw:
    """`stream_options` that ask for usage, besides what the caller's own ask for."""
    asked = {} if options is None else _object.decode(options) or {}
    return Raw(msgspec.json.encode({**asked, "include_usage": True}))
