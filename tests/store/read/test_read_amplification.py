"""Bytes that requests used are never more than bytes that were read, whatever fails."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.chosen_pages import bring, context, read_ahead
from tests.store.conftest import PAGED, SUMMED, MakeStore, StoreRig, array

FULL = PAGED
"""Its pages have no padding: all that a stream reads is used."""


def read(rig: StoreRig) -> float:
    return sum(rig.total("bytes_read", device=path) for path in rig.paths)


def test_what_a_stream_uses_is_what_it_read(make_store: MakeStore) -> None:
    """Rows that share their contexts, and one that has failed before its layers came."""
    rig = make_store(FULL, slots=16, frames=12, staging=4, devices=2)
    names = context(rig, range(12))
    before = read(rig)
    stream = rig.store.stream([array(list(names)), array(list(names)[:5])])
    for layer in range(FULL.layers):
        for _ in stream.pieces(layer):
            pass
    stream.close()
    used = stream.pages_used * FULL.payload_bytes
    assert used == read(rig) - before == stream.pages_on_ssd * FULL.payload_bytes > 0
    # A step that ends early has read less than it was going to.
    before = read(rig)
    stream = rig.store.stream([array(list(names))])
    next(iter(stream.pieces(0)))
    stream.close()
    assert stream.pages_used * FULL.payload_bytes <= read(rig) - before
    assert stream.pages_used < stream.pages_on_ssd


@pytest.mark.parametrize("rows", [1, 8])
def test_rows_that_share_their_context_read_it_once(make_store: MakeStore, rows: int) -> None:
    """In every layer each block, however many rows attend to it, and each gets all of it."""
    rig = make_store(FULL, slots=48, frames=8, staging=16, devices=2)
    names = context(rig, range(41))
    contexts = [[*range(40), *([40] if row == 3 else [])] for row in range(rows)]
    before = read(rig)
    walk = rig.walk(*contexts)
    rig.assert_rows(walk, *[[names[slot] for slot in slots] for slots in contexts])
    distinct = len({slot for slots in contexts for slot in slots})
    assert read(rig) - before == distinct * FULL.layers * FULL.layer_bytes


@pytest.mark.parametrize("fault", ["eio", "corrupt"])
def test_what_fails_is_not_used(make_store: MakeStore, fault: str) -> None:
    rig = make_store(FULL, slots=16, frames=12, staging=4, devices=2)
    names = context(rig, range(12))
    before = read(rig)
    rig.faults({"kind": fault, "op": "read", "device": 1})
    stream = rig.store.stream([array([slot]) for slot in names])
    for layer in range(FULL.layers):
        for _ in stream.pieces(layer):
            pass
    stream.close()
    assert stream.poisoned
    assert stream.pages_used * FULL.payload_bytes <= read(rig) - before
    assert stream.pages_used < stream.pages_on_ssd


def test_a_page_that_was_read_ahead_is_used_once(make_store: MakeStore) -> None:
    rig = make_store(SUMMED, devices=1)
    context(rig, range(8))
    rig.store.choose([array(range(8))], [0]).close()
    chosen = rig.store.choose([array(range(8))], [0])
    before = read(rig)
    read_ahead(chosen, 1, 5)
    wanted = {0: [(block, 0) for block in range(2, 8)]}
    for _ in range(2):
        assert len(bring(rig, chosen, 1, wanted)) == 6
    assert read(rig) - before == 8 * SUMMED.page_bytes
    assert chosen.pages_used == 6
    chosen.close()


@pytest.mark.parametrize("fault", ["eio", "corrupt"])
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(ahead=st.integers(0, 8), first=st.integers(0, 7), count=st.integers(0, 20))
def test_chosen_pages_that_fail_are_not_used(
    make_store: MakeStore, fault: str, ahead: int, first: int, count: int
) -> None:
    """Guessed or not, read again or not."""
    rig = make_store(SUMMED, devices=2)
    context(rig, range(8))
    rig.store.choose([array(range(8))], [0]).close()
    chosen = rig.store.choose([array(range(8))], [0])
    before = read(rig)
    rig.faults({"kind": fault, "op": "read", "device": 0, "count": count})
    if ahead:
        read_ahead(chosen, 1, ahead)
    for _ in range(2):
        bring(rig, chosen, 1, {0: [(block, page) for block in range(first, 8) for page in (0, 1)]})
    rig.faults()
    # What was read in vain, and not asked for, is counted as read when it has arrived.
    rig.store._fetcher._settle_ahead(wait=True)
    assert chosen.pages_used * SUMMED.page_bytes <= read(rig) - before
    chosen.close()
    rig.store.drop_context("r")


@pytest.mark.parametrize("fault", [None, "eio", "corrupt"])
def test_a_hit_uses_what_was_right(make_store: MakeStore, fault: str | None) -> None:
    rig = make_store(PAGED, slots=16, devices=2)
    names = {slot: 100 + slot for slot in range(12)}
    rig.write(names)
    if fault is not None:
        rig.faults({"kind": fault, "op": "read", "device": 1, "count": 9})
    before = read(rig)
    rig.load(names, range(1, 13))
    used = rig.counters.total("bytes_used")
    assert used <= read(rig) - before
    if fault is None:
        assert used == 12 * PAGED.kv_pages * PAGED.payload_bytes
