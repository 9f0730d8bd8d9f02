"""Blocks that move: each is found in one slot at any time, after a crash at any instant, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.store.index.test_slot_index import found, key, kill, open_index, slots_of, store
from vllm_ssdkv._index import Replay
from vllm_ssdkv.store.format.journal_record import HEADER_BYTES, RECORD_BYTES
from vllm_ssdkv.store.index.slot_index import SlotIndex, SlotState


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def moving(index: SlotIndex, *numbers: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pinned old slots of these keys, and slots that are written for them."""
    old = slots_of(*(found(index, n)[0] for n in numbers))
    index.pin(old)
    return old, index.allocate(len(numbers))


def test_a_block_that_moved_is_found_in_its_new_slot() -> None:
    index = SlotIndex(8, None)
    store(index, 1, 2)
    old, new = moving(index, 1, 2)
    assert found(index, 1, 2) == old.tolist()  # until it is written
    assert index.key(int(old[0])) == key(1)
    with pytest.raises(ValueError, match="WRITING"):
        index.key(int(new[0]))
    assert index.replace(old, new).tolist() == [True, True]
    assert found(index, 1, 2) == new.tolist()
    index.unpin(new)
    index.unpin(old)
    assert [index.state(s) for s in old.tolist()] == [SlotState.FREE] * 2
    assert index.order().tolist() == new.tolist()[::-1]
    assert index.gauges()["ready"] == 2


def test_who_reads_the_old_slot_keeps_it() -> None:
    index = SlotIndex(4, None)
    store(index, 1)
    old, new = moving(index, 1)
    index.pin(old)  # a running request
    index.replace(old, new)
    index.unpin(old)
    index.unpin(new)
    assert index.state(int(old[0])) is SlotState.PRIVATE
    assert not set(index.allocate(2).tolist()) & {int(old[0]), int(new[0])}
    index.unpin(old)
    assert index.state(int(old[0])) is SlotState.FREE


@pytest.mark.parametrize("which", ["old", "new"])
def test_what_is_dropped_while_it_moves_does_not_come_back(path: Path, which: str) -> None:
    index = open_index(path)
    store(index, 1)
    old, new = moving(index, 1)
    index.drop(old if which == "old" else new)
    assert index.replace(old, new).tolist() == [False]
    index.unpin(new)
    index.unpin(old)
    kept = old.tolist() if which == "new" else []
    assert found(index, 1) == kept
    kill(index)
    assert found(open_index(path), 1) == kept


def test_a_block_that_no_restart_would_find_stays_so(path: Path) -> None:
    index = open_index(path)
    slots = index.allocate(1)
    index.publish(int(slots[0]), key(1))
    index.unpin(slots)
    old, new = moving(index, 1)
    index.replace(old, new)
    kill(index)
    assert found(open_index(path), 1) == []


@pytest.mark.parametrize("records", [2, 3, 4])
def test_a_crash_in_the_middle_of_a_move_leaves_one_of_both(path: Path, records: int) -> None:
    """Records: two of what was stored, that of the new slot, that the old one is gone."""
    index = open_index(path)
    store(index, 1, 2)
    old, new = moving(index, 1)
    epochs = index.epochs(np.concatenate([old, new]))
    index.replace(old, new)
    index.unpin(new)
    index.unpin(old)
    kill(index)
    whole = path.read_bytes()
    assert len(whole) == HEADER_BYTES + 4 * RECORD_BYTES
    for torn in (0, 1, RECORD_BYTES - 1):
        path.write_bytes(whole[: HEADER_BYTES + records * RECORD_BYTES + torn])
        after = open_index(path)
        (slot,) = found(after, 1)
        assert slot == (old if records == 2 else new)[0]
        assert after.epoch(slot) == epochs[int(records > 2)]
        assert after.gauges()["ready"] == 2
        kill(after)


def test_what_a_crash_left_of_a_move_does_not_come_back(path: Path) -> None:
    """Its slot may be half overwritten by the time that the newer one is gone."""
    index = open_index(path)
    store(index, 1, 2)
    old, new = moving(index, 1)
    index.replace(old, new)
    kill(index)
    path.write_bytes(path.read_bytes()[: HEADER_BYTES + 3 * RECORD_BYTES])
    index = open_index(path)
    assert found(index, 1) == new.tolist()
    index.drop(new)
    kill(index)
    assert found(open_index(path), 1) == []


def test_no_rewrite_of_the_journal_loses_a_block_that_moves(path: Path) -> None:
    """Whatever it has walked over when the block moves, and wherever a crash ends it."""
    for walked in range(5):
        path.unlink(missing_ok=True)
        index = open_index(path)
        store(index, 1, 2)
        journal = index._journal
        assert journal is not None
        old, new = moving(index, 1)
        append, seen = journal.append, []

        def crash_here(*arguments: object, append=append, seen=seen, index=index) -> bool:  # type: ignore[no-untyped-def]
            # The rest of the walk, as if the new file took its name now.
            rest, more = b"", True
            while more:
                some, more = index._table.walk(1000 + len(rest))
                rest += some
            seen.append(rest)
            return bool(append(*arguments))

        journal.append = crash_here  # type: ignore[method-assign]
        index.live_records.begin_walk()
        before = b"".join(index._table.walk(900 + i, 1)[0] for i in range(walked))
        index.replace(old, new)
        replay = Replay(8)
        replay.feed(before + seen[0])
        assert key(1) in replay.keys
        kill(index)
