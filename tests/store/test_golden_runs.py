"""Stores that running code left behind: every block is found, and read with the right bytes.

The code of version 0.1.0 made them, the first two when blocks still moved between slots
(``golden_runs.py`` can make the first one anew):

- ``segments``: a store on one device had some blocks. Then a second device was added, and the next
  blocks went into a segment over both.
- ``move``: a device had become slow, and blocks that were read again were written anew into another
  segment. The process was killed when the journal had the records of their new slots, before it
  was told that the old ones are gone: each of these keys names two slots.
- ``sparse``: a store for a sparse selector on three devices, before segments had rules. The second
  of its segments is half full, the others behind it are empty.

Reading them needs neither that script nor any code of that time.
"""

from __future__ import annotations

import gzip
import json
import struct
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from msgspec import UNSET
from numpy.typing import NDArray

from tests.kit.waiting import until
from tests.store.chosen_pages import bring
from tests.store.conftest import PATIENCE_S, array, key_of
from tests.store.tails import Tails, tail_of
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.store.context_store import ContextStore
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.segment import Rule
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.open import StorePlace, open_index, open_rank
from vllm_ssdkv.store.open_store import OpenStore
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome

GOLDEN = Path(__file__).parent / "golden_runs"
GEOMETRY = SlotGeometry("paged", layers=2, heads=1, groups=1, payload_bytes=1000)
SPARSE = SlotGeometry("paged", layers=2, heads=3, groups=2, payload_bytes=512, summary_pages=1)
BLOCKS = 40
"""Blocks of each store, whose keys are made of 0, 1, ..."""
NEWER = {"segments": 20, "move": 12}
"""The last blocks of each store are in a newer segment than the others; those that moved have a
slot in the older one, too."""


def payloads(name: int, geometry: SlotGeometry = GEOMETRY) -> NDArray[np.uint8]:
    """Content of a block, [pages of KV, payload_bytes]."""
    at = np.arange(geometry.payload_bytes)
    page = np.arange(geometry.kv_pages)[:, None]
    return ((at + 31 * name + 7 * page) % 251).astype(np.uint8)


class Run:
    """Both roles of a store in one process."""

    def __init__(self, paths: list[Path], geometry: SlotGeometry = GEOMETRY):
        self.geometry = geometry
        devices = [{"path": path, "capacity": "16MiB", "weight": 1} for path in paths]
        io = {"staging": "4MiB", "engine": "threads"}
        options = {"mode": "page", "devices": devices, "dram_gib": "16MiB", "io": io}
        if geometry.summary_pages:
            options |= {"selector": "bounds", "sparse": {"budget": 0.1, "page_cache": "1MiB"}}
        self.config = SSDKVConfig.from_extra_config(options)
        fingerprint = Fingerprint({"model": "golden run"})
        self.place = StorePlace(self.config, [geometry], fingerprint, model="golden/run")
        self.counters = Counters()
        self.copied: dict[int, NDArray[np.uint8]] = {}
        with ExitStack() as stack:
            self.opened: OpenStore = open_rank(self.place, 0, self.counters)
            stack.callback(self.opened.close)
            self.index, self.rebalancer = open_index(self.place, self.counters)
            stack.callback(self.index.close)
            stack.callback(self.rebalancer.close)
            self.store = ContextStore(
                self.opened.files,
                self.opened.arena,
                self.opened.plan,
                self.opened.num_slots,
                32,
                self._copy_in,
                summarizer=Tails(geometry) if geometry.tail_pages else None,
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
        """Payloads in a frame, [pages of KV, payload_bytes], writable."""
        pages = self.store.frames.view(frame)[self.geometry.header_bytes :]
        return pages.reshape(self.geometry.kv_pages, -1)[:, : self.geometry.payload_bytes]

    def _copy_in(self, frames: NDArray[np.int32], blocks: NDArray[np.int64]) -> None:
        for frame, block in zip(frames.tolist(), blocks.tolist(), strict=True):
            self.copied[block] = self.pages(frame).copy()

    def fill(self, names: range) -> None:
        """Store blocks as an engine does."""
        for name in names:
            slots = self.index.allocate(1)
            (frame,) = self.store.reserve_frames(slots, wait=True).tolist()
            self.pages(frame)[:] = payloads(name, self.geometry)
            self.store.flush(slots, self.index.epochs(slots), [key_of(name)])
            assert self.index.publish(int(slots[0]), key_of(name))
            self.index.durable(array(self._written()))
            self.index.unpin(slots)

    def _written(self) -> list[int]:
        """Slots that are written; none failed."""
        assert self.store.drain(PATIENCE_S)
        durable, failed = self.store.take_write_results()
        assert not failed
        return [slot for slot, _ in durable]

    def slots(self, names: list[int]) -> NDArray[np.int64]:
        """Where blocks are; all of them are found."""
        slots = np.concatenate([self.index.lookup([key_of(name)]) for name in names])
        assert len(slots) == len(names)
        return slots

    def load(self, names: list[int]) -> LoadOutcome:
        """Read blocks; HBM block ``name + 1`` gets each one's bytes."""
        slots = self.slots(names)
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


@pytest.mark.parametrize("name", [*NEWER, "sparse"])
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
        slots = run.slots(list(range(BLOCKS)))
        firsts = sorted(s.first for s in run.rebalancer.placement.segments if s.slots)
    finally:
        run.close()
    where = np.searchsorted(np.array(firsts), slots, side="right").tolist()
    older = BLOCKS - NEWER[name]
    assert len(set(where[:older])) == len(set(where[older:])) == 1
    assert where[0] != where[-1]


def rules(run: Run, names: range) -> list[Rule]:
    """Of the segment that each block is in."""
    live = [s for s in run.opened.files.placement.segments if s.slots]
    return [
        segment.rule
        for slot in run.slots(list(names)).tolist()
        for segment in live
        if segment.first <= slot < segment.first + segment.slots
    ]


def assert_chosen(run: Run, names: range) -> None:
    """Summaries of blocks, and single pages of each head, are read from the devices."""
    slots = run.slots(list(names))
    run.store.extend_context("r", 0, slots)
    assert run.load(list(names)).complete
    run.store.frames.forget(slots)
    chosen = run.store.choose([slots], [0])
    assert chosen.fetched_summaries.ssd == SPARSE.summary_pages * len(slots)
    size = SPARSE.pages_per_layer * SPARSE.payload_bytes // 16
    for layer in range(SPARSE.layers):
        for at, name in zip(chosen.page_records(layer).tolist(), names, strict=True):
            summary = tail_of(SPARSE, payloads(name, SPARSE))[0][layer * size :][:size]
            held = run.store.arena.view(at - run.store.arena.address, size)
            np.testing.assert_array_equal(held, summary)
        wanted = [(b, p) for b in range(len(names)) for p in range(SPARSE.pages_per_layer)]
        found = bring(run, chosen, layer, {0: wanted})
        for block, page in wanted:
            data = payloads(names[block], SPARSE)[SPARSE.first_page(layer) + page]
            assert found[0, block, page] == data.tobytes(), (layer, block, page)
    assert (chosen.poisoned, chosen.bad) == (set(), [])
    chosen.close()
    run.store.drop_context("r")


def requests(run: Run, name: int) -> int:
    """Requests that the devices get for a hit of one block."""
    before = run.opened.files.engine.statistics()
    assert run.load([name]).complete
    after = run.opened.files.engine.statistics()
    run.store.frames.forget(run.slots([name]))
    return sum(after[key] - before[key] for key in after if key.startswith("read_requests."))


def test_a_store_without_rules_is_read_and_gets_them(tmp_path: Path) -> None:
    """Old blocks are read where they are; new ones go round the lanes by heads."""
    devices = unpacked("sparse", tmp_path)
    manifest = json.loads((devices[0] / "store.json").read_bytes())
    assert manifest["version"] == 5
    assert not any("rule" in segment for segment in manifest["segments"])
    old, new = range(BLOCKS), range(BLOCKS, 2 * BLOCKS)
    for opening in range(3):
        run = Run(devices, SPARSE)
        try:
            assert run.index.gauges()["ready"] == (2 * BLOCKS if opening else BLOCKS)
            assert run.index.counters["journal_corrupt_records"] == 0
            if opening == 0:
                run.rebalancer.step_and_wait(PATIENCE_S)
                run.follow()
                run.fill(new)
            for names, rule in ((old, UNSET), (new, "heads")):
                assert rules(run, names) == [rule] * BLOCKS
                run.copied.clear()
                outcome = run.load(list(names))
                assert (outcome.complete, outcome.bad) == (True, [])
                for name in names:
                    assert np.array_equal(run.copied[name + 1], payloads(name, SPARSE)), name
                run.store.frames.forget(run.slots(list(names)))
                # What a slot has on a device is read at once: old ones lie on one.
                assert requests(run, names[0]) == (1 if rule is UNSET else len(devices))
                assert_chosen(run, names)
        finally:
            run.close()
    manifest = json.loads((devices[0] / "store.json").read_bytes())
    assert manifest["version"] == 6
    assert {segment.get("rule") for segment in manifest["segments"]} == {None, "heads"}
