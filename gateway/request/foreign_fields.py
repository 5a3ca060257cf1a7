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
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from gateway.config.whole import ANY, ModelConfig
from gateway.endpoints.endpoint import Asked
from shared.apis.messages import ImagePart
from shared.apis.prompt import ChatPrompt, PromptForm
from shared.apis.validation import Parsed
from shared.wire.errors import InvalidRequest

_DATA_URL: Final = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,")
_BASE64: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
_HTTP_URL: Final = re.compile(r"https?://([a-z0-9.-]{1,253})(?::[0-9]{1,5})?(?:[/?][!-\[\]-~]{0,8192})?")
"""What all readers of URLs take for the same host: no user, no escapes, and none of the characters that some
of them repair."""

_SALT: Final = "cache_salt"
"""The field that is sent with another value than the caller's, or not at all."""


# -- images ---------------------------------------------------------------------------------------


def check_images(prompt: PromptForm | None, hosts: Sequence[str]) -> None:
    """Raises InvalidRequest for an image in a chat that is neither in the request nor on one of these
    hosts."""
    if not isinstance(prompt, ChatPrompt):
        return
    for index, message in enumerate(prompt.messages):
        for at, part in enumerate(message.parts):
            if isinstance(part, ImagePart) and (problem := _problem(part.image_url.url, hosts)):
                where = f"{prompt.param}[{index}].content[{at}].image_url.url"
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
    """The fields as they came, without those of the endpoint's `maxima`."""
    left_out: tuple[str, ...]
    """The names of the fields that it is not sent, those within others too."""


def shaped(parsed: Parsed[Any]) -> dict[str, Raw]:
    """The fields of a request, its messages without what their shapes do not have."""
    if not parsed.shapeless:
        return parsed.fields
    return {**parsed.fields, "messages": Raw(msgspec.json.encode(parsed.request.messages))}


def passed_on(asked: Asked, model: ModelConfig) -> Passed:
    """Choose the fields of a request that an engine of another make is sent. Raises InvalidRequest for what
    it may not be sent at all."""
    endpoint, parsed, request = asked.endpoint, asked.parsed, asked.parsed.request
    passes, set_here = endpoint.passes, {*endpoint.maxima, _SALT}
    if model.pass_fields:
        passes = passes.union(model.pass_fields)
    if (surplus := request.surplus) is not None:
        passes -= {surplus}  # so many sequences are computed, and `n` of them were reserved
    fields = {n: value for n, value in shaped(parsed).items() if n in passes and n not in set_here}
    left_out = [name for name in parsed.fields if name not in passes and name not in set_here]
    left_out += parsed.shapeless
    if asked.generation is not None:
        sent = asked.generation.max_tokens_param
        left_out += [n for n in endpoint.maxima if n != sent and getattr(request, n, None) is not None]
    check_images(request.prompt_form, model.image_hosts)
    for name, clean in endpoint.nested:
        if name in fields:
            fields[name] = clean(fields[name], left_out)
    return Passed(fields, tuple(left_out))
