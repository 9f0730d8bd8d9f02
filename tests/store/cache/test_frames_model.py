"""The native frame tables against a plain model: same frames, same states, same victims."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.store.conftest import array
from vllm_ssdkv.store.cache.frames import NO_FRAME, FrameCache, FrameState
from vllm_ssdkv.store.memory.arena import Arena

FRAME_BYTES = 4096
SLOTS = 12
READABLE = {FrameState.HELD, FrameState.WRITING, FrameState.CLEAN}


@dataclass
class Frame:
    """One frame of the model."""

    slot: int | None = None
    state: FrameState = FrameState.FREE
    in_flight: bool = False
    readers: int = 0
    used: int = 0
    """When it last became evictable, or changed its class."""


class Model:
    """What :class:`FrameCache` is meant to do, in the slowest way."""

    def __init__(self, frames: int, shut: int) -> None:
        self.frames = [Frame() for _ in range(frames)]
        self.frames += [Frame(state=FrameState.SHUT) for _ in range(shut)]
        self.free = list(range(frames))
        """The next to be taken stands first."""
        self.references = dict.fromkeys(range(SLOTS), 0)
        self.clock = 0
        self.evictions = 0

    def frame_of(self, slot: int) -> int:
        return next((i for i, f in enumerate(self.frames) if f.slot == slot), NO_FRAME)

    def evictable(self, frame: int) -> bool:
        return self.frames[frame].state is FrameState.CLEAN and not self.frames[frame].readers

    def touch(self, frame: int) -> None:
        if frame != NO_FRAME and self.evictable(frame):
            self.clock += 1
            self.frames[frame].used = self.clock

    def reclaim(self, frame: int) -> None:
        it = self.frames[frame]
        if it.state is FrameState.LOST and not it.in_flight and not it.readers:
            it.state = FrameState.FREE
            self.free.insert(0, frame)

    def unbind(self, frame: int) -> None:
        self.frames[frame].slot = None
        self.frames[frame].state = FrameState.LOST

    def retain(self, slots: list[int]) -> None:
        for slot in slots:
            self.references[slot] += 1
            if self.references[slot] == 1:
                self.touch(self.frame_of(slot))

    def release(self, slots: list[int]) -> list[int]:
        for slot in slots:
            self.references[slot] -= 1
            if self.references[slot] == 0:
                self.touch(self.frame_of(slot))
        return sorted({slot for slot in slots if self.references[slot] == 0})

    def borrow(self, slots: list[int]) -> list[int]:
        frames = [self.frame_of(slot) for slot in slots]
        found = [
            f if f != NO_FRAME and self.frames[f].state in READABLE else NO_FRAME for f in frames
        ]
        for frame in found:
            if frame != NO_FRAME:
                self.frames[frame].readers += 1
        return found

    def give_back(self, frames: list[int]) -> None:
        for frame in frames:
            self.frames[frame].readers -= 1
            self.touch(frame)
            self.reclaim(frame)

    def take(self, slots: list[int], state: FrameState, spare: bool) -> list[int]:
        taken = []
        for slot in slots:
            if not self.free:
                candidates = [
                    (self.references[f.slot] > 0, f.used, i)
                    for i, f in enumerate(self.frames)
                    if f.slot is not None and self.evictable(i)
                ]
                if not candidates or (spare and min(candidates)[0]):
                    break
                victim = min(candidates)[2]
                self.unbind(victim)
                self.reclaim(victim)
                self.evictions += 1
            frame = self.free.pop(0)
            self.frames[frame] = Frame(slot, state, state is FrameState.LOADING)
            taken.append(frame)
        return taken

    def start_writing(self, slots: list[int]) -> list[int]:
        found = []
        for slot in slots:
            frame = self.frame_of(slot)
            held = frame != NO_FRAME and self.frames[frame].state is FrameState.HELD
            if held:
                self.frames[frame].state = FrameState.WRITING
                self.frames[frame].in_flight = True
            found.append(frame if held else NO_FRAME)
        return found

    def settle(self, frames: list[int], state: FrameState) -> None:
        for frame in frames:
            it = self.frames[frame]
            it.in_flight = False
            if it.slot is not None:
                if state is FrameState.FREE:
                    self.unbind(frame)
                else:
                    it.state = state
                    self.touch(frame)
            self.reclaim(frame)

    def abandon(self, frames: list[int]) -> None:
        for frame in frames:
            if self.frames[frame].slot is not None:
                self.unbind(frame)

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            frame = self.frame_of(slot)
            if frame != NO_FRAME:
                self.unbind(frame)
                self.reclaim(frame)

    def open(self, frames: list[int]) -> None:
        for frame in frames:
            self.frames[frame].state = FrameState.FREE
            self.free.insert(0, frame)

    def shut(self, frames: list[int]) -> list[bool]:
        for frame in frames:
            it = self.frames[frame]
            if it.slot is not None and self.evictable(frame):
                self.unbind(frame)
                self.reclaim(frame)
                self.evictions += 1
            if it.state is FrameState.FREE:
                it.state = FrameState.SHUT
                self.free.remove(frame)
        return [self.frames[frame].state is FrameState.SHUT for frame in frames]

    def spare(self) -> int:
        loose = [f for i, f in enumerate(self.frames) if f.slot is not None and self.evictable(i)]
        return len(self.free) + sum(
            not self.references[f.slot] for f in loose if f.slot is not None
        )


slot_lists = st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=8)
distinct_slots = st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=8, unique=True)


def frame_array(frames: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(frames, dtype=np.int32)


class LikeTheModel(RuleBasedStateMachine):
    """Random batches, made to both. I/O, readers and contexts end in any order and grouping."""

    @initialize(frames=st.integers(1, 7), lent=st.integers(0, 3))
    def start(self, frames: int, lent: int) -> None:
        self.arena = Arena((frames + lent) * FRAME_BYTES)
        more = np.arange(frames, frames + lent, dtype=np.uint64) * np.uint64(FRAME_BYTES)
        self.cache = FrameCache(self.arena, 0, FRAME_BYTES, frames, SLOTS, more)
        self.model = Model(frames, lent)
        self.in_flight: list[int] = []
        self.borrowed: list[int] = []
        self.contexts: list[list[int]] = []
        self.cached(list(range(frames)))

    def teardown(self) -> None:
        self.arena.close()

    @rule(
        slots=distinct_slots,
        state=st.sampled_from([FrameState.HELD, FrameState.LOADING]),
        spare=st.booleans(),
    )
    def take(self, slots: list[int], state: FrameState, spare: bool) -> None:
        slots = [slot for slot in slots if self.model.frame_of(slot) == NO_FRAME]
        taken = self.cache.take(array(slots), state, spare_contexts=spare).tolist()
        assert taken == self.model.take(slots, state, spare)
        if state is FrameState.LOADING:
            self.in_flight += taken

    @rule(slots=distinct_slots)
    def cached(self, slots: list[int]) -> None:
        """A load that ends at once, so that there is always something to read and to evict."""
        before = len(self.in_flight)
        self.take(slots, FrameState.LOADING, False)
        loaded, self.in_flight = self.in_flight[before:], self.in_flight[:before]
        self.cache.finish_io(frame_array(loaded), FrameState.CLEAN)
        self.model.settle(loaded, FrameState.CLEAN)

    @rule(slots=distinct_slots)
    def write(self, slots: list[int]) -> None:
        frames = self.cache.start_writing(array(slots)).tolist()
        assert frames == self.model.start_writing(slots)
        self.in_flight += [frame for frame in frames if frame != NO_FRAME]

    def some(self, data: st.DataObject, of: list[int]) -> list[int]:
        """Take some entries out of a list, in any order."""
        order = data.draw(st.permutations(range(len(of))))
        chosen = order[: data.draw(st.integers(1, len(of)))]
        taken = [of[i] for i in chosen]
        of[:] = [x for i, x in enumerate(of) if i not in chosen]
        return taken

    @precondition(lambda self: self.in_flight)
    @rule(
        data=st.data(),
        state=st.sampled_from([FrameState.FREE, FrameState.HELD, FrameState.CLEAN]),
        late=st.booleans(),
    )
    def settle(self, data: st.DataObject, state: FrameState, late: bool) -> None:
        frames = self.some(data, self.in_flight)
        if late:
            self.cache.abandon(frame_array(frames))
            self.model.abandon(frames)
        self.cache.finish_io(frame_array(frames), state)
        self.model.settle(frames, state)

    @rule(slots=slot_lists)
    def borrow(self, slots: list[int]) -> None:
        frames = self.cache.borrow(array(slots)).tolist()
        assert frames == self.model.borrow(slots)
        self.borrowed += [frame for frame in frames if frame != NO_FRAME]

    @precondition(lambda self: self.borrowed)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        frames = self.some(data, self.borrowed)
        self.cache.give_back(frame_array([NO_FRAME, *frames]))
        self.model.give_back(frames)

    @rule(slots=slot_lists)
    def read(self, slots: list[int]) -> None:
        """A reader that ends at once."""
        frames = self.cache.borrow(array(slots))
        assert frames.tolist() == self.model.borrow(slots)
        self.cache.give_back(frames)
        self.model.give_back([frame for frame in frames.tolist() if frame != NO_FRAME])

    @rule(slots=slot_lists)
    def pass_by(self, slots: list[int]) -> None:
        """A context that ends at once."""
        self.cache.retain(array(slots))
        self.model.retain(slots)
        assert self.cache.release_references(array(slots)).tolist() == self.model.release(slots)

    @rule(slots=slot_lists)
    def begin_context(self, slots: list[int]) -> None:
        self.cache.retain(array(slots))
        self.model.retain(slots)
        self.contexts.append(slots)

    @precondition(lambda self: self.contexts)
    @rule(data=st.data())
    def end_context(self, data: st.DataObject) -> None:
        slots = self.contexts.pop(data.draw(st.integers(0, len(self.contexts) - 1)))
        assert self.cache.release_references(array(slots)).tolist() == self.model.release(slots)

    @rule(slots=slot_lists)
    def forget(self, slots: list[int]) -> None:
        self.cache.forget(array(slots))
        self.model.forget(slots)

    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        states = [frame.state for frame in self.model.frames]
        shut = [i for i, state in enumerate(states) if state is FrameState.SHUT]
        others = [i for i, state in enumerate(states) if state is not FrameState.SHUT]
        frames = self.some(data, shut) if shut else []
        if others:
            with pytest.raises(ValueError, match="is not shut"):
                self.cache.open(frame_array([*frames, others[0]]))
        self.cache.open(frame_array(frames))
        self.model.open(frames)

    @rule(data=st.data())
    def shut(self, data: st.DataObject) -> None:
        every = list(range(len(self.model.frames)))
        frames = self.some(data, every)
        slots = [self.model.frames[frame].slot for frame in frames]
        expected = [-1 if slot is None else slot for slot in slots]
        assert self.cache.slots_of(frame_array(frames)).tolist() == expected
        assert self.cache.shut(frame_array(frames)).tolist() == self.model.shut(frames)

    @rule(slots=slot_lists)
    def look(self, slots: list[int]) -> None:
        expected = [self.cache.frame_of(slot) for slot in slots]
        assert self.cache.frames_of(array(slots)).tolist() == expected

    @rule(slots=slot_lists)
    def bad_batches_change_nothing(self, slots: list[int]) -> None:
        """The invariants compare both afterwards."""
        outside = array([*slots, SLOTS])
        for method in (
            self.cache.retain,
            self.cache.release_references,
            self.cache.borrow,
            self.cache.frames_of,
            self.cache.start_writing,
            self.cache.forget,
        ):
            try:
                method(outside)
            except IndexError:
                continue
            raise AssertionError(f"{method} took a slot that does not exist")

    @invariant()
    def both_agree(self) -> None:
        self.cache.audit()
        frames = range(len(self.model.frames))
        assert [self.cache.state(i) for i in frames] == [f.state for f in self.model.frames]
        slots = range(SLOTS)
        assert [self.cache.frame_of(s) for s in slots] == [self.model.frame_of(s) for s in slots]
        referenced = self.cache.referenced(array(slots)).tolist()
        assert referenced == [self.model.references[s] > 0 for s in slots]
        assert self.cache.evictions == self.model.evictions
        assert self.cache.spare() == self.model.spare()
        for states in ([FrameState.FREE], [FrameState.HELD, FrameState.LOST], READABLE):
            expected = sum(frame.state in states for frame in self.model.frames)
            assert self.cache.count(*states) == expected


TestLikeTheModel = LikeTheModel.TestCase
TestLikeTheModel.settings = settings(max_examples=150, stateful_step_count=40)
