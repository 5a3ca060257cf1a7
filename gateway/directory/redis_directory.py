"""The directory in Redis, for all gateways together. `directory.lua` says which keys it has there.

Rules:

1. An entry is replaced only if it is still the one that was read: two operators' changes never overwrite each
   other. An edit that does not depend on what the operator saw is made again on what is there now.
2. A change has a name, its head. So it is sent again where its answer is lost, and is made once. Where that
   answer is lost as well, the operator is told that nobody knows. A change that comes `MADE_WITHIN_S` after
   the reading of its entry, since a server stood still, is not made. What is found after a lost race is
   another's, also where it reads the same.
3. A directory has a name, its epoch, for life. To find none, or another one, where there was one before means
   that the data was lost: nothing is read from that, and nothing written to it. The first gateway that finds
   the loss notes it in Redis, so that gateways which start later do not take it for a directory without keys.
4. No request of a client's ever waits for this.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from gateway.config.redis import RedisConfig
from gateway.config.whole import KeyConfig
from gateway.directory.accounts import AccountsReader, Kind
from gateway.directory.entries import (
    ENTRY_LEN_MAX,
    KEYS_MAX,
    MADE_WITHIN_S,
    TENANTS_MAX,
    TYPES,
    AnswerLost,
    Change,
    Edit,
    R,
    Record,
    check_match,
    decode,
    encode,
    kind_of,
    not_found,
    place_of,
    salvage,
    unreadable,
)
from gateway.redis.link import RedisUnavailable, ScriptMissing, Word, packed
from gateway.redis.links import Links, links_of, tag_of
from shared.process import logs
from shared.process.setting_values import ConfigError
from shared.wire.errors import Conflict, DirectoryUnavailable, NotFound
from shared.wire.ids import TenantId

SCRIPT: Final = (Path(__file__).parent / "directory.lua").read_text()
SCRIPT_SHA: Final = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
"""Its name among the scripts that a server has cached."""
TAG: Final = TenantId("~directory")
"""The hash tag of all keys in Redis. No tenant can have this id."""
TIMEOUT_S: Final = 1.0
"""The time limit of a call: no request waits for it."""
ATTEMPTS_MAX: Final = 5
"""How often an edit is made on what is there now, when another change came first."""
FULL: Final = {"keys": KEYS_MAX, "tenants": TENANTS_MAX}

log = logs.get(__name__)


class DirectoryLost(RedisUnavailable):
    """Redis has no directory, or another one, where there was one before."""


class DirectoryPlace(Struct, frozen=True):
    """How much of a directory's history is known."""

    epoch: str = ""
    """The name of the directory; empty for none."""
    version: int = 0
    """The number of changes."""
    head: str = ""
    """The name of the last of them: after a failover, another change may have its number."""


RawEntry = tuple[Kind, str, bytes]
"""An entry's kind, id and JSON, which is empty where there is no entry."""


class DirectoryNews(Struct, frozen=True):
    """The changes since a place."""

    place: DirectoryPlace
    changes: Sequence[RawEntry] | None
    """None when the changes are not known one by one: all has to be read."""


def open_directory(config: RedisConfig, accounts: AccountsReader, env: Mapping[str, str]) -> RedisDirectory:
    """The directory on the server of `[redis]`, not yet connected. Raises ConfigError."""
    links = links_of(replace(config, timeout_s=TIMEOUT_S), env)
    return RedisDirectory(links, config.key_prefix, accounts)


class RedisDirectory:
    """A `Directory`."""

    def __init__(self, links: Links, prefix: str, accounts: AccountsReader) -> None:
        """`prefix` begins every key in Redis. What the file of `accounts` has cannot be changed here."""
        self._links: Final = links
        self._accounts: Final = accounts
        self._keys: Final = tuple(
            f"{prefix}:{{{tag_of(TAG)}}}:{name}"
            for name in ("state", "log", "keys", "tenants", "keys-in-order", "tenants-in-order")
        )
        self._knows_servers = False
        self.epoch = ""
        """The name of the directory that changes are for; empty for any."""

    async def aclose(self) -> None:
        """Close the connections."""
        await self._links.aclose()

    # -- as `Directory` has it --------------------------------------------------------------------

    async def page(self, kind: Kind, tenant: str | None, after: str, limit: int) -> Sequence[Record]:
        found: list[Record] = []
        while len(found) < limit:
            reply = await self._ask("list", kind, tenant or "", after, limit - len(found))
            entries = list(zip(reply[1::2], reply[2::2], strict=True))
            if not entries:
                break
            for place, raw in entries:
                with contextlib.suppress(Conflict):  # the log has it
                    found += filter(None, [_read(TYPES[kind], place, raw)])
            after = entries[-1][0]
        return found

    async def get(self, kind: Kind, id_: str) -> Record | None:
        [_, raw] = await self._ask("get", kind, id_)
        return _read(TYPES[kind], id_.encode(), raw)

    async def change(self, type_: type[R], id_: str, edit: Edit[R] | None, if_match: str | None) -> Change:
        kind = kind_of(type_)
        if self._accounts.is_in_file(kind, id_):
            raise Conflict("It is declared in the gateway's file, and can be changed only there.")
        for _ in range(ATTEMPTS_MAX):
            [read_ms, raw] = await self._ask("get", kind, id_)
            change = _changed(type_, id_, raw, edit, if_match)
            not_after_ms = read_ms + round(MADE_WITHIN_S * 1000)
            if change.after == change.before or await self._put(kind, id_, raw, change, not_after_ms):
                return change
        raise Conflict("Others change it all the time. Try again.")

    async def _put(self, kind: Kind, id_: str, raw: bytes, change: Change, not_after_ms: int) -> bool:
        """True if the entry was still `raw`, and the change is made now."""
        new = b"" if change.after is None else encode(change.after)
        if len(new) > ENTRY_LEN_MAX:
            raise ConfigError([f"it is longer than {ENTRY_LEN_MAX} bytes"])
        record = change.after or change.before
        assert record is not None
        tenant = ""
        if isinstance(record, KeyConfig) and not self._accounts.is_in_file("tenants", record.tenant):
            tenant = record.tenant
        names = self.epoch, secrets.token_hex(8), secrets.token_hex(8)
        place, bounds = place_of(record), (FULL[kind], not_after_ms)
        reply = await self._ask_again(change, "put", kind, id_, raw, new, place, tenant, *names, *bounds)
        match reply[1]:
            case b"late":
                message = "Redis was asked too late: nothing was changed."
                raise DirectoryUnavailable(message, retry_after_s=1.0)
            case b"lost":
                raise DirectoryUnavailable("Redis has lost the directory: it has to be restored.")
            case b"used":
                raise Conflict("The tenant still has keys. Delete them first.")
            case b"full":
                raise Conflict(f"There are {FULL[kind]} {kind} already, and no more are allowed.")
            case b"tenant":
                raise ConfigError([f"tenant: there is no tenant {tenant!r}"])
        return bool(reply[1] == b"ok")

    # -- for the follower -------------------------------------------------------------------------

    async def since(self, place: DirectoryPlace, limit: int) -> DirectoryNews:
        """At most `limit` changes after a place. Raises RedisUnavailable, and DirectoryLost."""
        reply = await self._call("since", place.epoch, place.version, place.head, limit)
        if reply[1] == b"lost":
            raise DirectoryLost("Redis has lost the directory")
        reached = DirectoryPlace(
            reply[2].decode(errors="replace"), reply[3], reply[4].decode(errors="replace")
        )
        if reply[1] == b"load":
            return DirectoryNews(reached, None)
        words = zip(reply[5::3], reply[6::3], reply[7::3], strict=True)
        return DirectoryNews(reached, [(_kind(kind), _shown(id_), raw) for kind, id_, raw in words])

    async def scan(self, kind: Kind, cursor: bytes, count: int) -> tuple[bytes, Sequence[RawEntry]]:
        """About `count` entries, and the cursor of the next ones; it is `b"0"` before the first and after the
        last. Raises RedisUnavailable."""
        reply = await self._call("scan", kind, cursor, count)
        entries = zip(reply[2::2], reply[3::2], strict=True)
        return reply[1], [(kind, _shown(id_), raw) for id_, raw in entries]

    # -- calls ------------------------------------------------------------------------------------

    async def _ask(self, *words: Word) -> list[Any]:
        """The reply to a call that an operator waits for. Raises DirectoryUnavailable."""
        try:
            return await self._call(*words)
        except RedisUnavailable as error:
            raise _unavailable(error) from None

    async def _ask_again(self, change: Change, *words: Word) -> list[Any]:
        """Ask for a change, and once more under its name where the answer is lost: it is made once (rule 2).
        Raises AnswerLost."""
        try:
            return await self._call(*words)
        except RedisUnavailable as error:
            if not error.may_be_done:
                raise _unavailable(error) from None
        try:
            return await self._call(*words)
        except RedisUnavailable as error:
            raise AnswerLost(change, str(error)) from None

    async def _call(self, *words: Word) -> list[Any]:
        """The reply to one operation. Raises RedisUnavailable."""
        if not self._knows_servers:
            await self._links.refresh()
            self._knows_servers = True
        asked: tuple[Word, ...] = (len(self._keys), *self._keys, *words)
        try:
            link = self._links.of(TAG)
            if not link.is_up:
                await link.probe("EVAL", SCRIPT, len(self._keys), *self._keys, "probe")
            try:
                reply: list[Any] = await link.call(packed(("EVALSHA", SCRIPT_SHA, *asked)))
            except ScriptMissing:  # so nothing was done
                reply = await link.call(packed(("EVAL", SCRIPT, *asked)))
        except RedisUnavailable:  # another node of a Cluster may have the keys now
            self._knows_servers = False
            raise
        return reply


def _unavailable(error: RedisUnavailable) -> DirectoryUnavailable:
    message = "Redis cannot be asked for keys and tenants at the moment."
    return DirectoryUnavailable(message, detail=str(error), retry_after_s=1.0)


def _changed(type_: type[R], id_: str, raw: bytes, edit: Edit[R] | None, if_match: str | None) -> Change:
    """The entry in Redis before a change, and after it, by the rules of `Directory.change`. Raises what that
    does."""
    try:
        before, refusal = _read(type_, id_.encode(), raw), None
    except Conflict as error:
        told = salvage(type_, raw) if edit is None else None
        before, refusal = (told if told is not None and told.id == id_ else None), error
    check_match(before, if_match)
    if edit is None and before is not None:
        return Change(before, None)
    try:
        if edit is None:
            raise not_found(kind_of(type_), id_)
        return Change(before, edit(before))
    except NotFound:
        if refusal is not None:
            raise refusal from None
        raise


def _read(type_: type[R], at: bytes, raw: bytes) -> R | None:
    """The entry at a place or of an id. None where there is none. Raises Conflict where it cannot be
    read."""
    try:
        found = decode(type_, raw) if raw else None
        if found is None or found.id.encode() == at.rpartition(b"/")[2]:
            return found
        problems = ["it has another id than its place"]
    except ConfigError as error:
        problems = list(error.problems)
    log.warning("directory.entry_unreadable", at=_shown(at), problems=problems)
    raise unreadable(problems)


def _shown(id_: bytes) -> str:
    """An id in Redis as text. One that is none of ours is shown in part."""
    return id_[:64].decode("ascii", "backslashreplace")


def _kind(word: bytes) -> Kind:
    return "keys" if word == b"keys" else "tenants"
