"""vLLM's `/tokenize` and `/detokenize` at the gateway."""

from __future__ import annotations

from typing import Final

from gateway.endpoints.endpoint import Endpoint
from gateway.endpoints.passing import shaped_tools, template_arguments
from shared.apis.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse

_PASSES: Final = frozenset(
    {
        *("model", "prompt", "messages", "tools", "tokens", "return_token_strs"),
        *("add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    }
)
"""The fields of vLLM's `/tokenize` and `/detokenize`; there are none of OpenAI's."""

_ARGUMENTS: Final = ("chat_template_kwargs", template_arguments)

TOKENIZE: Final = Endpoint(
    shape=TokenizeRequest,
    answer=TokenizeResponse,
    summary="Turn text into token ids.",
    passes=_PASSES,
    is_optional=True,
    generates=False,
    nested=(("tools", shaped_tools), _ARGUMENTS),
)
DETOKENIZE: Final = Endpoint(
    shape=DetokenizeRequest,
    answer=DetokenizeResponse,
    summary="Turn token ids into text.",
    passes=_PASSES,
    is_optional=True,
    generates=False,
    nested=(_ARGUMENTS,),
)
