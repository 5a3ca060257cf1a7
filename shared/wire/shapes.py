"""The common part of the shapes of all APIs: their bounds, and a `repr` without text."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

BODY_LEN_MAX: Final = 8 * 1024 * 1024
MESSAGES_MAX: Final = 2048
ITEMS_MAX: Final = 2 * MESSAGES_MAX
"""Bound on the items of a response's input: an answer of several parts is as many of them."""
TOOLS_MAX: Final = 1024
IMAGES_MAX: Final = 64
"""Bound on the images of a chat."""
PROMPTS_MAX: Final = 256
"""Bound on the number of prompts, and on `n` times it, which is the number of sequences of one request."""
CHOICES_MAX: Final = 64
"""Bound on `n`."""
STOP_MAX: Final = 16
STOP_LEN_MAX: Final = 256
STOP_TOKEN_IDS_MAX: Final = 64
LOGPROBS_MAX: Final = 20
LOGIT_BIAS_MAX: Final = 1024
TOKEN_ID_MAX: Final = 2**31 - 1
"""Bound on token ids, above those of any model. The engine knows how many its model has."""
TOKENS_MAX: Final = 2**24
"""Bound on any count of tokens, far above any context length."""
USED_TOKENS_MAX: Final = PROMPTS_MAX * TOKENS_MAX
"""Bound on the tokens of a request's prompts, and on those of its answers. An engine that tells more is not
believed."""

TokenId = Annotated[int, Meta(ge=0, le=TOKEN_ID_MAX)]


class Unshown(Struct):
    """A base of shapes that hold text of prompts or answers: none of it is in their `repr`, which may end up
    in a log or in a traceback."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"
