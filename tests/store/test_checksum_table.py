"""The table of expected checksums against a dict."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.store.conftest import array
from vllm_ssdkv.store.checksum_table import ChecksumTable

PAGES = 5
SLOTS = 200


def sums(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, PAGES, dtype=np.uint64)


slot_lists = st.lists(st.integers(0, SLOTS - 1), max_size=90)


@given(
    steps=st.lists(st.tuples(st.booleans(), slot_lists), max_size=12),
    wanted=slot_lists,
    first=st.integers(0, PAGES - 1),
)
def test_it_says_what_was_put_last(
    steps: list[tuple[bool, list[int]]], wanted: list[int], first: int
) -> None:
    table = ChecksumTable(SLOTS, PAGES)
    model: dict[int, np.ndarray] = {}
    for number, (put, slots) in enumerate(steps):
        if put:
            for slot in slots:
                model[slot] = sums(1000 * number + slot)
                table.put(slot, model[slot])
        else:
            table.forget(array(slots))
            for slot in slots:
                model.pop(slot, None)
    found, known = table.get(array(wanted), first, PAGES - first)
    assert found.shape == (len(wanted), PAGES - first)
    assert known.tolist() == [slot in model for slot in wanted]
    assert table.known(array(wanted)).tolist() == known.tolist()
    for row, slot in zip(found, wanted, strict=True):
        if slot in model:
            np.testing.assert_array_equal(row, model[slot][first:])


def test_rows_are_used_again() -> None:
    table = ChecksumTable(SLOTS, PAGES)
    for slot in range(64):
        table.put(slot, sums(slot))
    before = table.nbytes
    for slot in range(SLOTS):
        table.forget(array([(slot - 64) % SLOTS, slot]))
        table.put(slot, sums(slot))
    assert table.nbytes == before


def test_what_was_given_out_does_not_change() -> None:
    table = ChecksumTable(SLOTS, PAGES)
    table.put(1, sums(1))
    found, _ = table.get(array([1]), 0, PAGES)
    table.put(1, sums(2))
    np.testing.assert_array_equal(found[0], sums(1))
