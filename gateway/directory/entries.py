"""The entries of a directory: tenants and keys, the interface of what keeps them, and their JSON.

An entry is a value of the very type that the configuration file has. Its JSON is canonical: every field, in
the order of its declaration.
"""

from __future__ import annotations

import hashlib
import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Struct

from gateway.config.edge import OperatorKeyConfig
from gateway.config.quotas import ModelLimits, QuotaLimits
from gateway.config.whole import KeyConfig, TenantConfig
from gateway.directory.accounts import Kind
from shared.process.setting_values import ConfigError, load
from shared.wire.errors import Conflict, NotFound, PreconditionFailed
from shared.wire.undecodable import UNDECODABLE

KEYS_MAX: Final = 100_000
"""The most keys in Redis. A file has `gateway.config.edge.ENTRIES_MAX` at most."""
TENANTS_MAX: Final = 10_000
ENTRY_LEN_MAX: Final = 64 * 1024
"""Bytes of an entry's JSON."""
PATH_LEN_MAX: Final = 256
"""Characters of the end of a path that is told, such as `limits.concurrent`. The body's sender made it up."""
PAGE_MAX: Final = 200
"""The most entries on one page of a list."""
MADE_WITHIN_S: Final = 5.0
"""After its entry was read, a change is made within this time or never, by the clock of what keeps the
entries, in seconds."""
UNKNOWN: Final = (
    "Nobody knows whether the change was made: what keeps it does not say. It is there by now, or within "
    f"{MADE_WITHIN_S:g} s, or never will be. Read it again before you try again."
)
"""The answer to such a change."""
OUTCOME_UNKNOWN: Final[Mapping[str, str]] = {"outcome": "unknown"}
"""The further field of its audit line."""
NO_VARIABLES: Final = "_"
"""The prefix of no variables: an entry is not set by any."""
ANY_VERSION: Final = "*"
"""The value of `if_match` that fits whatever is there."""

Record = TenantConfig | KeyConfig | OperatorKeyConfig
R = TypeVar("R", bound=Record)
Edit = Callable[[R | None], R | None]
"""Makes an entry of the one that is there; None is no entry. It may be called again, when another change came
first. Raises ApiError or ConfigError to leave all as it is."""
TYPES: Final[Mapping[Kind, type[Record]]] = {"tenants": TenantConfig, "keys": KeyConfig}


class Change(Struct, frozen=True):
    """A change that was made: an entry before it and after it. None is no entry."""

    before: Record | None
    after: Record | None


class AnswerLost(Exception):
    """A change that was made, or was not: what keeps the entries was asked for it, and does not say."""

    def __init__(self, change: Change, problem: str) -> None:
        super().__init__(problem)
        self.change: Final = change
        """The change that was asked for."""


class Directory(Protocol):
    """Keeps tenants and keys. Its methods raise DirectoryUnavailable while it cannot be asked."""

    async def page(self, kind: Kind, tenant: str | None, after: str, limit: int) -> Sequence[Record]:
        """At most `limit` entries in the order of `place_of`, those behind the place `after`. `tenant`
        restricts keys to those of one tenant."""
        ...

    async def get(self, kind: Kind, id_: str) -> Record | None:
        """An entry. None when there is none of this id. Raises Conflict where it cannot be read."""
        ...

    async def change(self, type_: type[R], id_: str, edit: Edit[R] | None, if_match: str | None) -> Change:
        """Change one entry, or nothing. To `edit`, one that cannot be read is none; where `edit` is None, the
        entry is deleted, whether it can be read or not.

        Raises:
            NotFound: there is none to delete.
            PreconditionFailed: the entry is not the one that `if_match`, its etag, names.
            Conflict: the tenant still has keys, there are too many entries, the entry cannot be changed, or
                `edit` needs to know one that cannot be read.
            ConfigError: the entry contradicts others.
            AnswerLost: nobody knows whether the change was made.
            what `edit` raises.
        """
        ...


class KeyView(Struct, frozen=True):
    """A key as operators see it: without the hashes of its secrets."""

    id: str
    tenant: str
    models: tuple[str, ...]
    endpoints: tuple[str, ...]
    limits: QuotaLimits
    model_limits: tuple[ModelLimits, ...]
    env: str
    labels: tuple[str, ...]
    created: datetime | None
    expires: datetime | None
    disabled: bool
    previous_expires: datetime | None
    """When the secret before the last replacement stops working. None without one."""


class OperatorKeyView(Struct, frozen=True):
    """An operator's key, without the hashes of its secrets."""

    id: str
    labels: tuple[str, ...]
    created: datetime | None
    expires: datetime | None
    disabled: bool
    previous_expires: datetime | None
    """When the secret before the last replacement stops working. None without one."""


View = TenantConfig | KeyView | OperatorKeyView
NOUNS: Final[Mapping[Kind, str]] = {"tenants": "tenant", "keys": "key", "admin.keys": "operator's key"}


def kind_of(type_: type) -> Kind:
    """The kind of the entries of a type."""
    if type_ is OperatorKeyConfig:
        return "admin.keys"
    return "keys" if type_ is KeyConfig else "tenants"


def view_of(record: Record) -> View:
    """An entry as operators see it."""
    match record:
        case TenantConfig():
            return record
        case KeyConfig():
            return msgspec.convert(record, KeyView, from_attributes=True)
        case OperatorKeyConfig():
            return msgspec.convert(record, OperatorKeyView, from_attributes=True)


def place_of(record: Record) -> str:
    """The place of an entry in lists: by the tenant's id, then by its own."""
    return f"{record.tenant}/{record.id}" if isinstance(record, KeyConfig) else record.id


def not_found(kind: Kind, id_: str) -> NotFound:
    """The answer where there is no such entry."""
    return NotFound(f"There is no {NOUNS[kind]} {id_[:64]!r}.")


def unreadable(problems: Sequence[str]) -> Conflict:
    """The answer where there is an entry, and this version does not know what it says."""
    return Conflict(f"A later version may have written it, since it cannot be read: {problems[0]}.")


# -- JSON -----------------------------------------------------------------------------------------


def encode(record: Record) -> bytes:
    """The JSON of an entry."""
    return msgspec.json.encode(record)


def decode(type_: type[R], raw: bytes) -> R:
    """The entry that a JSON text is. Raises ConfigError, which names all that is wrong with it.

    What this version wrote is read fast. Anything else, such as the entry of another version, is checked
    field by field: one with a field that is not known here is refused, since the field may restrict it.
    """
    try:
        found = msgspec.json.decode(raw, type=type_)
        if encode(found) == raw:
            return found
    except (*UNDECODABLE, ConfigError):
        pass  # what is wrong with it is said below
    return parse(type_, decode_object(raw))


def salvage(type_: type[R], raw: bytes) -> R | None:
    """The entry that the known fields of a JSON text make, where `decode` refuses it for the others. None
    where they make none."""
    try:
        told = decode_object(raw)
    except ConfigError:
        return None
    found = {one.name: told[one.name] for one in fields(type_) if told.get(one.name) is not None}
    while True:
        try:
            return load(type_, found, {}, NO_VARIABLES)
        except ConfigError as error:
            bad = {_first_name(problem) for problem in error.problems} & found.keys()
            if not bad:
                return None
            found = {name: value for name, value in found.items() if name not in bad}


class NoObject(ConfigError):
    """The error of a body that is no JSON object, or too long a one. Its one problem is that of no field."""


def decode_object(raw: bytes) -> Mapping[str, Any]:
    """The fields of a JSON object, in which no object has a name twice. Raises ConfigError, and NoObject."""
    if len(raw) > ENTRY_LEN_MAX:
        raise NoObject([f"it is longer than {ENTRY_LEN_MAX} bytes"])
    raw = raw.removeprefix(BOM_UTF8)
    try:
        found: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
        members = json.loads(raw, object_pairs_hook=_Members)
    except msgspec.DecodeError as error:  # it names a place and no value
        raise NoObject([f"it is no JSON object ({error})"]) from None
    except (ValueError, RecursionError):
        raise NoObject(["it is no JSON object"]) from None
    _check_unique(members)
    return found


class _Members(list[tuple[str, Any]]):
    """The members of a JSON object as they were sent, repeated ones too."""


def _check_unique(members: _Members) -> None:
    """Raises ConfigError where an object has a name twice: readers differ in which one counts. Outer objects
    are looked at before those within."""
    left: list[tuple[str, list[Any]]] = [("", members)]  # arrays and objects, each with its path
    for path, value in left:
        if isinstance(value, _Members):
            prefix = path and f"{path}."
            for name, count in Counter(name for name, _ in value).items():
                if count > 1:
                    raise ConfigError([f"{prefix}{name[:64]}: is given {count} times"])
            inner = [(f"{prefix}{name[:64]}", one) for name, one in value]
        else:
            inner = [(f"{path}[{at}]", one) for at, one in enumerate(value)]
        left += [(within[-PATH_LEN_MAX:], one) for within, one in inner if isinstance(one, list)]


def parse(type_: type[R], given: Mapping[str, Any], check: Callable[[R], Iterator[str]] | None = None) -> R:
    """The entry that fields make, which `check` has nothing against. Null stands for an unset field. Raises
    ConfigError with all that is wrong, also with what `check` finds in the fields that can be read."""
    given = {name: value for name, value in given.items() if value is not None}
    problems: list[str] = []
    left_out: set[str] = set()  # fields with problems: the others are looked at again without them
    while True:
        try:
            found = load(type_, given, {}, NO_VARIABLES)
        except ConfigError as error:
            problems += [problem for problem in error.problems if _first_name(problem) not in left_out]
            bad = {_first_name(problem) for problem in error.problems} & given.keys()
            if not bad:
                raise ConfigError(problems) from None
            left_out |= bad
            given = {name: value for name, value in given.items() if name not in bad}
            continue
        problems += [] if check is None else check(found)
        if problems:
            raise ConfigError(problems)
        return found


def _first_name(problem: str) -> str:
    """The field that a problem is about: `limits` of `limits.concurrent: must ...`."""
    return problem.partition(":")[0].partition(".")[0].partition("[")[0]


def etag_of(record: Record) -> str:
    """A name of an entry's content, secrets included, which differs from that of any other content."""
    return hashlib.sha256(encode(record)).hexdigest()[:32]


def is_named(record: Record | None, etags: str) -> bool:
    """True if a list of etags with commas between, or `ANY_VERSION`, names an entry's content (RFC 9110
    section 13.1). Nothing names an entry that is not there."""
    if record is None or etags == ANY_VERSION:
        return record is not None
    return etag_of(record) in [etag.strip(' \t"') for etag in etags.split(",")]


def check_match(record: Record | None, if_match: str | None) -> None:
    """Raises PreconditionFailed when `if_match` does not name the entry's content."""
    if if_match is not None and not is_named(record, if_match):
        raise PreconditionFailed("It has changed since it was read. Read it again, and decide anew.")
