"""Processes by their parents, from ``/proc``: who is below whom, and is it still the same one?"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_POLL_S = 0.05
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans(adopt: bool) -> None:
    """Whether a process below this one becomes its child when its own parent dies, instead of
    init's: nothing gets out of sight then. Raises: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def reap_orphans(name: str) -> None:
    """Collect ended children whose name begins with ``name``: adopted ones, for which nobody else
    waits."""
    own = os.getpid()
    for entry in Path("/proc").iterdir():
        try:
            head, _, rest = (entry / "stat").read_text().rpartition(")")
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if state == "Z" and int(parent) == own and head.partition("(")[2].startswith(name):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(int(entry.name), os.WNOHANG)


def children_of(pid: int) -> set[int]:
    """Direct children."""
    return {child for child, parent in _parents().items() if parent == pid}


def descendants(roots: Iterable[int]) -> dict[int, str]:
    """``roots`` and every process below them: pid to identity (see ``identity``)."""
    parents = _parents()
    found: set[int] = set()
    grown = set(roots)
    while grown:
        found |= grown
        grown = {child for child, parent in parents.items() if parent in grown} - found
    known = {pid: identity(pid) for pid in found}
    return {pid: at for pid, at in known.items() if at is not None}


def identity(pid: int) -> str | None:
    """Clock ticks at which the process started: with its pid, which process it is. None once it
    has ended (a zombie has)."""
    fields = _stat(pid)
    return None if fields is None else fields[19]


def command_of(pid: int) -> str:
    """The command line; empty once the process is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace")


def await_gone(processes: dict[int, str], timeout_s: float) -> dict[int, str]:
    """Those that have not ended in time."""
    ends = time.monotonic() + timeout_s
    while True:
        left = {pid: at for pid, at in processes.items() if identity(pid) == at}
        if not left or time.monotonic() > ends:
            return left
        time.sleep(_POLL_S)


def kill(processes: dict[int, str]) -> None:
    """SIGKILL to those that are still themselves."""
    for pid, at in processes.items():
        if identity(pid) == at:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields is not None:
                found[int(entry.name)] = int(fields[1])
    return found


def _stat(pid: int) -> list[str] | None:
    """The fields after the command's name; None once the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else fields
