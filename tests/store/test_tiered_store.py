"""DRAM and SSD together: hold, write, load and stream over random shapes; the end."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.conftest import PAGED, PATIENCE_S, SHAPES, SHORT_S, MakeStore, array, content
from vllm_ssdkv.store.cache.frames import NO_FRAME, FrameState
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

# ---- hold ----


def test_hold_gives_what_there_is(make_store: MakeStore) -> None:
    rig = make_store(frames=8)
    assert len(rig.store.reserve_frames(array([]), wait=True)) == 0
    assert len(rig.store.reserve_frames(array(range(6)), wait=True)) == 6
    assert len(rig.store.reserve_frames(array(range(6, 12)), wait=True)) == 2
    assert len(rig.store.reserve_frames(array(range(8, 12)), wait=False)) == 0
    assert rig.total("write_stalls") == 0


def test_hold_may_spare_what_running_contexts_read(make_store: MakeStore) -> None:
    rig = make_store(frames=8)
    names = {slot: slot for slot in range(8)}
    rig.hold(names)
    rig.commit(names, epoch=1)
    assert rig.store.drain(PATIENCE_S)
    rig.store.extend_context("a", 0, array(range(5)))
    held = rig.store.reserve_frames(array(range(8, 14)), wait=False, spare_contexts=True)
    assert len(held) == 3
    assert all(rig.store.frames.frame_of(slot) != NO_FRAME for slot in range(5))
    assert len(rig.store.reserve_frames(array(range(11, 14)), wait=False)) == 3


def test_hold_waits_for_writes_only_when_it_has_to(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_store(frames=8)
    names = {slot: slot for slot in range(30)}
    rig.write(names)  # more than the frames, in parts
    before = rig.total("write_stalls")
    rig.faults({"kind": "stall", "op": "write"})
    rig.hold({slot: slot for slot in range(8)})
    rig.commit({slot: slot for slot in range(8)}, epoch=2)
    wait = rig.store.frames.wait_for_frames

    def go_on(*arguments: Any) -> Any:  # noqa: ANN401 - passed through
        rig.faults()
        return wait(*arguments)

    monkeypatch.setattr(rig.store.frames, "wait_for_frames", go_on)
    assert len(rig.store.reserve_frames(array([9]), wait=True)) == 1
    assert rig.total("write_stalls") == before + 1
    assert rig.total("write_stall_seconds") > 0


def test_hold_gives_up_at_the_deadline(make_store: MakeStore) -> None:
    rig = make_store(frames=8)
    rig.deadline(SHORT_S)
    rig.store.reserve_frames(array(range(8)), wait=True)
    begin = time.monotonic()
    assert len(rig.store.reserve_frames(array([9]), wait=True)) == 0
    assert SHORT_S <= time.monotonic() - begin < PATIENCE_S


def test_held_slots_lose_what_dram_had_of_them(make_store: MakeStore) -> None:
    rig = make_store()
    rig.write({0: 1})
    rig.store.extend_context("r", 0, array([0]))
    rig.load({0: 1}, [])
    rig.assert_rows(rig.walk([0]), [1])
    rig.hold({0: 2})
    rig.assert_rows(rig.walk([0]), [2])
    rig.store.frames.forget(array([0]))
    rig.assert_rows(rig.walk([0]), None)  # the old checksums went with the old content


# ---- contexts ----


def test_contexts_grow_and_start_anew(make_store: MakeStore) -> None:
    store = make_store().store
    assert store.whole_contexts(["r"])[0].tolist() == []
    store.extend_context("r", 0, array([4, 5]))
    store.extend_context("r", 2, array([6]))
    unknown, context = store.whole_contexts(["q", "r"])
    assert unknown.tolist() == []
    assert context.tolist() == [4, 5, 6]
    for start in (2, 4):
        with pytest.raises(ValueError, match=f"request r from {start} on cannot follow 3"):
            store.extend_context("r", start, array([7]))
    assert store.frames.referenced(array([4, 5, 6, 7])).tolist() == [True, True, True, False]
    store.extend_context("r", 0, array([9]))
    assert store.frames.referenced(array([4, 9])).tolist() == [False, True]
    store.drop_context("r")
    store.drop_context("r")
    assert not store.frames.referenced(array([9])).any()


def test_what_is_streamed_and_has_room_is_told(make_store: MakeStore) -> None:
    """An eighth of it at a time, each slot once, and nothing that running contexts would lose."""
    rig = make_store(slots=256, frames=80, devices=1)
    store = rig.store
    names = {slot: 700 + slot for slot in range(130)}
    rig.write(dict(list(names.items())[:80]))
    rig.write(dict(list(names.items())[80:]))
    every = array(list(names))
    store.frames.forget(every)
    first, second = every[:80], every[72:]  # they share eight slots
    contexts = [first, second]
    assert [len(blocks) for blocks in store.streamed(contexts, 1 / 8)] == [17, 0]
    told = store.streamed(contexts, 1)
    assert [len(blocks) for blocks in told] == [80, 0]  # as many as there are frames
    paired = [np.repeat(every, 2)]  # as X of two blocks is in each
    assert [blocks.tolist() for blocks in store.streamed(paired, 1)] == [list(range(0, 160, 2))]
    store.extend_context("first", 0, first)
    for slot in range(0, 78):
        assert rig.load({slot: names[slot]}, []).complete
    # Two frames are left, where 8 are wanted.
    assert [len(blocks) for blocks in store.streamed(contexts, 1 / 8)] == [0, 0]
    left = [first[78:], second[:0]]
    assert [blocks.tolist() for blocks in store.streamed(left, 1 / 8)] == [[0, 1], []]
    store.drop_context("first")
    blocks = store.streamed(contexts, 1 / 8)
    assert blocks[0].tolist() == [78, 79]
    assert blocks[1].tolist() == [8, 9, 10, 11, 12, 13]
    rig.assert_no_leak()


def test_checksums_are_kept_as_long_as_a_context_needs_them(make_store: MakeStore) -> None:
    rig = make_store()
    rig.store.extend_context("a", 0, array([0, 1]))
    rig.hold({0: 10, 1: 11})
    rig.commit({0: 10, 1: 11})
    assert rig.store.drain(PATIENCE_S)
    rig.store.extend_context("b", 0, array([1]))
    rig.store.frames.forget(array([0, 1]))
    rig.store.drop_context("a")
    rig.assert_rows(rig.walk([1], [0]), [11], None)
    rig.store.drop_context("b")
    rig.assert_rows(rig.walk([1]), None)


# ---- all of it ----


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    geometry=st.one_of(
        SHAPES,
        st.builds(
            SlotGeometry,
            st.just("opaque"),
            st.integers(1, 6),
            st.just(1),
            st.just(1),
            st.integers(1, 200_000),
            st.booleans(),
        ),
    ),
    weights=st.lists(st.sampled_from([1.0, 2.0, 0.7]), min_size=1, max_size=4),
    frames=st.integers(8, 12),
    depth=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip_over_random_shapes(
    make_store: MakeStore,
    geometry: SlotGeometry,
    weights: list[float],
    frames: int,
    depth: int,
    seed: int,
) -> None:
    rig = make_store(geometry, slots=20, frames=frames, weights=weights, queue_depth=depth)
    random = np.random.default_rng(seed)
    names = {int(slot): int(slot) + 1000 for slot in random.permutation(20)[:14]}
    rig.write(names)
    chosen = {slot: names[slot] for slot in random.permutation(list(names)).tolist()}
    if geometry.kind == "paged":
        rig.store.extend_context("r", 0, array(list(chosen)))
    to_hbm = len(chosen) if geometry.kind == "opaque" else int(random.integers(len(chosen)))
    outcome = rig.load(chosen, range(1, to_hbm + 1))
    assert outcome.complete
    expected = list(chosen.values())[len(chosen) - to_hbm :]
    assert sorted(rig.hbm) == list(range(1, to_hbm + 1))
    for block, name in enumerate(expected, 1):
        np.testing.assert_array_equal(rig.hbm[block], content(geometry, name))
    if geometry.kind == "paged":
        rig.assert_rows(rig.walk(list(chosen)), list(chosen.values()))
        rig.store.drop_context("r")
    rig.assert_no_leak()


# ---- the end ----


def test_closing_writes_what_is_committed(make_store: MakeStore) -> None:
    rig = make_store()
    rig.faults({"kind": "latency", "op": "write", "seconds": 0.05})
    rig.hold({slot: slot for slot in range(12)})
    rig.commit({slot: slot for slot in range(12)})
    rig.store.close()
    durable, failed = rig.store.take_write_results()
    assert (len(durable), failed) == (12, [])
    assert rig.store.frames.count(FrameState.WRITING) == 0


def test_closing_ends_although_a_device_hangs(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_store(PAGED)
    rig.write({0: 1})
    rig.deadline(SHORT_S)
    rig.faults({"kind": "stall"})
    rig.hold({1: 2})
    rig.commit({1: 2})
    rig.start_load({0: 1}, [5])
    begin = time.monotonic()
    rig.store.close()
    assert time.monotonic() - begin < PATIENCE_S
    assert "its memory stays allocated" in caplog.text
    assert rig.store.arena.view(0, 4096).shape == (4096,)  # not unmapped
    durable, failed = rig.store.take_write_results()
    assert (durable, failed) == ([], [(1, 1)])
