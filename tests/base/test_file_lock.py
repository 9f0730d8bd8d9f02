"""A killed holder of a lock is waited for, one that lives is refused at once; a deadline holds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.child import PATIENCE_S, Child
from vllm_ssdkv.base.errors import StoreLockedError
from vllm_ssdkv.base.file_lock import _is_running, lock_file

HOLDER = """
import fcntl, os, select, sys, time
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
if os.fork() == 0:  # keeps a duplicate, as I/O in flight does
    sys.stdout.close()
    select.select([0], [], [], float(sys.argv[2]))  # or until its input is closed
    os._exit(0)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(name="path")
def made_file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.touch()
    return path


@pytest.fixture(name="fd")
def opened_file(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


def end(child: Child) -> None:
    """Kill the holder, and wait for its end. The duplicate stays."""
    child.send_signal(signal.SIGKILL)
    child.process.wait(PATIENCE_S)


def test_what_a_killed_holder_left_behind_is_waited_for(path: Path, fd: int) -> None:
    with Child.python("-c", HOLDER, path, 1.0) as child:
        assert child.hear() == "held"
        end(child)
        lock_file(fd, path, "a device")


def test_a_process_that_was_just_killed_has_ended() -> None:
    for _ in range(10):
        with Child("sleep", 60) as child:
            assert _is_running(child.pid)
            child.send_signal(signal.SIGKILL)
            assert not _is_running(child.pid)


def test_a_holder_that_lives_is_named_at_once(path: Path, fd: int) -> None:
    with Child.python("-c", HOLDER, path, 0.0) as child:
        assert child.hear() == "held"
        before = time.monotonic()
        with pytest.raises(StoreLockedError, match=f"in use by process {child.pid};"):
            lock_file(fd, path, "a device")
        assert time.monotonic() - before < 5.0


def test_a_deadline_holds_also_for_what_a_killed_holder_left_behind(path: Path, fd: int) -> None:
    """A node waits with a lock held that all of its sessions need."""
    with Child.python("-c", HOLDER, path, 60.0) as child:
        assert child.hear() == "held"
        end(child)
        before = time.monotonic()
        with pytest.raises(StoreLockedError, match="a killed process keeps it"):
            lock_file(fd, path, "a device", before + 0.1)
        assert time.monotonic() - before < 8.0, "as if there was no deadline"
