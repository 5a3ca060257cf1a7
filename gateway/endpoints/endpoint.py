"""An endpoint: all in which one API differs from another at the gateway. Every stage is the same for all."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType

from msgspec import Raw, Struct

from gateway.endpoints.dialect import CHUNKS, Dialect
from gateway.endpoints.passing import MAXIMA, NESTED, Nested, with_usage
from shared.apis.generation import GenerationRequest
from shared.apis.request import Request
from shared.apis.validation import Parsed


class Endpoint(Struct, frozen=True):
    shape: type[Request]
    answer: type[Struct]
    """The shape of its answers."""
    summary: str
    """A sentence for the API's description."""
    passes: frozenset[str]
    """The fields that an engine of another make is sent, of those at the body's top level."""
    event: type[Struct] | UnionType | None = None
    """The shape of a stream's events, or their shapes. None where nothing streams."""
    is_optional: bool = False
    """True if engines of other makes may lack it, so that it says nothing of one that does."""
    generates: bool = True
    """True if its requests cost tokens, which are counted and reserved: they are GenerationRequests."""
    refers: bool = False
    """True if its requests may refer to responses that are kept (`gateway.stored`)."""
    dialect: Dialect = CHUNKS
    maxima: tuple[str, ...] = MAXIMA
    """The fields that state how much may be generated. One of them is sent, with what was reserved. Empty
    where nothing is generated."""
    sent: Mapping[str, object] = {}
    """The fields that an engine of another make is sent with values of ours."""
    asks_usage: bool = True
    """True if an engine of another make tells a stream's usage only where it is asked for it."""
    nested: Nested = NESTED
    """The fields out of which is left what an engine of another make is not sent."""

    @property
    def path(self) -> str:
        return self.shape.path

    def maximum_param(self, request: GenerationRequest, configured: str) -> str:
        """The field by which an engine of another make is told the maximum. `configured` is the model's
        `maximum_field`."""
        return request.max_tokens_param

    def usage_asked(self, request: GenerationRequest, fields: Mapping[str, Raw]) -> dict[str, Raw]:
        """The fields by which an engine of another make is asked for a stream's usage, where the caller did
        not ask. `fields` are those that it is sent."""
        if self.asks_usage and request.stream and not request.include_usage:
            return {"stream_options": with_usage(fields.get("stream_options"))}
        return {}


class Asked(Struct, frozen=True):
    """A request that was read, and where it came to."""

    endpoint: Endpoint
    parsed: Parsed[Request]
    generation: GenerationRequest | None
    """The request, where it generates tokens. None for any other."""
