"""The directory in the configuration file: its `[[tenants]]`, `[[keys]]` and `[[admin.keys]]`, for all the
gateways that have it.

Rules:

1. A change is made by one process at a time, which holds a lock on the file's folder, on what the file says
   then. An editor takes no lock: what it writes meanwhile is not overwritten.
2. The new file is read as a gateway would read it before it takes the old one's place, whole and in one step:
   a change that contradicts anything else in the file is refused.
3. A change counts from the moment in which the new file is in place. Where the disk does not say that it
   outlives a failure of the machine, it is told as one of which nobody knows whether it was made.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Final

from gateway.config.whole import ENV_PREFIX, KeyConfig, TenantConfig, load
from gateway.directory.accounts import AccountsReader, Kind
from gateway.directory.entries import (
    AnswerLost,
    Change,
    Edit,
    R,
    Record,
    check_match,
    kind_of,
    not_found,
    place_of,
)
from gateway.directory.toml_edit import CannotEdit, document, replace_table
from shared.process.files import file_version, read_bytes
from shared.process.setting_values import FILE_LEN_MAX
from shared.wire.errors import Conflict, DirectoryUnavailable

LOCK_S: Final = 5.0
"""How long another process's change is waited for, in seconds."""
LOCK_AGAIN_S: Final = 0.02


class FileDirectory:
    """A `Directory`. What it shows is what the accounts have read."""

    def __init__(
        self, path: Path | None, accounts: AccountsReader, env: Mapping[str, str] = os.environ
    ) -> None:
        self._path: Final = path
        self._accounts: Final = accounts
        self._env: Final = env

    async def page(self, kind: Kind, tenant: str | None, after: str, limit: int) -> Sequence[Record]:
        found: Sequence[Record] = getattr(self._accounts.config, kind)
        ours = (r for r in found if tenant is None or not isinstance(r, KeyConfig) or r.tenant == tenant)
        return sorted((record for record in ours if place_of(record) > after), key=place_of)[:limit]

    async def get(self, kind: Kind, id_: str) -> Record | None:
        found: Sequence[Record] = getattr(self._accounts.config, kind)
        return next((record for record in found if record.id == id_), None)

    async def change(self, type_: type[R], id_: str, edit: Edit[R] | None, if_match: str | None) -> Change:
        if self._path is None:
            raise Conflict("The gateway has no file that could be edited.")
        change, doubt = await asyncio.to_thread(self._change, self._path, type_, id_, edit, if_match)
        await self._accounts.reload()
        if doubt is not None:
            raise AnswerLost(change, doubt)
        return change

    def _change(
        self, path: Path, type_: type[R], id_: str, edit: Edit[R] | None, if_match: str | None
    ) -> tuple[Change, str | None]:
        """The change, and the reason for which a failure of the machine may undo it (rule 3)."""
        section = kind_of(type_)
        self._require_unset(section)
        doubt = None
        try:
            with _locked(path.resolve().parent):
                seen, text = (
                    file_version(path),
                    read_bytes(path, FILE_LEN_MAX).decode("utf-8-sig"),
                )  # with its line ends
                config = load(document(text), self._env)
                entries: Sequence[R] = attrgetter(section)(config)
                at = next((at for at, record in enumerate(entries) if record.id == id_), None)
                before = None if at is None else entries[at]
                check_match(before, if_match)
                if edit is None and before is None:
                    raise not_found(section, id_)
                after = None if edit is None else edit(before)
                if after is None and type_ is TenantConfig and any(key.tenant == id_ for key in config.keys):
                    raise Conflict("The tenant still has keys. Delete them first.")
                if after != before:
                    edited = replace_table(text, section, at, after)
                    load(document(edited), self._env)
                    if file_version(path) != seen:
                        raise Conflict("The gateway's file has just been changed by hand. Try again.")
                    doubt = _replace(path.resolve(), edited)
        except CannotEdit as error:
            raise Conflict(f"The gateway's file cannot be edited: {error}.") from None
        except (OSError, UnicodeDecodeError) as error:
            problem = f"The gateway's file cannot be edited: {getattr(error, 'strerror', 'it is not UTF-8')}."
            raise DirectoryUnavailable(problem, detail=str(error)) from None
        return Change(before, after), doubt

    def _require_unset(self, section: str) -> None:
        """Raises Conflict where a variable says what the file would."""
        names = section.upper().split(".")
        for last in range(len(names)):
            variable = ENV_PREFIX + "__".join(names[: last + 1])
            if variable in self._env:
                raise Conflict(f"{variable} is set, which wins over the file.")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock on a folder. Raises OSError, and DirectoryUnavailable when another process keeps it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline_s = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise DirectoryUnavailable("Another process changes the gateway's file.") from None
                time.sleep(LOCK_AGAIN_S)
        yield
    finally:
        os.close(handle)


def _replace(path: Path, text: str) -> str | None:
    """Replace a file in one step by one with the same owner and mode. Returns the reason for which a failure
    of the machine may undo that. Raises OSError where the file is as it was."""
    old = path.stat()
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            os.fchmod(file.fileno(), old.st_mode & 0o7777)
            if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), old.st_uid, old.st_gid)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    try:
        _sync_folder(path.parent)
    except OSError as error:
        return f"{path.parent} could not be synced: {error.strerror}"
    return None


def _sync_folder(folder: Path) -> None:
    """Have a folder's names outlive a failure of the machine. Raises OSError, but not where its file system
    syncs no folders: nothing more can be done there."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)
