"""Promises of the native thread engine alone: a thread per request, and some that hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.waiting import until
from vllm_ssdkv.config.io_engine import EngineOptions

if TYPE_CHECKING:
    from tests.store.io.conftest import Rig

PATIENCE_S = 60.0
STUCK = Path(__file__).with_name("stuck_memory.py")


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_every_device_has_its_own_threads_and_close_ends_them(rig: Rig) -> None:
    for _ in range(3):
        rig.add_device(b"")
    before = tasks()
    engine = rig.open(EngineOptions(engine="threads", queue_depth=5))
    started = tasks() - before
    assert len(started) == 15
    assert engine.close(PATIENCE_S)
    until(lambda: not started & tasks())


def stuck(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(STUCK), *arguments],
        cwd=STUCK.parent,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(f"memory that hangs needs userfaultfd: {done.stdout}")
    return done


@pytest.mark.parametrize("ending", ["close", "forget", "interrupt"])
def test_a_thread_that_hangs_in_the_kernel_is_given_up(ending: str) -> None:
    done = stuck(ending)
    codes = {-signal.SIGINT, 128 + signal.SIGINT} if ending == "interrupt" else {0}
    assert done.returncode in codes, done.stderr
    assert "Fatal" not in done.stderr
    assert done.stdout.split() == ["isolated", "abandoned"]


def test_a_thread_that_comes_back_finds_everything_in_place() -> None:
    done = stuck("recover")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["isolated", "abandoned", "recovered"]
