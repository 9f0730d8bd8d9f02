"""Makes ``segments`` of ``test_golden_runs.py`` with all that writes in an engine but vLLM.

Run it with the folder to write into; it works below ``/tmp/golden``, which it removes:

    .venv/bin/python tests/store/golden_runs.py tests/store/golden_runs

The store ``move`` is of version 0.1.0, and cannot be made any more.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # behind the package that is installed

from tests.store.conftest import PATIENCE_S, array, key_of
from tests.store.test_golden_runs import BLOCKS, NEWER, Run, payloads
from vllm_ssdkv.store.placement import segments as dividing

PLACE = Path("/tmp/golden")


def written(run: Run) -> list[int]:
    """Slots that are written; none failed."""
    assert run.store.drain(PATIENCE_S)
    durable, failed = run.store.take_write_results()
    assert not failed
    return [slot for slot, _ in durable]


def fill(run: Run, names: range) -> None:
    """Store blocks as an engine does."""
    for name in names:
        slots = run.index.allocate(1)
        (frame,) = run.store.reserve_frames(slots, wait=True).tolist()
        run.pages(frame)[:] = payloads(name)
        run.store.flush(slots, run.index.epochs(slots), [key_of(name)])
        assert run.index.publish(int(slots[0]), key_of(name))
        run.index.durable(array(written(run)))
        run.index.unpin(slots)


def make_segments(devices: list[Path]) -> None:
    """A device is added."""
    run = Run(devices[:1])
    fill(run, range(BLOCKS - NEWER["segments"]))
    run.close()
    run = Run(devices)
    fill(run, range(BLOCKS - NEWER["segments"], BLOCKS))
    run.close()


def make(to: Path) -> None:
    """Have another process make a store, and keep its files."""
    devices = [PLACE / "ssd0", PLACE / "ssd1"]
    for device in devices:
        device.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        make_segments(devices)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for path in sorted(PLACE.rglob("*")):
        if path.is_file():
            folder = to / "segments" / path.parent.relative_to(PLACE)
            folder.mkdir(parents=True, exist_ok=True)
            packed = gzip.compress(path.read_bytes(), mtime=0)
            (folder / f"{path.name}.gz").write_bytes(packed)
    shutil.rmtree(PLACE)


if __name__ == "__main__":
    vars(dividing)["MIN_SLOTS"] = 32  # so that a small store has several segments
    make(Path(sys.argv[1]))
