"""Makes the stores of ``test_golden_runs.py``, with everything that writes in an engine but vLLM.

Run it with the folder to write into; it works below ``/tmp/golden``, which it removes:

    .venv/bin/python tests/store/golden_runs.py tests/store/golden_runs

It goes away with the code for moves.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))  # behind the package that is installed

from tests.store.conftest import PATIENCE_S, array, key_of
from tests.store.test_golden_runs import BLOCKS, NEWER, Run, payloads
from vllm_ssdkv.connector.scheduler.pending_writes import PendingWrites
from vllm_ssdkv.connector.scheduler.relocator import Moves
from vllm_ssdkv.connector.scheduler.write_policy import WritePolicy
from vllm_ssdkv.store.devices.wear import WearLedger
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
        (frame,) = run.store.hold(slots, wait=True).tolist()
        run.pages(frame)[:] = payloads(name)
        run.store.commit(slots, run.index.epochs(slots), [key_of(name)])
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


def make_move(devices: list[Path]) -> None:
    """Blocks move off a slow device's share; the process ends amid the journal's records."""
    run = Run(devices)
    fill(run, range(BLOCKS))
    writes = PendingWrites(1)
    wear = WearLedger(None, ["0", "1"], run.counters)
    policy = WritePolicy(
        run.config, run.config.devices, wear, [1.0, 1.0], run.index.num_slots, run.counters
    )
    moves = Moves(
        run.index,
        run.rebalancer,
        policy,
        run.counters,
        writes,
        lambda slots: run.index.unpin(array(slots)),
    )
    run.rebalancer.reweigh([1.0, 0.2])
    run.rebalancer.settle(PATIENCE_S)  # what is empty is striped anew at once
    run.follow()
    names = list(range(BLOCKS - NEWER["move"], BLOCKS))
    assert run.load(names).complete
    moves.read(np.concatenate([run.index.lookup([key_of(name)]) for name in names]))
    move = moves.plan(frames=run.store.frames.frames)
    assert len(move.old) == NEWER["move"], move
    copied, wrong = run.store.copy(move)
    assert copied.all()
    assert not wrong.any()
    run.store.commit(move.new, move.new_epochs, move.keys)
    slots = written(run)
    assert all(writes.done(slot, run.index.epoch(slot)) for slot in slots)
    vars(run.index)["_tell_gone"] = lambda *_: os._exit(0)
    moves.written(slots)
    raise AssertionError("not reached")


def make(name: str, to: Path) -> None:
    """Have another process make a store, and keep its files."""
    devices = [PLACE / "ssd0", PLACE / "ssd1"]
    for device in devices:
        device.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        {"segments": make_segments, "move": make_move}[name](devices)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for path in sorted(PLACE.rglob("*")):
        if path.is_file():
            folder = to / name / path.parent.relative_to(PLACE)
            folder.mkdir(parents=True, exist_ok=True)
            packed = gzip.compress(path.read_bytes(), mtime=0)
            (folder / f"{path.name}.gz").write_bytes(packed)
    shutil.rmtree(PLACE)


if __name__ == "__main__":
    vars(dividing)["MIN_SLOTS"] = 32  # so that a small store has several segments
    for folder in NEWER:
        make(folder, Path(sys.argv[1]))
