"""Fields that an object in a request's body has twice. Readers of JSON differ in which of the two counts, so
such a body is refused.

What is decoded of an object has each name once. Encoded again, with its values as they were sent, it is
shorter than it was by a repeated field, by white space and by an escape in a name; nothing makes it longer.
So an object that stays as long as it was, as SDKs send it, has no field twice. Others are looked at field by
field, which takes several times as long.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from msgspec import Raw

from shared.wire.errors import InvalidJson

PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""The names that are repeated to the caller who sent them, in headers too."""


class Key:
    """A name, equal only to itself, so that a repeated name does not hide the first."""

    __slots__ = ("name",)

    def __init__(self, _kind: type[Any], name: str) -> None:
        """The arguments are those of a `dec_hook`."""
        self.name = name


_encode: Final = msgspec.json.Encoder().encode
_decode_pairs: Final = msgspec.json.Decoder(list[dict[Key, Raw]] | dict[Key, Raw], dec_hook=Key).decode


def stays(raw: Raw, decoded: object) -> bool:
    """True if an object, or an array of objects, is as long as what is made of it again: then none has a
    field twice. `decoded` is what `raw` was decoded to, with the fields' values as they were sent."""
    return len(_encode(decoded)) == len(raw)


def refuse_repeated(path: str, raw: Raw) -> None:
    """Look field by field. Raises InvalidJson where an object, or one of an array of objects, has a field
    twice. `path` is its name."""
    objects = _decode_pairs(raw)
    if isinstance(objects, dict):
        _refuse_pairs(path, objects)
        return
    for at, pairs in enumerate(objects):
        _refuse_pairs(f"{path}[{at}]", pairs)


def _refuse_pairs(path: str, pairs: dict[Key, Raw]) -> None:
    seen: set[str] = set()
    for key in pairs:
        if key.name in seen:
            name = f"{path}.{key.name}" if PLAIN_NAME.fullmatch(key.name) else path
            raise InvalidJson("A field is given twice.", param=name)
        seen.add(key.name)
