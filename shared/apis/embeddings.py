"""OpenAI's embeddings: `/v1/embeddings`. Nothing is generated: a request costs the tokens of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from msgspec import Meta, Raw, Struct

from shared.apis.generation import GenerationRequest
from shared.apis.nothing import Nothing
from shared.apis.prompt import Prompt, TextPrompt
from shared.wire.errors import InvalidRequest
from shared.wire.shapes import TOKENS_MAX, Unshown

INPUTS_MAX: Final = 2048
"""The most inputs of a request, as OpenAI has it."""
DIMENSIONS_MAX: Final = 65_536


class EmbeddingsRequest(GenerationRequest, kw_only=True):
    path: ClassVar[str] = "/v1/embeddings"
    operation: ClassVar[str] = "embeddings"
    prompt_param: ClassVar[str] = "input"
    answers: ClassVar[bool] = False
    ability: ClassVar[str] = "embeddings"
    nothing: ClassVar[Mapping[str, Nothing]] = {"add_special_tokens": (True,)}

    input: Prompt
    """A text, several of them, the token ids of one, or those of several: 2,048 at most."""
    encoding_format: Literal["float", "base64"] | None = None
    """`float`, the default, or `base64`: the same numbers as little-endian float32."""
    dimensions: Annotated[int, Meta(ge=1, le=DIMENSIONS_MAX)] | None = None
    """The length of each vector, of models that can be cut."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=TOKENS_MAX)] | None = None
    """vLLM's extension: of an input that is longer the first tokens are taken, so many, or with -1 as many as
    the model takes; special tokens that its tokenizer adds count. Without it, such an input is an error."""
    user: str | None = None

    @property
    def prompt_form(self) -> TextPrompt:
        return TextPrompt(self.input, "input", cut=self.truncate_prompt_tokens, is_answered=False)

    def check(self, fields: Mapping[str, Raw]) -> None:
        if self.stream:
            raise InvalidRequest("Embeddings are not streamed.", param="stream")
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens must be -1, or at least 1."
            raise InvalidRequest(message, param="truncate_prompt_tokens")
        if self.prompt_form.count() > INPUTS_MAX:
            raise InvalidRequest(f"input must have at most {INPUTS_MAX} items.", param="input")
        items = [self.input] if isinstance(self.input, str) or isinstance(self.input[0], int) else self.input
        if not all(items):
            raise InvalidRequest("input must have no item that is empty.", param="input")


class Embedding(Unshown):
    index: int
    embedding: list[float] | str
    """Its numbers, or these in base64."""
    object: Literal["embedding"] = "embedding"


class EmbeddingsUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Unshown):
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"
