"""Files lent to the tools uid: written down before, given back after, also after a kill.

One file per loan in a directory of root's. A file goes back to root only if it still is the tools
uid's: whoever took it meanwhile keeps it. Everything blocks.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from chv.common import logs
from chv.common.errors import InUse, NotFound
from chv.common.failpoint import failpoint_sync
from chv.common.files import atomic_write, ensure_dir, remove_temporaries
from chv.common.ids import Ids
from chv.stord import acl

log = logs.get(__name__)
OTHERS_READ = stat.S_IROTH


class Loan(msgspec.Struct, frozen=True, kw_only=True):
    """What was lent."""

    owns: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


class Grants:
    """Loans of one daemon, in `directory`."""

    def __init__(self, directory: Path, uid: int, ids: Ids) -> None:
        self._directory = directory
        self._uid = uid
        self._ids = ids
        self._lent: dict[str, Loan] = {}

    def give(self, owns: Sequence[Path], reads: Sequence[Path]) -> str:
        """Lend; return the token that gives it back."""
        token = self._ids.nonce()
        private = [path for path in reads if path not in owns and not _is_open_to_all(path)]
        loan = Loan(
            owns=tuple(str(path) for path in owns), reads=tuple(str(path) for path in private)
        )
        lent = {path for other in self._lent.values() for path in other.owns}
        if taken := lent.intersection(loan.owns):
            raise InUse(f"another command works on {min(taken)!r}")
        ensure_dir(self._directory, mode=0o700)
        atomic_write(self._directory / token, msgspec.json.encode(loan))
        self._lent[token] = loan
        failpoint_sync("stord.tools.after_loan")
        try:
            self._hand_over(loan)
        except BaseException:
            self.take_back(token)
            raise
        return token

    def _hand_over(self, loan: Loan) -> None:
        for text in loan.owns:
            try:
                os.chown(text, self._uid, self._uid, follow_symlinks=False)
            except FileNotFoundError as error:
                raise NotFound(f"{text!r} does not exist") from error
        for text in loan.reads:
            acl.allow_read(Path(text), self._uid)

    def take_back(self, token: str) -> None:
        """Give back what the token stands for, but for what others hold as well."""
        loan = self._lent.pop(token, None)
        if loan is None:
            return
        self._return(loan)
        (self._directory / token).unlink(missing_ok=True)

    def _return(self, loan: Loan) -> None:
        for text in loan.owns:
            with contextlib.suppress(FileNotFoundError):
                if os.lstat(text).st_uid == self._uid:
                    os.chown(text, 0, 0, follow_symlinks=False)
        still_read = {path for other in self._lent.values() for path in other.reads}
        for text in loan.reads:
            if text not in still_read:
                with contextlib.suppress(FileNotFoundError):
                    acl.forbid_read(Path(text), self._uid)

    def sweep(self) -> list[str]:
        """Give back every loan of a daemon that is gone; return the files."""
        if not self._directory.is_dir():
            return []
        remove_temporaries(self._directory)
        returned: list[str] = []
        for entry in sorted(self._directory.iterdir()):
            loan = _read(entry)
            self._return(loan)
            entry.unlink()
            returned += [*loan.owns, *loan.reads]
        return returned


def _read(entry: Path) -> Loan:
    try:
        return msgspec.json.decode(entry.read_bytes(), type=Loan)
    except msgspec.DecodeError as error:  # written whole or not at all: someone else's
        log.warning("loan_unreadable", path=str(entry), error=error)
        return Loan()


def _is_open_to_all(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & OTHERS_READ)
    except FileNotFoundError as error:
        raise NotFound(f"{str(path)!r} does not exist") from error
