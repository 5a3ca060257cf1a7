"""OpenAI's `prediction`: the text that a chat's caller expects most of the answer to be, as of a file that is
to be edited.

It is read in its shape alone, as engines of other makes may have kinds of their own. Ours verify its tokens
as drafts (`engine.core.drafts.prediction`): it changes no token of the answer, and what of it turns out wrong
is charged like the answer's tokens, up to as many as it has. So that many are reserved for each choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw

from shared.apis.chat_messages import TextPart
from shared.apis.nothing import unsupported
from shared.wire.errors import InvalidRequest
from shared.wire.shapes import Unshown

PREDICTION: Final = "prediction"
PREDICTION_LEN_MAX: Final = 128 * 1024
"""Bytes of its text."""

_object: Final = msgspec.json.Decoder(dict[str, Raw]).decode


class Prediction(Unshown):
    type: str
    """`content`."""
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The text of a prediction that was checked."""
        if isinstance(self.content, str):
            return self.content
        return "".join([part.text for part in self.content])


def check_prediction(prediction: Prediction) -> None:
    """Check a prediction for our engines. Raises InvalidRequest, and UnsupportedParameter for a kind that
    they do not know."""
    if prediction.type != "content":
        raise unsupported(f"{PREDICTION}.type")
    text = prediction.text
    if len(text) > PREDICTION_LEN_MAX or len(text.encode()) > PREDICTION_LEN_MAX:
        where = f"{PREDICTION}.content"
        raise InvalidRequest(f"{where} must have at most {PREDICTION_LEN_MAX} bytes.", param=where)


def known_prediction(prediction: Prediction, raw: Raw) -> tuple[Raw, list[str]]:
    """The prediction without what its shape does not have, as JSON, and the names of that. `prediction` is
    what `raw` was decoded to."""
    encoded = msgspec.json.encode(prediction)
    if len(encoded) == len(raw):  # nothing makes it longer, so nothing was left out
        return raw, []
    fields = _object(raw)
    surplus = dict.fromkeys(_surplus(PREDICTION, fields, Prediction.__struct_fields__))
    if not isinstance(prediction.content, str):
        for part in msgspec.json.decode(fields["content"], type=list[dict[str, Raw]]):
            surplus |= dict.fromkeys(_surplus(f"{PREDICTION}.content", part, ("type", "text")))
    return Raw(encoded), [*surplus]


def _surplus(path: str, fields: Mapping[str, Raw], known: tuple[str, ...]) -> list[str]:
    return [f"{path}.{name}" for name in fields if name not in known]
