"""Frames: who may have which bytes when, and that every frame comes back."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from tests.store.conftest import PATIENCE_S, array
from vllm_ssdkv.store.cache.frames import NO_FRAME, FrameCache, FrameState
from vllm_ssdkv.store.memory.arena import Arena

FRAME_BYTES = 4096
FRAMES = 6
SLOTS = 10


@pytest.fixture
def cache() -> Iterator[FrameCache]:
    arena = Arena(FRAMES * FRAME_BYTES)
    yield FrameCache(arena, 0, FRAME_BYTES, FRAMES, SLOTS)
    arena.close()


def clean(cache: FrameCache, *slots: int) -> list[int]:
    """Frames that hold these slots, as after a load."""
    frames = cache.take(array(slots), FrameState.LOADING)
    cache.finish_io(frames, FrameState.CLEAN)
    return frames.tolist()


def cached(cache: FrameCache) -> set[int]:
    return {slot for slot in range(SLOTS) if cache.frame_of(slot) != NO_FRAME}


def test_a_frame_is_a_slot_sized_piece_of_the_arena() -> None:
    arena = Arena(5 * FRAME_BYTES)
    cache = FrameCache(arena, FRAME_BYTES, 2 * FRAME_BYTES, 2, SLOTS)
    frames = cache.take(array([4, 7]), FrameState.HELD)
    assert sorted(cache.buffer_offset(frames).tolist()) == [FRAME_BYTES, 3 * FRAME_BYTES]
    np.testing.assert_array_equal(
        cache.address(frames), cache.buffer_offset(frames) + np.uint64(arena.address)
    )
    for frame in frames.tolist():
        assert cache.view(frame).shape == (2 * FRAME_BYTES,)
        assert cache.view(frame).ctypes.data == cache.address(array([frame]).astype(np.int32))[0]


def test_frames_run_out_and_the_first_slots_get_them(cache: FrameCache) -> None:
    frames = cache.take(array(range(FRAMES + 2)), FrameState.HELD)
    assert len(set(frames.tolist())) == len(frames) == FRAMES
    assert cached(cache) == set(range(FRAMES))
    assert len(cache.take(array([FRAMES]), FrameState.HELD)) == 0


def test_a_slot_never_has_two_frames(cache: FrameCache) -> None:
    cache.take(array([3]), FrameState.HELD)
    with pytest.raises(ValueError, match="another"):
        cache.take(array([2, 3]), FrameState.LOADING)
    assert cached(cache) == {3}
    assert cache.count(FrameState.FREE) == FRAMES - 1


def test_bad_batches_are_refused_and_change_nothing(cache: FrameCache) -> None:
    clean(cache, 3)
    with pytest.raises(ValueError, match="twice"):
        cache.take(array([1, 2, 1]), FrameState.HELD)
    for bad in (-1, SLOTS):
        for slots_method in (
            cache.retain,
            cache.release_references,
            cache.referenced,
            cache.borrow,
            cache.start_writing,
            cache.forget,
        ):
            with pytest.raises(IndexError, match=f"slot {bad} of {SLOTS}"):
                slots_method(array([3, bad]))
        with pytest.raises(IndexError, match=f"slot {bad} of {SLOTS}"):
            cache.take(array([0, bad]), FrameState.HELD)
        with pytest.raises(IndexError, match=f"slot {bad} of {SLOTS}"):
            cache.frame_of(bad)
    for frame in (-2, FRAMES):
        wrong = np.array([0, frame], dtype=np.int32)
        for frames_method in (cache.give_back, cache.abandon):
            with pytest.raises(IndexError, match=f"frame {frame} of {FRAMES}"):
                frames_method(wrong)
        with pytest.raises(IndexError, match=f"frame {frame} of {FRAMES}"):
            cache.finish_io(wrong, FrameState.FREE)
        with pytest.raises(IndexError, match=f"frame {frame} of {FRAMES}"):
            cache.state(frame)
    with pytest.raises(IndexError, match="frame -1"):  # a reader may have none, an I/O may not
        cache.finish_io(np.array([NO_FRAME], dtype=np.int32), FrameState.FREE)
    for state in (FrameState.FREE, FrameState.WRITING, FrameState.CLEAN, FrameState.LOST):
        with pytest.raises(ValueError, match="filled or read into"):
            cache.take(array([0]), state)
    for state in (FrameState.WRITING, FrameState.LOADING, FrameState.LOST):
        with pytest.raises(ValueError, match="after its I/O"):
            cache.finish_io(np.array([0], dtype=np.int32), state)
    with pytest.raises(TypeError):
        cache.borrow(np.array([3], dtype=np.int32))  # type: ignore[arg-type]  # the error
    with pytest.raises(TypeError):
        cache.borrow(array([3, 3, 3, 3])[::2])
    cache.audit()
    assert cached(cache) == {3}
    assert cache.count(FrameState.FREE) == FRAMES - 1


def test_use_ends_with_the_last_reader(cache: FrameCache) -> None:
    frames = clean(cache, 0, 1, 2, 3, 4, 5)
    first, second = cache.borrow(array([0])), cache.borrow(array([0, 1]))
    cache.give_back(second)
    cache.give_back(cache.borrow(array([2])))
    cache.give_back(first)
    # 3, 4 and 5 were never used again; then 1, then 2, and 0 whose last reader ended last.
    for slot in (3, 4, 5, 1, 2, 0):
        assert cache.take(array([6]), FrameState.HELD).tolist() == [frames[slot]]
        cache.forget(array([6]))
        cache.take(array([7]), FrameState.HELD)
        cache.start_writing(array([7]))  # out of the way: in flight, and its slot forgotten
        cache.forget(array([7]))


def test_only_clean_frames_are_evicted_the_unused_first(cache: FrameCache) -> None:
    cache.take(array([0]), FrameState.HELD)
    cache.take(array([1]), FrameState.HELD)
    cache.start_writing(array([1]))
    cache.take(array([2]), FrameState.LOADING)
    clean(cache, 3, 4, 5)
    cache.give_back(cache.borrow(array([3])))
    assert len(cache.take(array([6]), FrameState.HELD)) == 1
    assert cached(cache) == {0, 1, 2, 3, 6} | {5}
    assert len(cache.take(array([7, 8, 9]), FrameState.HELD)) == 2
    assert cached(cache) == {0, 1, 2, 6, 7, 8}
    assert cache.evictions == 3


def test_contexts_are_evicted_last_and_never_when_spared(cache: FrameCache) -> None:
    clean(cache, 0, 1, 2, 3, 4, 5)
    cache.retain(array([0, 1]))
    cache.retain(array([1]))
    assert cache.referenced(array([0, 1, 2])).tolist() == [True, True, False]
    taken = cache.take(array([6, 7, 8, 9]), FrameState.LOADING, spare_contexts=True)
    cache.finish_io(taken, FrameState.CLEAN)
    assert cached(cache) >= {0, 1}
    assert cache.release_references(array([0, 1])).tolist() == [0]
    cache.forget(array([6, 7, 8, 9]))
    clean(cache, 2, 3, 4, 5)
    assert len(cache.take(array([6, 7, 8, 9]), FrameState.HELD)) == 4
    assert cached(cache) == {1, 6, 7, 8, 9} | (cached(cache) & {0, 2, 3, 4, 5})
    # Slot 1 is all that may be had, and belongs to a context.
    cache.forget(array([0, 2, 3, 4, 5]))
    assert len(cache.take(array([0]), FrameState.LOADING)) == 1
    assert len(cache.take(array([2]), FrameState.LOADING, spare_contexts=True)) == 0
    assert len(cache.take(array([2]), FrameState.HELD)) == 1
    assert 1 not in cached(cache)


def test_what_is_read_is_neither_evicted_nor_reused(cache: FrameCache) -> None:
    (frame,) = clean(cache, 0)
    borrowed = cache.borrow(array([0, 1, 0]))
    assert borrowed.tolist() == [frame, NO_FRAME, frame]
    others = cache.take(array(range(1, FRAMES + 1)), FrameState.HELD)
    assert frame not in others.tolist()
    assert len(others) == FRAMES - 1
    # Its slot may be given up and even get a new frame: the bytes stay as long as somebody reads.
    cache.forget(array([0, 1]))
    (fresh,) = cache.take(array([0]), FrameState.HELD).tolist()
    assert fresh != frame
    assert cache.state(frame) is FrameState.LOST
    cache.give_back(borrowed[:2])
    assert cache.state(frame) is FrameState.LOST
    cache.give_back(borrowed[2:])
    assert cache.state(frame) is FrameState.FREE
    assert cache.frame_of(0) == fresh


@pytest.mark.parametrize("state", [FrameState.CLEAN, FrameState.HELD])
def test_a_slot_forgotten_in_flight_gets_another_frame(
    cache: FrameCache, state: FrameState
) -> None:
    cache.take(array([0]), FrameState.HELD)
    (old,) = cache.start_writing(array([0])).tolist()
    cache.forget(array([0]))
    (new,) = cache.take(array([0]), FrameState.HELD).tolist()
    assert new != old
    assert cache.state(old) is FrameState.LOST
    cache.finish_io(array([old]).astype(np.int32), state)
    assert cache.state(old) is FrameState.FREE
    assert cache.frame_of(0) == new
    assert cache.state(new) is FrameState.HELD


def test_only_held_frames_are_written(cache: FrameCache) -> None:
    cache.take(array([0, 1]), FrameState.HELD)
    clean(cache, 2)
    cache.take(array([3]), FrameState.LOADING)
    frames = cache.start_writing(array([0, 2, 3, 4]))
    assert frames.tolist() == [cache.frame_of(0), NO_FRAME, NO_FRAME, NO_FRAME]
    assert cache.start_writing(array([0])).tolist() == [NO_FRAME]
    assert cache.state(cache.frame_of(1)) is FrameState.HELD


def test_an_abandoned_frame_is_out_of_use_until_it_is_settled(cache: FrameCache) -> None:
    frames = cache.take(array([0, 1]), FrameState.LOADING)
    cache.abandon(frames[:1])
    assert cached(cache) == {1}
    assert len(cache.take(array(range(2, 9)), FrameState.HELD)) == FRAMES - 2
    cache.finish_io(frames[:1], FrameState.FREE)
    assert cache.take(array([0]), FrameState.HELD).tolist() == frames[:1].tolist()


def test_waiting_ends_when_a_frame_is_free(cache: FrameCache) -> None:
    cache.take(array(range(FRAMES)), FrameState.HELD)
    frames = cache.start_writing(array([2]))
    results: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: results.append(
            cache.wait_for_frames(
                array([8, 9]), FrameState.HELD, time.monotonic() + PATIENCE_S
            ).tolist()
        )
    )
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    cache.finish_io(frames, FrameState.CLEAN)
    thread.join(PATIENCE_S)
    assert results == [frames.tolist()]


def test_waiting_ends_when_a_reader_gives_a_frame_back(cache: FrameCache) -> None:
    clean(cache, *range(FRAMES))
    borrowed = cache.borrow(array(range(FRAMES)))
    timer = threading.Timer(0.05, lambda: cache.give_back(borrowed[:1]))
    timer.start()
    taken = cache.wait_for_frames(array([9]), FrameState.HELD, time.monotonic() + PATIENCE_S)
    assert taken.tolist() == borrowed[:1].tolist()


def test_waiting_ends_at_the_deadline(cache: FrameCache) -> None:
    cache.take(array(range(FRAMES)), FrameState.HELD)
    for delay in (-1.0, 0.02):
        assert (
            len(cache.wait_for_frames(array([9]), FrameState.HELD, time.monotonic() + delay)) == 0
        )
    assert cached(cache) == set(range(FRAMES))


class Frames(RuleBasedStateMachine):
    """Random use of one cache against the one thing that counts: who owns which bytes."""

    writing = Bundle("writing")
    loading = Bundle("loading")
    borrowed = Bundle("borrowed")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(FRAMES * FRAME_BYTES)
        self.cache = FrameCache(self.arena, 0, FRAME_BYTES, FRAMES, SLOTS)
        self.in_use: dict[int, int] = {}  # frame to number of I/Os and readers
        self.stamp = 0

    def use(self, frame: int, change: int) -> None:
        self.in_use[frame] = self.in_use.get(frame, 0) + change

    def users(self, frame: int) -> int:
        return self.in_use.get(frame, 0)

    @rule(target=loading, slots=st.sets(st.integers(0, SLOTS - 1), min_size=1), spare=st.booleans())
    def load(self, slots: set[int], spare: bool) -> object:
        wanted = [s for s in slots if self.cache.frame_of(s) == NO_FRAME]
        frames = self.cache.take(array(wanted), FrameState.LOADING, spare_contexts=spare)
        for frame in frames.tolist():
            assert self.users(frame) == 0, "somebody still uses this frame"
            self.use(frame, 1)
        return multiple(*frames.tolist())

    @rule(slots=st.sets(st.integers(0, SLOTS - 1), min_size=1))
    def hold(self, slots: set[int]) -> None:
        self.cache.forget(array(sorted(slots)))
        frames = self.cache.take(array(sorted(slots)), FrameState.HELD)
        for frame in frames.tolist():
            assert self.users(frame) == 0, "somebody still uses this frame"

    @rule(target=writing, slots=st.sets(st.integers(0, SLOTS - 1)))
    def write(self, slots: set[int]) -> object:
        frames = self.cache.start_writing(array(sorted(slots)))
        frames = frames[frames != NO_FRAME]
        for frame in frames.tolist():
            self.use(frame, 1)
        return multiple(*frames.tolist())

    @rule(frame=consumes(writing), good=st.booleans())
    def written(self, frame: int, good: bool) -> None:
        self.use(frame, -1)
        state = FrameState.CLEAN if good else FrameState.HELD
        self.cache.finish_io(np.array([frame], np.int32), state)

    @rule(frame=consumes(loading), good=st.booleans(), late=st.booleans())
    def loaded(self, frame: int, good: bool, late: bool) -> None:
        frames = np.array([frame], np.int32)
        if late:
            self.cache.abandon(frames)
        self.use(frame, -1)
        self.cache.finish_io(frames, FrameState.CLEAN if good and not late else FrameState.FREE)

    @rule(target=borrowed, slots=st.lists(st.integers(0, SLOTS - 1)))
    def borrow(self, slots: list[int]) -> object:
        frames = self.cache.borrow(array(slots))
        for slot, frame in zip(slots, frames.tolist(), strict=True):
            if frame != NO_FRAME:
                assert self.cache.frame_of(slot) == frame
                self.use(frame, 1)
        return multiple(*[f for f in frames.tolist() if f != NO_FRAME])

    @rule(frame=consumes(borrowed))
    def give_back(self, frame: int) -> None:
        self.use(frame, -1)
        self.cache.give_back(np.array([frame], np.int32))

    @rule(slots=st.sets(st.integers(0, SLOTS - 1)))
    def forget(self, slots: set[int]) -> None:
        self.cache.forget(array(sorted(slots)))
        assert not cached(self.cache) & slots

    @rule(slots=st.lists(st.integers(0, SLOTS - 1)))
    def refer(self, slots: list[int]) -> None:
        self.cache.retain(array(slots))
        self.cache.release_references(array(slots[::2]))

    @invariant()
    def every_frame_has_one_place(self) -> None:
        bound = [f for s in range(SLOTS) if (f := self.cache.frame_of(s)) != NO_FRAME]
        assert len(set(bound)) == len(bound)
        free = [f for f in range(FRAMES) if self.cache.state(f) is FrameState.FREE]
        assert not set(free) & set(bound)
        assert not any(self.users(f) for f in free)
        lost = [f for f in range(FRAMES) if self.cache.state(f) is FrameState.LOST]
        assert sorted(free + bound + lost) == list(range(FRAMES))
        # A frame is out of use only as long as somebody uses it.
        assert all(self.users(f) for f in lost)
        self.cache.audit()

    def teardown(self) -> None:
        self.arena.close()


TestFrames = Frames.TestCase
TestFrames.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_process_may_end_while_a_thread_waits() -> None:
    """As after a device that hangs: the thread comes back from native code again and again."""
    script = """
import subprocess
import sys
import threading
import numpy as np
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.cache.frames import FrameCache, FrameState

frames = FrameCache(Arena(1 << 20), 0, 4096, 1, 8)
slots, begun = np.arange(2, dtype=np.int64), threading.Event()
frames.take(slots[:1], FrameState.HELD)

def wait():
    while True:
        frames.wait_for_frames(slots[1:], FrameState.LOADING, 0.0)
        begun.set()

threading.Thread(target=wait, daemon=True).start()
begun.wait()
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], check=False, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
