"""The list of models."""

from __future__ import annotations

from typing import Literal, Self

from msgspec import UNSET, Struct, UnsetType

from shared.wire.room import Room


class Model(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    max_model_len: int | None = None
    """The most tokens that a prompt and its answer may have together."""
    context_len: int | UnsetType = UNSET
    """The tokens that the model's context holds, where the engine's KV cache holds fewer. Left out where
    `max_model_len` is that number."""

    @classmethod
    def of(cls, name: str, created: int, room: Room | None) -> Self:
        """The model as it is listed. `room` is None while that is unknown."""
        if room is None:
            return cls(id=name, created=created)
        is_less = room.most < room.context_len
        context_len = room.context_len if is_less else UNSET
        return cls(id=name, created=created, max_model_len=room.most, context_len=context_len)


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
