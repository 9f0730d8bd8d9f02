"""Layers that leave HBM one by one: what lies in frames, how many wait, and what fails."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kit.waiting import until
from tests.store.tails import memory_at
from vllm_ssdkv.base.errors import DeadlineError
from vllm_ssdkv.base.metrics import Counters, metric_key
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.identity.loaded_model import LoadedModel
from vllm_ssdkv.connector.identity.module_tree import TREE
from vllm_ssdkv.connector.kv_layout import KVLayout, block_layout, paged_geometry
from vllm_ssdkv.connector.messages import (
    ContextDelta,
    CopyFrames,
    CopyToDram,
    Flush,
    Row,
    SlotArray,
    StepPlan,
)
from vllm_ssdkv.connector.worker import layer_copy
from vllm_ssdkv.connector.worker.binding import Binding
from vllm_ssdkv.connector.worker.block_copy import BlockPort, LeavingBlocks, OpaquePort
from vllm_ssdkv.connector.worker.layer_copy import LEAST_BYTES, MOST_WAITING, LayerCopier
from vllm_ssdkv.connector.worker.page_mode import ContextLayers, PageMode
from vllm_ssdkv.connector.worker.paged_port import PagedPort
from vllm_ssdkv.connector.worker.rank_store import EmbeddedRank
from vllm_ssdkv.connector.worker.token_ordering import TokenOrdering
from vllm_ssdkv.connector.worker.worker import SSDKVWorker
from vllm_ssdkv.kernels.dense import select_kernels
from vllm_ssdkv.store.cache.frames import NO_FRAME, FrameCache, FrameState
from vllm_ssdkv.store.cache.summaries import SummaryTable
from vllm_ssdkv.store.context_store import ContextStore
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, SlotGeometry, round_up
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.memory.summary_rows import SummaryRows, row_bytes
from vllm_ssdkv.store.open import StorePlace, open_rank

LAYERS, BLOCKS, HEADS, TOKENS, SIZE = 5, 8, 2, 32, 16
NAMES = tuple(f"layers.{i}" for i in range(LAYERS))
PAGE_TOKENS = 16
ROWS = 8
PATIENCE_S = 20.0
CPU = torch.device("cpu")
SAVE = CopyToDram.of([(7, 1, 5, -1), (3, 1, 2, 4), (4, 1, 6, 5)])


class GatedPort:
    """A port whose layers pass one by one, when the gate lets them."""

    def __init__(self, port: BlockPort):
        self.port = port
        self.gate = threading.Semaphore(1 << 20)
        self.wrong: set[int] = set()
        """Layers whose copy fails."""
        self.layers: list[int] = []
        self.whole = 0
        self.threads: set[str] = set()

    def save(self, blocks: LeavingBlocks) -> None:
        self.whole += 1
        self.port.save(blocks)

    def save_layer(self, layer: int, blocks: LeavingBlocks) -> None:
        assert self.gate.acquire(timeout=PATIENCE_S)
        if layer in self.wrong:
            raise OSError(f"layer {layer}")
        self.layers.append(layer)
        self.threads.add(threading.current_thread().name)
        self.port.save_layer(layer, blocks)

    def load(self, *arguments: Any) -> None:  # noqa: ANN401 - passed through
        self.port.load(*arguments)

    def shut(self) -> None:
        self.gate = threading.Semaphore(0)


SELECTORS = {"bounds": "bounds", "codes": "codes", "channels": "sparf", "ordered": "bounds"}
"""Selectors of stores with summaries, by name."""


@dataclass
class Rig:
    caches: list[torch.Tensor]
    frames: FrameCache
    port: GatedPort
    copier: LayerCopier
    counters: Counters
    geometry: SlotGeometry
    table: SummaryTable | None = None

    def compute(self, layer: int, name: str | None = None) -> None:
        """A layer computes: its blocks get numbers that were never there."""
        self.caches[layer].copy_(torch.randn(self.caches[layer].shape))
        self.copier.computed(name or NAMES[layer])

    def begin(self, save: CopyToDram = SAVE) -> None:
        def rows(slots: SlotArray) -> SummaryRows | None:
            return None if self.table is None else self.table.reserve(slots)

        self.copier.begin(save, lambda slots: self.frames.take(slots, FrameState.HELD), rows)

    def check(self, save: CopyToDram = SAVE) -> None:
        """Check that frames hold the blocks, or frames and rows those of a copy of all layers."""
        if self.table is not None:
            self.check_summarized(self.table, save)
            return
        for slot, block in zip(save.slots.tolist(), save.block_ids.tolist(), strict=True):
            view = self.frames.view(self.frames.frame_of(slot))
            for layer, cache in enumerate(self.caches):
                begin = self.geometry.layer_offset(layer)
                lying = self.pages(cache[block]).view(torch.uint8).numpy()
                pages = view[begin : begin + self.geometry.layer_bytes].reshape(len(lying), -1)
                np.testing.assert_array_equal(pages[:, : lying.shape[1]], lying)

    def check_summarized(self, table: SummaryTable, save: CopyToDram) -> None:
        others = save.slots + 50
        frames, rows = self.frames.take(others, FrameState.HELD), table.reserve(others)
        self.port.port.save(LeavingBlocks(save.block_ids, frames, rows, save.index))
        found = []
        for slots in (save.slots, others):
            table.keep(slots)
            pinned = table.pin(slots)
            assert (pinned >= 0).all()
            addresses = table.address(pinned, 0).tolist()
            size = row_bytes(self.geometry, PAGE_TOKENS, channels=rows.channels >= 0)
            found.append([memory_at(at, size).tobytes() for at in addresses])
            places = self.frames.frames_of(slots).tolist()
            begin = self.geometry.header_bytes
            found[-1] += [self.frames.view(frame)[begin:].tobytes() for frame in places]
            table.unpin(pinned)
        assert found[0] == found[1]
        assert all(map(any, found[0]))
        self.frames.forget(others)
        table.forget(others)

    def pages(self, block: torch.Tensor) -> torch.Tensor:
        return block.reshape(self.geometry.pages_per_layer, -1)

    def count(self, name: str, **labels: str) -> float:
        return self.counters.total(name, **labels)


def layout_of(geometry: SlotGeometry, **others: Any) -> KVLayout:  # noqa: ANN401 - of any field
    return KVLayout(
        NAMES, TOKENS, HEADS, SIZE, torch.float32, geometry, ranks=1, num_blocks=BLOCKS, **others
    )


@contextmanager
def rig(
    mode: str = "reuse",
    frames: int = 16,
    deadline_s: float = PATIENCE_S,
    **others: Any,  # noqa: ANN401 - of any field
) -> Iterator[Rig]:
    """``others``: of the layout."""
    shape = (BLOCKS, HEADS * TOKENS * SIZE * 2)
    caches = [torch.randn(shape) for _ in NAMES]
    config = SSDKVConfig.from_extra_config(
        {
            "mode": "page",
            "devices": ["/nowhere"],
            "page_tokens": PAGE_TOKENS,
            "selector": SELECTORS.get(mode, "exact"),
        }
    )
    geometry = paged_geometry(config, LAYERS, HEADS, SIZE, TOKENS, torch.float32)
    if mode == "reuse":
        geometry = SlotGeometry("opaque", LAYERS, 1, 1, shape[1] * 4)
    layout = layout_of(geometry, **others)
    behind = round_up(frames * geometry.frame_bytes, PAGE_ALIGN)
    channels, table = geometry.channel_pages > 0, None
    size = row_bytes(geometry, PAGE_TOKENS, channels=channels) if geometry.tail_pages else 0
    arena = Arena(round_up(behind + ROWS * size, PAGE_ALIGN))
    if size:
        table = SummaryTable(arena, behind, geometry, PAGE_TOKENS, ROWS, 100, channels=channels)
    ordering = None
    if mode == "ordered":
        hbm = block_layout(layout, PAGE_TOKENS)
        ordering = TokenOrdering(hbm, LAYERS, (0, 2, 3), 0, by_co_activation=False)
    cache = FrameCache(arena, 0, geometry.frame_bytes, frames, 100)
    port: BlockPort
    if mode == "reuse":
        port = OpaquePort(caches, geometry, cache)
    else:
        hbm = block_layout(layout, PAGE_TOKENS)
        port = PagedPort(select_kernels(CPU), caches, hbm, geometry, cache, ordering)
    gated, counters = GatedPort(port), Counters()
    copier = LayerCopier(gated, layout, CPU, deadline_s, counters)
    copier.least_bytes = 1
    try:
        yield Rig(caches, cache, gated, copier, counters, geometry, table)
    finally:
        gated.gate = threading.Semaphore(1 << 20)
        assert copier.close(PATIENCE_S)
        arena.close()


@pytest.mark.parametrize("mode", ["reuse", "page", *SELECTORS])
def test_each_layer_is_copied_beside_the_next(mode: str) -> None:
    with rig(mode) as it:
        it.begin()
        for layer in range(LAYERS):
            it.compute(layer)
            until(lambda: len(it.port.layers) == layer + 1)  # noqa: B023 - called at once
        until(lambda: it.copier.waiting == 0)
        assert it.copier.end() == len(SAVE.slots)
        it.check()
        assert it.port.layers == list(range(LAYERS))
        assert threading.current_thread().name not in it.port.threads
        assert it.count("layers_copied", when="beside") == LAYERS
        assert it.count("layers_copied", when="end") == 0
        assert it.count("step_copies", way="layers") == 1
        assert it.copier.end() == 0, "the step is over"


def test_two_wait_and_the_third_waits_for_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, wait = threading.Event(), layer_copy.wait

    def told(*arguments: Any) -> Any:  # noqa: ANN401 - passed through
        waits.set()
        return wait(*arguments)

    monkeypatch.setattr(layer_copy, "wait", told)
    with rig() as it:
        it.port.shut()
        gate = it.port.gate
        it.begin()
        for layer in range(MOST_WAITING):
            it.compute(layer)
        assert it.port.layers == []
        assert it.count("layer_copy_waits") == 0
        third = threading.Thread(target=it.compute, args=(MOST_WAITING,))
        third.start()
        assert waits.wait(PATIENCE_S)
        third.join(0.05)
        assert third.is_alive()
        assert it.copier.waiting == MOST_WAITING
        gate.release()
        third.join(PATIENCE_S)
        assert not third.is_alive()
        assert it.count("layer_copy_waits") == 1
        assert it.count("layer_copy_wait_seconds") >= 0.04
        gate.release(LAYERS)
        for layer in range(MOST_WAITING + 1, LAYERS):
            it.compute(layer)
        assert it.copier.end() == len(SAVE.slots)
        it.check()
        assert it.copier.most_waiting == MOST_WAITING
        assert it.counters.take_gauges()["layers_waiting"] == MOST_WAITING


@settings(deadline=None)
@given(
    told=st.lists(st.integers(0, LAYERS - 1), max_size=3 * LAYERS),
    slow=st.booleans(),
    mode=st.sampled_from(["reuse", "page", *SELECTORS]),
)
def test_frames_hold_what_was_computed_last(told: Sequence[int], slow: bool, mode: str) -> None:
    """In whatever order layers come, twice or never: as where drafts run them again."""
    with rig(mode) as it:
        for _ in range(2):
            it.frames.forget(SAVE.slots)
            if it.table is not None:
                it.table.forget(SAVE.slots)
            it.begin()
            if slow:
                it.port.gate = threading.Semaphore(1)
                release = threading.Timer(0.002, it.port.gate.release, (100,))
                release.start()
            for layer in told:
                it.compute(layer)
            assert it.copier.end() == len(SAVE.slots)
            it.check()
            assert it.copier.most_waiting <= MOST_WAITING
            if slow:
                release.join()
        counts = Counter(told)
        once = {layer for layer, count in counts.items() if count == 1}
        assert it.count("layers_copied", when="beside") <= 2 * len(once)
        assert it.count("step_copies", way="layers" if told else "untold") == 2
        assert it.port.whole == (0 if told else 2)


def test_layers_of_groups_that_share_memory_wait_for_each_other() -> None:
    other = tuple(f"windows.{i}" for i in range(LAYERS - 1))
    with rig(overlaid=(other,)) as it:
        it.begin()
        for layer in range(LAYERS):
            it.compute(layer)
        until(lambda: it.copier.waiting == 0)
        assert it.port.layers == [LAYERS - 1], "the one that has no other layer in its place"
        for layer, name in enumerate(other):
            it.compute(layer, name)
        it.copier.end()
        it.check()
        assert it.port.layers == [LAYERS - 1, *range(LAYERS - 1)]


@pytest.mark.parametrize(
    ("way", "least", "others", "frames"),
    [
        ("cpu", LEAST_BYTES["cpu"], {}, 16),
        ("small", 1 << 30, {}, 16),
        ("states", 1, {"has_states": True}, 16),
        ("frames", 1, {}, 0),
    ],
)
def test_others_go_at_the_end_and_are_counted(
    way: str, least: int | None, others: dict[str, Any], frames: int
) -> None:
    with rig(**others) as it:
        it.copier.least_bytes = least
        if not frames:
            it.frames.take(np.arange(50, 66), FrameState.HELD)
        it.begin()
        for layer in range(LAYERS):
            it.compute(layer)
        assert it.copier.end() == 0
        assert it.port.layers == []
        it.begin(CopyToDram.of(()))  # nothing is complete
        gained = {key: gain for key, gain in it.counters.take_gained().items() if gain}
        assert gained == {metric_key("step_copies", {"way": way}): 1}


def test_as_many_as_there_are_frames_for() -> None:
    with rig(frames=2) as it:
        it.begin()
        for layer in range(LAYERS):
            it.compute(layer)
        assert it.copier.end() == 2
        it.check(SAVE.part(np.array([True, True, False])))


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_copy_that_fails_ends_the_step(layer: int) -> None:
    with rig() as it:
        it.port.wrong = {layer}
        it.begin()

        def step() -> None:
            for each in range(LAYERS):
                it.compute(each)
            it.copier.end()

        with pytest.raises(OSError, match=f"layer {layer}"):
            step()
        assert it.copier.drop().tolist() == SAVE.slots.tolist()
        assert it.copier.drop().tolist() == []
        it.port.wrong = set()
        it.frames.forget(SAVE.slots)
        it.begin()
        step()
        it.check()


def test_a_copy_that_hangs_ends_the_step_at_its_deadline() -> None:
    with rig(deadline_s=0.05) as it:
        it.port.shut()
        gate = it.port.gate
        it.begin()
        for layer in range(MOST_WAITING):
            it.compute(layer)
        with pytest.raises(DeadlineError, match=r"within 0\.05 s \(io\.deadline\)"):
            it.compute(MOST_WAITING)
        with pytest.raises(DeadlineError):
            it.copier.end()
        with pytest.raises(DeadlineError):
            it.copier.drop()  # its frames are in use
        assert not it.copier.close(0.01)
        gate.release(LAYERS)
        until(lambda: len(it.port.layers) == MOST_WAITING)
        assert len(it.copier.drop()) == len(SAVE.slots)


@dataclass
class Stream:
    """Remembers what is queued on it."""

    device: object = None
    queued: list[object] = field(default_factory=list)

    def wait_event(self, event: Event) -> None:
        self.queued.append(("after", event.stream, event.place))


@dataclass
class Event:
    stream: Stream | None = None
    place: int = -1

    def record(self, stream: Stream) -> None:
        self.stream, self.place = stream, len(stream.queued)


def test_on_a_gpu_a_layer_is_copied_behind_its_own_computing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a stream that is stood in for: none waits for what the step queues later."""
    forward = Stream()
    here = threading.local()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        here.stream = stream
        yield
        del here.stream

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: getattr(here, "stream", forward)
    )

    class Port:
        side: Stream

        def save(self, *_: object) -> None:
            raise AssertionError("all layers were told of")

        def load(self, *_: object) -> None:
            raise AssertionError("nothing is loaded")

        def save_layer(self, layer: int, *_: object) -> None:
            self.side = here.stream
            self.side.queued.append(f"copy {layer}")

    port, device = Port(), torch.device("cuda", 0)
    geometry = SlotGeometry("opaque", LAYERS, 1, 1, 4096)
    copier = LayerCopier(port, layout_of(geometry), device, PATIENCE_S, Counters())
    assert copier.least_bytes == LEAST_BYTES["cuda"]
    copier.least_bytes = 1
    copier.begin(SAVE, lambda slots: np.arange(len(slots), dtype=np.int32), lambda _: None)
    for layer, name in enumerate(NAMES):
        forward.queued.append(f"layer {layer}")
        copier.computed(name)
    copier.end()
    assert copier.close(PATIENCE_S)
    assert port.side is not forward
    assert port.side.queued == [
        step for layer in range(LAYERS) for step in (("after", forward, layer + 1), f"copy {layer}")
    ]


# ---- a rank ----


@pytest.fixture(params=["exact", "bounds"])
def worker(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SSDKVWorker]:
    """Page mode's worker with its store, and without vLLM; every layer goes alone."""
    device = {"path": str(tmp_path / "ssd"), "capacity": "16MiB"}
    (tmp_path / "ssd").mkdir(mode=0o700)
    config = SSDKVConfig.from_extra_config(
        {
            "mode": "page",
            "devices": [device],
            "dram_gib": "16MiB",
            "io": {"staging": "4MiB"},
            "selector": request.param,
            **({} if request.param == "exact" else {"sparse": {"summaries": "1MiB"}}),
        }
    )
    geometry = paged_geometry(config, LAYERS, HEADS, SIZE, TOKENS, torch.float32)
    place = StorePlace(config, [geometry], Fingerprint({"model": "none"}))
    TREE.install()
    root = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model = LoadedModel(root, str)
    access = EmbeddedRank(open_rank(place, 0, place.counters, 0), ContextStore)
    layout = layout_of(geometry)
    binding = Binding(model, 0, lambda _: None)
    layers = ContextLayers(range(LAYERS))
    page_mode = functools.partial(PageMode.open, config, layout, access, layers)
    made = SSDKVWorker(config, layout, access, page_mode, binding)
    caches = {name: torch.randn(BLOCKS, HEADS * TOKENS * SIZE * 2) for name in NAMES}
    made.register(caches)
    assert made.layers is not None
    made.layers.least_bytes = 1
    yield made
    made.close()


def plan(step: int, *slots: int) -> StepPlan:
    """A step that completes and commits a block for each slot."""
    save = CopyToDram.of([(slot, step, number, -1) for number, slot in enumerate(slots, 1)])
    commit = Flush.of([(slot, step, bytes([slot] * 32)) for slot in slots])
    return StepPlan(step, (0,), save=save, commit=commit)


def durable(worker: SSDKVWorker, count: int) -> list[tuple[int, int]]:
    """(slot, epoch) pairs that were written."""
    found: list[tuple[int, int]] = []

    def written() -> bool:
        worker.collect(idle=False)
        report = worker.take_report()
        found.extend(report.durable if report is not None else ())
        return len(found) >= count

    until(written)
    return sorted(found)


def check_summaries(worker: SSDKVWorker, count: int) -> None:
    """Check that so many slots have summaries, if the store keeps any, and that none is in use."""
    table = worker.page_mode.store._summaries
    if table is not None:
        assert table.held() == count
        assert table.pinned() == 0


def frame(worker: SSDKVWorker, slot: int) -> int:
    return worker.store.frames.frame_of(slot)


def test_a_step_that_fails_leaves_no_frame_and_commits_nothing(worker: SSDKVWorker) -> None:
    assert worker.layers is not None
    worker.begin(plan(1, 3, 4))
    worker.layers.computed(NAMES[0])
    assert frame(worker, 3) != NO_FRAME
    # The next step comes without the end of this one.
    worker.begin(second := plan(2, 5))
    assert frame(worker, 3) == frame(worker, 4) == NO_FRAME
    check_summaries(worker, 0)
    for name in NAMES:
        worker.layers.computed(name)
    worker.end(second)
    assert durable(worker, 1) == [(5, 2)]
    check_summaries(worker, 1)
    assert worker.counters.total("step_copies", way="layers") == 1


def test_an_engine_that_ends_in_a_step_commits_nothing(worker: SSDKVWorker) -> None:
    assert worker.layers is not None
    worker.begin(plan(1, 3))
    worker.layers.computed(NAMES[0])
    worker.close()
    assert worker.store.take_write_results() == ([], [])


def test_blocks_of_a_row_without_its_context_are_not_kept(worker: SSDKVWorker) -> None:
    assert worker.layers is not None
    step = plan(1, 3, 4)
    step.contexts = [ContextDelta("lost", 0, step.save.slots[:1])]
    step.rows = [Row("lost", 1, 1, 0, hbm_start=2)]  # of whose first two blocks one is known
    worker.begin(step)
    for name in NAMES:
        worker.layers.computed(name)
    worker.end(step)
    assert frame(worker, 3) == NO_FRAME
    report = worker.take_report()
    assert report is not None
    assert report.skipped == [(3, 1)]
    assert durable(worker, 1) == [(4, 1)]
    check_summaries(worker, 1)


class Device:
    """Stands for a device that attends, and keeps bytes of these slots."""

    def __init__(self, *slots: int):
        self.kept = set(slots)

    def reclaim(self, slots: NDArray[np.int64]) -> None:
        self.kept -= set(slots.tolist())

    def count_stored(self, nbytes: int) -> None:
        pass

    @property
    def device(self) -> Device:
        return self

    def end_step(self) -> None:
        self.kept.clear()

    def close(self, timeout_s: float) -> bool:
        return timeout_s > 0


def test_devices_forget_a_step_whose_forward_pass_failed(worker: SSDKVWorker) -> None:
    attends: Any = Device(9)
    worker.page_mode.offloader = attends
    worker.begin(plan(1, 3))
    assert attends.kept == {9}
    worker.give_up()
    assert attends.kept == set()


class Inputs:
    """Stand-in for X of a step's tokens, which is kept until the step ends."""

    kept = True

    def end_step(self, counters: Counters) -> None:
        del counters
        self.kept = False


def test_x_of_a_step_whose_forward_pass_failed_is_not_kept(worker: SSDKVWorker) -> None:
    """The next step, whose rows keep none, would look for it."""
    inputs: Any = Inputs()
    worker.begin(plan(1, 3))
    worker.page_mode.x_cache = inputs
    worker.give_up()
    worker.page_mode.x_cache = None
    assert not inputs.kept


def test_devices_forget_slots_that_get_copies_even_if_the_source_is_lost(
    worker: SSDKVWorker,
) -> None:
    """They would attend to what these slots had before."""
    worker.begin(first := plan(1, 3))
    worker.end(first)
    assert durable(worker, 1) == [(3, 1)]
    attends: Any = Device(3, 7, 8, 9)
    worker.page_mode.offloader = attends
    old, new = np.array([3, 4]), np.array([7, 8])  # slot 4 has left DRAM
    keys = bytes([3] * 32), bytes([4] * 32)
    second = StepPlan(2, (0,), copy_frames=CopyFrames(old, np.array([1, 1]), new, new + 10, keys))
    worker.begin(second)
    worker.end(second)
    assert attends.kept == {3, 9}
    report = worker.take_report()
    assert report is not None
    assert report.failed_writes == [(8, 18)]
    assert durable(worker, 1) == [(7, 17)]
