"""The list of the models that a caller may use, as it is sent.

A list is as long as the models are many, and is asked for without any quota. So it is worked out and encoded
once for all callers with the same rights, and kept until the configuration was read again, or an engine tells
something else of itself.
"""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.config.whole import ModelConfig
from gateway.identity.caller import Principal
from gateway.identity.tenant import Rights, TenantPolicy
from gateway.relay.engines import Engines
from shared.apis.models import Model, ModelInfoList, ModelList

KEPT_LEN_MAX: Final = 8 * 1024 * 1024
"""Bytes of the lists that are kept, beside the newest; the oldest make room."""


class ModelLists:
    """The lists, by their readers' rights, and by whose they are."""

    def __init__(self, engines: Engines, started_s: int, kept_len_max: int = KEPT_LEN_MAX) -> None:
        """`started_s` stands in for when a model was made while its engine has not told it."""
        self._engines: Final = engines
        self._started_s: Final = started_s
        self._kept_len_max: Final = kept_len_max
        self._kept: dict[tuple[Rights, bool], bytes] = {}
        """The oldest first."""
        self._kept_len = 0
        self._of: tuple[object, int] = (None, 0)
        """The models that they are of, and the number of changes of what engines tell by then."""

    def all(self, tenants: TenantPolicy, principal: Principal, is_anthropics: bool = False) -> bytes:
        """The list of all that this caller may use, in JSON: OpenAI's, or Anthropic's."""
        models, changes = self._of
        if models is not tenants.models or changes != self._engines.changes:
            self._kept, self._kept_len = {}, 0
            self._of = tenants.models, self._engines.changes
        wanted = tenants.rights(principal), is_anthropics
        if (known := self._kept.get(wanted)) is not None:
            return known
        entries = [self.one(name, model) for name, model in tenants.visible(principal)]
        listed = ModelInfoList.of(entries) if is_anthropics else ModelList(data=entries)
        encoded = msgspec.json.encode(listed)
        self._keep(wanted, encoded)
        return encoded

    def one(self, name: str, model: ModelConfig) -> Model:
        """The entry of one model, by one of its names."""
        profile = self._engines.of(model).profile
        if profile is None:
            return Model.of(name, self._started_s, None)
        created = self._started_s if profile.created is None else profile.created
        return Model.of(name, created, profile.room, profile.capabilities)

    def _keep(self, wanted: tuple[Rights, bool], encoded: bytes) -> None:
        while self._kept and self._kept_len + len(encoded) > self._kept_len_max:
            self._kept_len -= len(self._kept.pop(next(iter(self._kept))))
        self._kept[wanted] = encoded
        self._kept_len += len(encoded)
