"""A start is killed while it makes a lost data file anew: the next one goes on with the rest."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.conftest import array
from tests.store.opening import Opened, close, fill, found, place
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.open import open_index, open_rank

RANKS = 2
LOST = Path("ssd1", "rank0.data")
CALLS = ("pwrite", "rename")
"""By which a start changes what is stored."""


def start_and_die(devices: list[Path], after: int) -> bool:
    """Open all ranks in a child that is killed before a certain one of its :data:`CALLS`.

    False when it had opened the store before that.
    """
    child = os.fork()
    if child == 0:
        left = after

        def counted(real: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object) -> object:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return real(*arguments)

            return call

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        code = 1
        try:
            for rank in range(RANKS):
                open_rank(place(devices, tp_size=RANKS, run="killed"), rank, Counters())
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.usefixtures("small_segments")
def test_a_start_killed_at_any_instant_is_made_good_by_the_next(
    tmp_devices: Callable[[int], list[Path]], opened: Opened, tmp_path: Path
) -> None:
    devices = tmp_devices(2)
    for rank in range(RANKS):
        close(opened(place(devices, tp_size=RANKS, run="first"), rank))
    index, rebalancer = open_index(place(devices, tp_size=RANKS, run="first"))
    keys = fill(index, 12)
    touched = {s for s in keys if rebalancer.placement.touches(1, array([s]))[0]}
    assert 0 < len(touched) < len(keys)
    index.close()
    (devices[1].parent / LOST).unlink()
    before = tmp_path / "before"
    shutil.copytree(devices[0].parent, before)

    kills = 0
    while start_and_die(devices, kills):
        kills += 1
        for rank in range(RANKS):
            close(opened(place(devices, tp_size=RANKS, run="next"), rank))
        index, _ = open_index(place(devices, tp_size=RANKS, run="next"))
        assert found(index, keys) == set(keys) - touched, f"killed at call {kills}"
        assert index.gauges()["lost"] == 0
        index.close()
        for device in devices:
            shutil.rmtree(device)
        shutil.copytree(before, devices[0].parent, dirs_exist_ok=True)
    # The manifest and its copy when devices were looked at, and when the file got its new name;
    # the page of each file by which direct I/O is tried, and its two superblocks.
    assert kills == 2 * 4 + 3 * 2 * RANKS
