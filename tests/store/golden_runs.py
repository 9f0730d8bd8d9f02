"""Makes ``segments`` of ``test_golden_runs.py`` with all that writes in an engine but vLLM.

Run it with the folder to write into; it works below ``/tmp/golden``, which it removes:

    .venv/bin/python tests/store/golden_runs.py tests/store/golden_runs

The others are made by code of earlier times, and cannot be made any more.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # behind the package that is installed

from tests.store.test_golden_runs import BLOCKS, NEWER, Run
from vllm_ssdkv.store.placement import segments as dividing

PLACE = Path("/tmp/golden")


def make_segments(devices: list[Path]) -> None:
    """A device is added."""
    run = Run(devices[:1])
    run.fill(range(BLOCKS - NEWER["segments"]))
    run.close()
    run = Run(devices)
    run.fill(range(BLOCKS - NEWER["segments"], BLOCKS))
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
