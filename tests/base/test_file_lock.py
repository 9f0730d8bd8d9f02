"""A killed holder of a lock is waited for, one that lives is refused at once; a deadline holds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.child import Child
from vllm_ssdkv.base.errors import StoreLockedError
from vllm_ssdkv.base.file_lock import lock_file

HOLDER = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
if os.fork() == 0:  # keeps a duplicate, as I/O in flight does
    sys.stdout.close()
    time.sleep(float(sys.argv[2]))
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


def test_what_a_killed_holder_left_behind_is_waited_for(path: Path, fd: int) -> None:
    with Child.python("-c", HOLDER, path, 1.0) as child:
        assert child.hear() == "held"
        child.send_signal(signal.SIGKILL)
        lock_file(fd, path, "a device")


def test_a_holder_that_lives_is_named_at_once(path: Path, fd: int) -> None:
    with Child.python("-c", HOLDER, path, 0.0) as child:
        assert child.hear() == "held"
        before = time.monotonic()
        with pytest.raises(StoreLockedError, match=f"in use by process {child.pid};"):
            lock_file(fd, path, "a device")
        assert time.monotonic() - before < 5.0


def test_a_deadline_holds_also_for_what_a_killed_holder_left_behind(path: Path, fd: int) -> None:
    """A node waits with a lock held that all of its sessions need."""
    with Child.python("-c", HOLDER, path, 5.0) as child:
        assert child.hear() == "held"
        child.send_signal(signal.SIGKILL)
        child.wait()
        before = time.monotonic()
        with pytest.raises(StoreLockedError, match="a killed process keeps it"):
            lock_file(fd, path, "a device", before + 0.1)
        assert time.monotonic() - before < 2.0
