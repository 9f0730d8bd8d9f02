"""The lock on a data file or block device: taken on its own descriptor, so that I/O holds it."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from vllm_ssdkv.base.errors import DeviceError, StoreLockedError

_POLL_S = 0.02
_ENDING_S = 10.0
"""Longest wait for a lock whose holder has ended: it is free when its last I/O is."""
_PF_EXITING = 0x4


def lock_file(fd: int, path: Path, what: str, deadline: float | None = None) -> None:
    """Take the exclusive flock of ``fd``. Blocks.

    A lock file of its own would be free at once when its holder is killed; this one stays until
    the writes that the kernel still has in hand for that process have ended.

    Args:
        fd: Open descriptor; the lock ends when the last duplicate of it is closed.
        path: Its path, for messages.
        what: The device, for messages.
        deadline: Time of the monotonic clock until which any holder is waited for; None: one that
            has ended is, for ten seconds at most.

    Raises:
        StoreLockedError: somebody else holds it.
        DeviceError: the file system has no locks.
    """
    end = time.monotonic() + _ENDING_S if deadline is None else deadline
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = lock_holder(fd)
            if time.monotonic() < end and not (deadline is None and _is_running(holder)):
                time.sleep(_POLL_S)
                continue
            who = "another process" if holder is None else f"process {holder}"
            if holder == os.getpid():
                who = "this process (is the same device named twice?)"
            raise StoreLockedError(
                f"{what}: {path} is in use by {who}; a killed process keeps it until its last "
                "I/O has ended"
            ) from error
        except OSError as error:
            raise DeviceError(f"{what}: cannot lock {path}: {error.strerror}") from error
        return


def unlock_file(fd: int) -> None:
    """Give the lock of ``fd`` back, whatever duplicates of it there are."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def require_unlocked(files: Iterable[Path], deadline: float | None = None) -> None:
    """Wait, as :func:`lock_file` does, until no other process holds the lock of any of these files,
    or its errors.

    Files that cannot be opened are skipped: whoever needs them says what is wrong.
    """
    for file in files:
        try:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            if lock_holder(fd) != os.getpid():
                lock_file(fd, file, "store", deadline)
        finally:
            os.close(fd)


def is_locked(fd: int) -> bool:
    """Check whether somebody else holds the lock on the file behind ``fd`` now. Never blocks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def lock_holder(fd: int) -> int | None:
    """Process id that holds a flock on the file behind ``fd``, if the kernel tells us."""
    status = os.fstat(fd)
    where = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        table = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return None  # only the error message loses a detail
    found = re.search(rf"FLOCK\s+ADVISORY\s+WRITE\s+(\d+)\s+{re.escape(where)}\s", table)
    return int(found[1]) if found and int(found[1]) > 0 else None


def _is_running(pid: int | None) -> bool:
    """Check whether a process is there and will not end by itself: one that was killed ends when it
    runs next, which on a busy machine is later than the next call of whoever killed it.

    One of another container looks like one that has ended: the kernel tells us nothing of it.
    """
    if pid is None:
        return False
    try:
        status, stat = (
            Path(f"/proc/{pid}/{name}").read_text(encoding="ascii", errors="replace")
            for name in ("status", "stat")
        )
    except OSError:
        return False
    pending = re.findall(r"^S\w+Pnd:\s*(\w+)$", status, re.MULTILINE)
    if any(int(signals, 16) >> (signal.SIGKILL - 1) & 1 for signals in pending):
        return False
    state, *numbers = stat.rpartition(")")[2].split()
    return state not in "ZX" and not int(numbers[5]) & _PF_EXITING
