"""The table of seals against a dict."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.conftest import array
from vllm_ssdkv.store.integrity.checksum_table import ChecksumTable
from vllm_ssdkv.store.integrity.slot_codec import Digests

PAGES = 5
SLOTS = 200
WORDS = [(0, 1), (13, 2)]
"""Words of an opening and of a mark, without and with encryption."""


def joined(parts: Sequence[Digests]) -> Digests:
    return Digests(
        np.concatenate([part.opening for part in parts]),
        np.concatenate([part.marks for part in parts]),
    )


def seal(seed: int, words: tuple[int, int] = WORDS[1]) -> Digests:
    random = np.random.default_rng(seed)
    opening, mark = words
    return Digests(
        random.integers(0, 2**64, (1, opening), dtype=np.uint64),
        random.integers(0, 2**64, (1, PAGES, mark), dtype=np.uint64),
    )


def assert_seal(found: Digests, i: int, expected: Digests, first: int = 0) -> None:
    np.testing.assert_array_equal(found.opening[i], expected.opening[0])
    np.testing.assert_array_equal(found.marks[i], expected.marks[0, first:])


slot_lists = st.lists(st.integers(0, SLOTS - 1), max_size=40, unique=True)
STEPS = ("put", "release", "forget", "begin_write", "adopt", "end_write")


@given(
    words=st.sampled_from(WORDS),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), slot_lists), max_size=16),
    wanted=slot_lists,
    first=st.integers(0, PAGES - 1),
)
def test_it_says_what_was_put_last(
    words: tuple[int, int], steps: list[tuple[str, list[int]]], wanted: list[int], first: int
) -> None:
    table = ChecksumTable(SLOTS, PAGES, *words)
    model: dict[int, Digests] = {}
    held: dict[int, Digests] = {}
    for number, (step, slots) in enumerate(steps):
        fresh = {slot: seal(1000 * number + slot, words) for slot in slots}
        match step:
            case "put" | "begin_write" if slots:
                getattr(table, step)(array(slots), joined(list(fresh.values())))
                (model if step == "put" else held).update(fresh)
            case "release":
                table.release(array(slots))
                for slot in slots:
                    model.pop(slot, None)
            case "forget":
                table.forget(array(slots))
                for slot in slots:
                    model.pop(slot, None)
                    held.pop(slot, None)
            case "adopt":
                for slot in set(slots) & set(held) - set(model):
                    model[slot] = held[slot]
                assert table.adopt(array(slots)).tolist() == [slot in model for slot in slots]
            case "end_write":
                table.end_write(array(slots))
                for slot in slots:
                    held.pop(slot, None)
    found, known = table.get(array(wanted), first, PAGES - first)
    assert found.marks.shape == (len(wanted), PAGES - first, words[1])
    assert known.tolist() == [slot in model for slot in wanted]
    for i, slot in enumerate(wanted):
        if slot in model:
            assert_seal(found, i, model[slot], first)


def test_seals_of_a_write_go_with_the_content() -> None:
    """A slot that is forgotten while it is written is not adopted with its old seals."""
    table = ChecksumTable(SLOTS, PAGES, *WORDS[1])
    table.begin_write(array([1, 2]), joined([seal(1), seal(2)]))
    table.forget(array([1]))
    assert table.adopt(array([1, 2])).tolist() == [False, True]
    found, known = table.get(array([1, 2]), 0, PAGES)
    assert known.tolist() == [False, True]
    assert_seal(found, 1, seal(2))


def test_a_slot_that_is_named_twice_gives_its_row_back_once() -> None:
    table = ChecksumTable(SLOTS, PAGES, *WORDS[1])
    table.put(array([1]), seal(1))
    table.release(array([1, 1]))
    table.put(array([2]), seal(2))
    table.put(array([3]), seal(3))
    found, _ = table.get(array([2, 3]), 0, PAGES)
    assert_seal(found, 0, seal(2))
    assert_seal(found, 1, seal(3))


@pytest.mark.parametrize("words", WORDS)
def test_rows_are_used_again(words: tuple[int, int]) -> None:
    table = ChecksumTable(SLOTS, PAGES, *words)
    for slot in range(64):
        table.put(array([slot]), seal(slot, words))
    before = table.nbytes
    for slot in range(SLOTS):
        table.forget(array([(slot - 64) % SLOTS, slot]))
        table.put(array([slot]), seal(slot, words))
    assert table.nbytes == before


def test_what_was_given_out_does_not_change() -> None:
    table = ChecksumTable(SLOTS, PAGES, *WORDS[1])
    table.put(array([1]), seal(1))
    found, _ = table.get(array([1]), 0, PAGES)
    table.put(array([1]), seal(2))
    assert_seal(found, 0, seal(1))
