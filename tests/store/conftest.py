"""A whole store of one rank on real files, without vLLM, with faults to switch on and off."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.faults import set_faults
from tests.kit.waiting import until
from tests.store.tails import NOTHING, Tails, tail_of
from tests.store.unhurried import PATIENCE_S, UnhurriedEngine
from vllm_ssdkv import _io
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.io_engine import EngineOptions, ThrottleRule
from vllm_ssdkv.connector.worker.device_memory import summary_memory
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.store.cache.frames import FrameState
from vllm_ssdkv.store.context_store import ContextStore
from vllm_ssdkv.store.devices.data_device import OpenDevice, open_device
from vllm_ssdkv.store.devices.health import DeviceHealth
from vllm_ssdkv.store.devices.throughput import ThroughputEstimator
from vllm_ssdkv.store.format.segment import Extent, Segment
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, SlotGeometry, round_up
from vllm_ssdkv.store.integrity.cipher import CipherCodec
from vllm_ssdkv.store.integrity.page_verification import PageSampler, VerifyMode
from vllm_ssdkv.store.integrity.slot_codec import ChecksumCodec, SlotCodec
from vllm_ssdkv.store.io.engines.open import open_engine
from vllm_ssdkv.store.io.slot_io import SlotIO
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.memory.memory_plan import MemoryPlan, SparseMemory
from vllm_ssdkv.store.memory.summary_rows import ChannelTier, row_bytes
from vllm_ssdkv.store.open import StorePlace, open_rank
from vllm_ssdkv.store.open_store import OpenStore
from vllm_ssdkv.store.placement import segments as dividing
from vllm_ssdkv.store.placement.lanes import lanes_for
from vllm_ssdkv.store.placement.placement import Placement
from vllm_ssdkv.store.placement.replica_selector import Replicas
from vllm_ssdkv.store.placement.stripe_map import StripeMap
from vllm_ssdkv.store.placement.units import rule_for
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome
from vllm_ssdkv.store.write.summary_builder import SummaryBuilder

SHORT_S = 0.3
"""Deadline of I/O of which a part hangs."""

NEVER_S = 3600.0
"""Deadline of I/O that nothing may wait for."""

DIGEST = b"fingerprint 1234"
RANK = 3
BLOCK_TOKENS = 32

Slots = NDArray[np.int64]
Bytes = NDArray[np.uint8]

PAGED = SlotGeometry("paged", layers=3, heads=2, groups=2, payload_bytes=8192)
OPAQUE = SlotGeometry("opaque", layers=2, heads=1, groups=1, payload_bytes=5000)
PAGED_ENCRYPTED = replace(PAGED, encrypted=True)
OPAQUE_ENCRYPTED = replace(OPAQUE, encrypted=True)
SUMMED = replace(PAGED, summary_pages=1)
SUMMED_ENCRYPTED = replace(SUMMED, encrypted=True)
PLAIN = [PAGED, OPAQUE]
ALL = [*PLAIN, PAGED_ENCRYPTED, OPAQUE_ENCRYPTED]
SHAPES = st.builds(
    SlotGeometry,
    st.just("paged"),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 40_000),
    st.booleans(),
)
"""Of slots of pages."""

SLOTS_KEY = bytes(range(100, 132))
"""From which the keys of encrypted slots are derived."""


def array(slots: Sequence[int]) -> Slots:
    return np.array(slots, dtype=np.int64)


def key_of(name: int) -> bytes:
    return name.to_bytes(8, "little") * 4


def content(geometry: SlotGeometry, name: int) -> Bytes:
    """Payloads that belong to a key, [pages, payload_bytes]."""
    random = np.random.default_rng(name)
    kv = random.integers(0, NOTHING, (geometry.kv_pages, geometry.payload_bytes), dtype=np.uint8)
    return np.concatenate([kv, tail_of(geometry, kv)])


def striped(
    geometry: SlotGeometry, weights: Sequence[float], slots: int, copies: int = 1
) -> Placement:
    """One segment of so many slots over all devices."""
    lanes = lanes_for(weights, copies)
    rule = rule_for(geometry, lanes)
    stripes = StripeMap(geometry, lanes, len(weights), copies, rule)
    units = [stripes.device_units(device, slots) for device in range(len(weights))]
    extents = [Extent(device, 0, count) for device, count in enumerate(units) if count]
    segment = Segment(0, slots, slots, lanes, tuple(extents), copies, rule=rule)
    return Placement(geometry, [segment], len(weights))


@dataclass
class Walk:
    """What a stream brought: per row and block index the payloads, and what went wrong."""

    blocks: list[dict[int, Bytes]]
    poisoned: set[int]
    bad: list[int]
    unread: list[int]
    pieces: int = 0


class Hbm(MutableMapping[int, Bytes]):
    """vLLM's blocks in memory, [pages, payload_bytes] each: those that something was copied to
    whole. Part of a block is no block."""

    BLOCKS = 512
    """Fewer where they are large, at least 8."""
    MOST_BYTES = 1 << 28

    def __init__(self, geometry: SlotGeometry):
        blocks = min(self.BLOCKS, self.MOST_BYTES // (geometry.kv_pages * geometry.payload_bytes))
        shape = max(8, blocks), geometry.kv_pages, geometry.payload_bytes
        self._geometry = geometry
        self._data = np.full(shape, NOTHING, dtype=np.uint8)

    def stretches(self) -> _io.Stretches:
        """For native copies."""
        geometry, pages = self._geometry, np.arange(self._geometry.kv_pages, dtype=np.uint64)
        return _io.Stretches(
            np.uint64(geometry.header_bytes) + pages * np.uint64(geometry.page_bytes),
            np.full(len(pages), geometry.payload_bytes, dtype=np.uint64),
            np.uint64(self._data.ctypes.data) + pages * np.uint64(geometry.payload_bytes),
            np.full(len(pages), self._data.strides[0], dtype=np.uint64),
        )

    def _whole(self) -> NDArray[np.bool_]:
        whole: NDArray[np.bool_] = (self._data != NOTHING).any(axis=2).all(axis=1)
        return whole

    def copied(self, block: int) -> NDArray[np.bool_]:
        """Pages of a block that something was copied to, [pages]."""
        there: NDArray[np.bool_] = (self._data[block] != NOTHING).any(axis=1)
        return there

    def __getitem__(self, block: int) -> Bytes:
        if not self._whole()[block]:
            raise KeyError(block)
        return self._data[block]

    def __setitem__(self, block: int, data: Bytes) -> None:
        self._data[block] = data

    def __delitem__(self, block: int) -> None:
        self._data[block] = NOTHING

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self._whole()).tolist())

    def __len__(self) -> int:
        return int(self._whole().sum())


@dataclass
class StoreRig:
    """One rank's store. HBM are its blocks by number."""

    geometry: SlotGeometry
    store: ContextStore
    devices: list[OpenDevice]
    counters: Counters
    control: Path
    hbm: MutableMapping[int, Bytes]
    before_copy: Callable[[], None] = lambda: None

    @property
    def files(self) -> SlotIO:
        return self.store.files

    @property
    def paths(self) -> tuple[str, ...]:
        return self.files.health.paths

    # ---- faults ----

    def faults(self, *rules: dict[str, Any]) -> None:
        """Have exactly these faults from now on."""
        set_faults(self.control, *rules)

    def deadline(self, seconds: float) -> None:
        """I/O that is submitted from now on has this deadline; only faults make it late."""
        if not isinstance(self.files.engine, UnhurriedEngine):
            object.__setattr__(self.files, "engine", UnhurriedEngine(self.files.engine))
        object.__setattr__(self.files, "deadline_s", seconds)

    def one_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A short deadline until a device is lost: who waits for a second one hangs."""
        self.deadline(SHORT_S)
        quarantine = self.files.health.quarantine

        def lose(device: int, reason: str) -> None:
            self.deadline(NEVER_S)
            quarantine(device, reason)

        monkeypatch.setattr(self.files.health, "quarantine", lose)

    def forget_pages(self, slots: Slots) -> None:
        """What the page cache has of these slots is read again."""
        assert self.store._pages is not None
        self.store._pages.forget(slots)

    def forgive(self) -> None:
        """Devices start with a clean record, for the next example of a property."""
        health = self.files.health
        health._devices = [type(device)() for device in health._devices]
        health.any_writes_paused = False

    def place(self, slot: int, offset: int, copy: int = 0) -> tuple[int, int]:
        """Device and offset in its file of one byte of a slot."""
        start = offset // PAGE_ALIGN * PAGE_ALIGN
        copies = self.files.placement.copies(array([slot]), start, PAGE_ALIGN)
        extents = copies[copy]
        assert extents is not None
        return int(extents.device[0]), int(extents.offset[0]) + offset - start

    def flip(self, slot: int, offset: int, bits: int = 1, copy: int = 0) -> None:
        """Change one byte of a slot on its device."""
        device, at = self.place(slot, offset, copy)
        with open(self.devices[device].path, "r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ bits]))
            os.fsync(file.fileno())

    def device_of(self, slot: int) -> int:
        """Device of a slot's first bytes."""
        return self.place(slot, 0)[0]

    # ---- write path ----

    def kv(self, name: int) -> Bytes:
        """Payloads of pages of KV that belong to a key, [kv_pages, payload_bytes]."""
        return content(self.geometry, name)[: self.geometry.kv_pages]

    def page_view(self, frame: int) -> Bytes:
        """Payloads in a frame, [kv_pages, payload_bytes], writable."""
        pages = self.store.frames.view(frame)[self.geometry.header_bytes :]
        return pages.reshape(self.geometry.kv_pages, -1)[:, : self.geometry.payload_bytes]

    def hold(self, names: dict[int, int], *, wait: bool = True) -> list[int]:
        """Hold and fill frames for slots (slot to key name); the slots that found a frame."""
        slots = list(names)
        frames = self.store.reserve_frames(array(slots), wait=wait)
        for slot, frame in zip(slots, frames.tolist(), strict=False):
            self.page_view(frame)[:] = self.kv(names[slot])
        return slots[: len(frames)]

    def commit(self, names: dict[int, int], epoch: int = 1) -> None:
        keys = [key_of(name) for name in names.values()]
        self.store.flush(array(list(names)), array([epoch] * len(names)), keys)

    def write(self, names: dict[int, int], epoch: int = 1) -> None:
        """Slots on their devices, and nothing of them in DRAM."""
        todo = dict(names)
        while todo:
            done = self.hold(todo)
            assert done
            self.commit({slot: todo.pop(slot) for slot in done}, epoch)
        assert self.store.drain(PATIENCE_S)
        durable, failed = self.store.take_write_results()
        assert sorted(durable) == sorted((slot, epoch) for slot in names)
        assert failed == []
        self.store.frames.forget(array(list(names)))

    # ---- read paths ----

    def copy_in(self, frames: NDArray[np.int32], block_ids: Slots) -> None:
        self.before_copy()
        for frame, block in zip(frames.tolist(), block_ids.tolist(), strict=True):
            self.hbm[block] = self.page_view(frame).copy()

    def load(
        self,
        names: dict[int, int],
        blocks: Sequence[int],
        epoch: int = 1,
        request: str = "r",
        *,
        whole: bool = False,
        compared: bool = False,
    ) -> LoadOutcome:
        self.start_load(names, blocks, epoch, request, whole=whole, compared=compared)
        return self.finish_load(request)

    def start_load(
        self,
        names: dict[int, int],
        blocks: Sequence[int],
        epoch: int = 1,
        request: str = "r",
        *,
        whole: bool = False,
        compared: bool = False,
    ) -> None:
        keys = tuple(key_of(name) for name in names.values())
        slots, epochs = array(list(names)), array([epoch] * len(names))
        job = LoadJob(request, slots, epochs, keys, array(blocks), compared=compared)
        self.store.load(job, whole=whole)

    def finish_load(self, request: str = "r") -> LoadOutcome:
        outcomes: list[LoadOutcome] = []
        until(lambda: bool(outcomes.extend(self.store.take_load_outcomes()) or outcomes), "a load")
        (outcome,) = outcomes
        assert outcome.request_id == request
        return outcome

    def walk(self, *contexts: Sequence[int], given_up: int | None = None) -> Walk:
        """Stream contexts (slots per row) through all layers, as a step does; each of them a second
        time, after so many pieces that were ``given_up``."""
        stream = self.store.stream([array(c) for c in contexts])
        shape = (self.geometry.kv_pages, self.geometry.payload_bytes)
        walk = Walk([{} for _ in contexts], stream.poisoned, stream.bad, stream.unread)
        per_layer = self.geometry.pages_per_layer
        start = self.store.arena.address
        for layer in range(self.geometry.layers):
            if given_up is not None:
                first_walk = stream.pieces(layer)
                for _ in range(given_up):
                    next(first_walk, None)
                stream.restart(layer)
            for piece in stream.pieces(layer):
                walk.pieces += 1
                for row in range(len(contexts)):
                    span = slice(int(piece.row_begin[row]), int(piece.row_end[row]))
                    for base, index in zip(
                        piece.base[span].tolist(), piece.index[span].tolist(), strict=True
                    ):
                        block = walk.blocks[row].setdefault(index, np.zeros(shape, np.uint8))
                        data = self.store.arena.view(base - start, self.geometry.layer_bytes)
                        pages = data.reshape(per_layer, -1)[:, : self.geometry.payload_bytes]
                        first = self.geometry.first_page(layer)
                        block[first : first + per_layer] = pages
        stream.close()
        return walk

    def assert_rows(self, walk: Walk, *names: Sequence[int] | None) -> None:
        """Rows have the content of these keys; None: the row is poisoned."""
        for row, expected in enumerate(names):
            assert (expected is None) == (row in walk.poisoned), f"row {row}"
            if expected is None:
                continue
            assert sorted(walk.blocks[row]) == list(range(len(expected)))
            for index, name in enumerate(expected):
                np.testing.assert_array_equal(walk.blocks[row][index], self.kv(name))

    # ---- ends ----

    def total(self, name: str, **labels: str) -> float:
        return self.counters.total(name, **labels)

    def assert_no_leak(self) -> None:
        """Every frame and every staging piece comes back once nothing refers to it."""
        frames = self.store.frames
        bound = [s for s in range(frames.slots) if frames.frame_of(s) >= 0]
        self.store.abandon(array(bound if self.store._pages is None else range(frames.slots)))
        there = self.store.open_frames
        until(lambda: frames.count(FrameState.FREE) == there, "the return of all frames")
        frames.audit()
        pools = [self.store._staging, self.store._loader._headers]
        if self.store._x_staging is not None:
            pools.append(self.store._x_staging)
        if self.store._writer._images is not None:
            pools.append(self.store._writer._images)
        for pool in pools:
            until(lambda pool=pool: pool.free() == pool.pieces, "the return of staging")
            assert len(set(pool._free)) == pool.pieces
        if self.store._pages is not None:
            cache = self.store._pages
            until(lambda: cache.usable() == cache.open_places, "the return of single pages")
            fetcher = self.store._fetcher
            until(lambda: fetcher.on_the_way() == 0, "the end of what is read ahead")
            assert cache.taken() == 0
            assert cache.held() == 0
            assert self.store._summaries is not None
            assert not self.store._summaries._pins.any()


MakeStore = Callable[..., StoreRig]


@pytest.fixture
def make_store(tmp_devices: Callable[[int], list[Path]], tmp_path: Path) -> Iterator[MakeStore]:
    """Make stores; they are closed, with patience, after the test."""
    rigs: list[StoreRig] = []

    def make(
        geometry: SlotGeometry = PAGED,
        *,
        slots: int = 32,
        frames: int = 16,
        staging: int = 8,
        devices: int = 4,
        weights: Sequence[float] | None = None,
        queue_depth: int = 4,
        throttle: Sequence[ThrottleRule] = (),
        placement: Placement | None = None,
        scrub_rate: int | None = None,
        verify: VerifyMode = "all",
        replicas: int = 1,
        gaps: Sequence[tuple[int, int]] = (),
        places: int = 32,
        lend: bool = False,
        summary_rows: int = 32,
        channels: ChannelTier = "dram",
        hbm_summaries: int = 0,
        block_tokens: int = BLOCK_TOKENS,
        faulty: bool = True,
        summarizer: SummaryBuilder | None = None,
        keeps: bool = False,
    ) -> StoreRig:
        if placement is None:
            placement = striped(geometry, weights or [1.0] * devices, slots, replicas)
        directories = tmp_devices(placement.devices)
        opened = [
            open_device(
                path,
                index=index,
                rank=RANK,
                nbytes=round_up(placement.device_bytes(index), PAGE_ALIGN),
                direct="auto",
                lock_timeout_s=0.0,
            )
            for index, path in enumerate(directories)
        ]
        choice = None
        if geometry.summary_pages:
            page_tokens = block_tokens // geometry.groups
            kept = channels != "ssd"
            nbytes = summary_rows * row_bytes(geometry, page_tokens, channels=kept)
            cache = None if lend else places * geometry.page_bytes
            choice = SparseMemory(
                page_tokens, slots, cache, nbytes, channels=channels, hbm_summaries=hbm_summaries
            )
        plan = _plan(geometry, frames, staging, scrub_rate is not None, choice)
        arena = Arena(plan.nbytes)
        arena.view(0, plan.nbytes)[:] = 0xEE
        control = tmp_path / f"faults{len(rigs)}.json"
        options = EngineOptions(
            engine="threads",
            queue_depth=queue_depth,
            fault_file=str(control) if faulty else None,
            throttle=tuple(throttle),
        )
        joined = geometry.summary_pages > 0
        engine = open_engine(options, [d.fd for d in opened], directories, arena, joined=joined)
        counters = Counters()
        health = DeviceHealth([str(d) for d in directories], PATIENCE_S, counters)
        speed = ThroughputEstimator(health.paths, weights or [1.0] * placement.devices)
        codec: SlotCodec = (
            CipherCodec(geometry, DIGEST, RANK, arena, SLOTS_KEY)
            if geometry.encrypted
            else ChecksumCodec(geometry, DIGEST, RANK, arena, PageSampler(verify))
        )
        files = SlotIO(
            geometry,
            placement,
            engine,
            health,
            speed,
            counters,
            DIGEST,
            RANK,
            PATIENCE_S,
            codec,
            Replicas(health, speed, slots, gaps),
        )
        rig: StoreRig

        def copy_in(frames: NDArray[np.int32], blocks: Slots) -> None:
            rig.copy_in(frames, blocks)

        # As in the connector: native code copies blocks that are kept as they lie, and no others.
        plain = Hbm(geometry) if geometry.kind == "opaque" else None
        store = ContextStore(
            files,
            arena,
            plan,
            slots,
            block_tokens,
            copy_in,
            summarizer=summarizer or (Tails(geometry) if geometry.tail_pages else None),
            scrub_rate=scrub_rate,
            stretches=None if plain is None else plain.stretches(),
            keeps_unwritten=keeps,
        )
        if plan.summaries_on_device:
            tokens = block_tokens // geometry.groups
            head_size = geometry.payload_bytes // (4 * tokens)
            layout = BlockLayout.unpadded(
                block_tokens, tokens, geometry.heads, head_size, torch.float16
            )
            held = torch.empty(hbm_summaries, dtype=torch.uint8)
            store.keep_on_device(summary_memory(held, store.device_places, layout, geometry))
        hbm = {} if plain is None else plain
        rig = StoreRig(geometry, store, opened, counters, control, hbm)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.faults()
        rig.deadline(PATIENCE_S)
        rig.store.close()
        for device in rig.devices:
            device.close()


def _plan(
    geometry: SlotGeometry, frames: int, staging: int, scrub: bool, choice: SparseMemory | None
) -> MemoryPlan:
    staging_bytes = staging * geometry.layer_bytes
    empty = MemoryPlan(geometry, 1 << 40, staging_bytes, scrub=scrub, choice=choice)
    nbytes = empty.frame_offset + frames * geometry.frame_bytes
    if choice is not None and choice.page_cache is None:
        nbytes = empty.page_offset + (32 + frames) * geometry.frame_bytes
    return MemoryPlan(geometry, nbytes, staging_bytes, scrub=scrub, choice=choice)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small store has several."""
    monkeypatch.setattr(dividing, "MIN_SLOTS", 16)


@pytest.fixture
def opened() -> Iterator[Callable[..., OpenStore]]:
    """Open ranks; what a test does not close is closed after it."""
    with ExitStack() as stack:

        def open_one(where: StorePlace, rank: int = 0, counters: Counters | None = None) -> Any:  # noqa: ANN401
            store = open_rank(where, rank, counters or Counters())
            stack.callback(store.close)
            stack.callback(store.files.engine.close, PATIENCE_S)
            return store

        yield open_one
