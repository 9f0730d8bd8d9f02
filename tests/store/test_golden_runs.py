"""Stores that running code left behind: every block is found, and read with the right bytes.

``golden_runs.py`` made them with the code of version 0.1.0, when blocks still moved between slots:

- ``segments``: a store on one device had some blocks. Then a second device was added, and the next
  blocks went into a segment over both.
- ``move``: a device had become slow, and blocks that were read again were written anew into another
  segment. The process was killed when the journal had the records of their new slots, before it
  was told that the old ones are gone: each of these keys names two slots.

Reading them needs neither that script nor any code for moves.
"""

from __future__ import annotations

import gzip
import struct
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.store.conftest import array, key_of, until
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.open import StorePlace, open_index, open_rank
from vllm_ssdkv.store.open_store import OpenStore
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome
from vllm_ssdkv.store.tiered_store import TieredStore

GOLDEN = Path(__file__).parent / "golden_runs"
GEOMETRY = SlotGeometry("paged", layers=2, heads=1, groups=1, payload_bytes=1000)
BLOCKS = 40
"""Blocks of each store, whose keys are made of 0, 1, ..."""
NEWER = {"segments": 20, "move": 12}
"""The last blocks of each store are in a newer segment than the others; those that moved have a
slot in the older one, too."""


def payloads(name: int) -> NDArray[np.uint8]:
    """Content of a block, [pages, payload_bytes]."""
    at = np.arange(GEOMETRY.payload_bytes)
    page = np.arange(GEOMETRY.pages)[:, None]
    return ((at + 31 * name + 7 * page) % 251).astype(np.uint8)


class Run:
    """Both roles of a store in one process."""

    def __init__(self, paths: list[Path]):
        devices = [{"path": path, "capacity": "16MiB", "weight": 1} for path in paths]
        io = {"staging": "4MiB", "engine": "threads"}
        self.config = SSDKVConfig.from_extra_config(
            {"mode": "page", "devices": devices, "dram_gib": "16MiB", "io": io}
        )
        fingerprint = Fingerprint({"model": "golden run"})
        self.place = StorePlace(self.config, GEOMETRY, fingerprint, 1, model="golden/run")
        self.counters = Counters()
        self.copied: dict[int, NDArray[np.uint8]] = {}
        with ExitStack() as stack:
            self.opened: OpenStore = open_rank(self.place, 0, self.counters)
            stack.callback(self.opened.close)
            self.index, self.rebalancer = open_index(self.place, self.counters)
            stack.callback(self.index.close)
            stack.callback(self.rebalancer.close)
            self.store = TieredStore(
                self.opened.files,
                self.opened.arena,
                self.opened.plan,
                self.opened.num_slots,
                32,
                self._copy_in,
            )
            stack.callback(self.store.close)
            self.close = stack.pop_all().close
        self.follow()

    def follow(self) -> None:
        """Have the worker's half hear of new segments, as a step's plan does."""
        segments = self.rebalancer.take_segments()
        if segments is not None:
            self.opened.files.placement.change(segments)

    def pages(self, frame: int) -> NDArray[np.uint8]:
        """Payloads in a frame, [pages, payload_bytes], writable."""
        pages = self.store.frames.view(frame)[GEOMETRY.header_bytes :]
        return pages.reshape(GEOMETRY.pages, -1)[:, : GEOMETRY.payload_bytes]

    def _copy_in(self, frames: NDArray[np.int32], blocks: NDArray[np.int64]) -> None:
        for frame, block in zip(frames.tolist(), blocks.tolist(), strict=True):
            self.copied[block] = self.pages(frame).copy()

    def load(self, names: list[int]) -> LoadOutcome:
        """Read blocks; HBM block ``name + 1`` gets each one's bytes."""
        slots = np.concatenate([self.index.lookup([key_of(name)]) for name in names])
        assert len(slots) == len(names)
        keys = tuple(map(key_of, names))
        self.store.load(LoadJob("r", slots, self.index.epochs(slots), keys, array(names) + 1))
        outcomes: list[LoadOutcome] = []
        until(lambda: bool(outcomes.extend(self.store.take_load_outcomes()) or outcomes))
        return outcomes[0]


def unpacked(name: str, to: Path) -> list[Path]:
    """Paths of the devices of a committed store, copied to where it may be changed."""
    for path in sorted((GOLDEN / name).rglob("*")):
        copy = to / path.relative_to(GOLDEN / name)
        if path.is_dir():
            copy.mkdir()
        elif path.suffix == ".gz":
            copy.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        else:
            copy.write_bytes(path.read_bytes())
    return sorted(path for path in to.iterdir() if path.is_dir())


def in_two_slots(state: Path) -> int:
    """Keys that the journal, as it lies there, has in more than one slot (``docs/format.md``)."""
    data = (state / "journal").read_bytes()
    held: dict[int, bytes] = {}
    for at in range(128, len(data), 72):
        kind, _, slot, _, _, key = struct.unpack_from("<IIQQQ32s", data, at)
        held.pop(slot, None)
        if kind == 1:
            held[slot] = key
    return len(held) - len(set(held.values()))


@pytest.mark.parametrize("name", NEWER)
def test_the_committed_run_is_small(name: str) -> None:
    files = (path for path in (GOLDEN / name).rglob("*") if path.is_file())
    assert sum(path.stat().st_size for path in files) < 64 * 1024


@pytest.mark.parametrize("name", NEWER)
def test_every_block_of_a_run_is_read(name: str, tmp_path: Path) -> None:
    devices = unpacked(name, tmp_path)
    assert in_two_slots(devices[0]) == (NEWER[name] if name == "move" else 0)
    for _ in range(2):  # and again by who opens what the first one left
        run = Run(devices)
        try:
            assert run.index.gauges()["ready"] == BLOCKS
            assert run.index.counters["journal_corrupt_records"] == 0
            outcome = run.load(list(range(BLOCKS)))
            assert (outcome.complete, outcome.bad) == (True, [])
            for block in range(BLOCKS):
                assert np.array_equal(run.copied[block + 1], payloads(block)), block
        finally:
            run.close()
        assert in_two_slots(devices[0]) == 0


@pytest.mark.parametrize("name", NEWER)
def test_blocks_are_found_where_they_were_written_last(name: str, tmp_path: Path) -> None:
    run = Run(unpacked(name, tmp_path))
    try:
        slots = [int(run.index.lookup([key_of(block)])[0]) for block in range(BLOCKS)]
        firsts = sorted(s.first for s in run.rebalancer.placement.segments if s.slots)
    finally:
        run.close()
    where = np.searchsorted(np.array(firsts), slots, side="right").tolist()
    older = BLOCKS - NEWER[name]
    assert len(set(where[:older])) == len(set(where[older:])) == 1
    assert where[0] != where[-1]
