"""Pages that are read ahead: wrong guesses and faults change no answer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.chosen_pages import (
    assert_right,
    bring,
    context,
    read_ahead,
    right,
)
from tests.store.conftest import (
    SUMMED,
    SUMMED_ENCRYPTED,
    MakeStore,
    array,
)
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry


def test_what_is_read_ahead_is_not_read_again(make_store: MakeStore) -> None:
    rig = make_store(SUMMED, devices=1)
    names = context(rig, range(8))
    rig.store.choose([array(range(8))], [0]).close()
    before = rig.total("bytes_read", device=rig.paths[0])
    chosen = rig.store.choose([array(range(8))], [0])
    read_ahead(chosen, 1, 5)
    found = bring(rig, chosen, 1, {0: [(block, 0) for block in range(2, 8)]})
    assert_right(rig, found, [list(range(8))], names, 1)
    assert len(found) == 6
    assert (chosen.fetched.ahead, chosen.fetched.hits, chosen.fetched.ssd) == (5, 3, 6)
    # Two guesses were wrong, and what they cost is their bytes.
    assert rig.total("bytes_read", device=rig.paths[0]) - before == 8 * SUMMED.page_bytes
    chosen.close()
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_settling_waits_for_what_was_guessed_too(make_store: MakeStore) -> None:
    rig = make_store(SUMMED, devices=1)
    names = context(rig, range(8))
    rig.store.choose([array(range(8))], [0]).close()
    chosen = rig.store.choose([array(range(8))], [0])
    rig.faults({"kind": "latency", "op": "read", "seconds": 0.5})
    read_ahead(chosen, 1, 4)
    blocks = array(range(8))
    fetch = chosen.fetch(chosen.pages(1, blocks, array([0] * 8)))
    assert fetch._read is not None
    begun = [mine.read.request for mine in (fetch._read, *rig.store._fetcher._ahead)]
    assert [request.ended() for request in begun] == [
        False,
        False,
    ]
    chosen.wait_for_io(fetch)
    assert [request.ended() for request in begun] == [True, True]
    assert not fetch.address.any()
    rig.faults()
    assert chosen.complete(fetch, blocks).all()
    assert_right(rig, bring(rig, chosen, 1, {0: [(5, 0)]}), [list(range(8))], names, 1)
    chosen.release(fetch)
    chosen.close()
    rig.store.drop_context("r")
    rig.assert_no_leak()


@pytest.mark.parametrize("kind", ["eio", "short", "corrupt"])
def test_a_guess_that_fails_is_read_by_who_needs_it(make_store: MakeStore, kind: str) -> None:
    rig = make_store(SUMMED)
    names = context(rig, range(8))
    rig.store.choose([array(range(8))], [0]).close()
    chosen = rig.store.choose([array(range(8))], [0])
    rig.faults({"kind": kind, "op": "read", "count": 4})
    read_ahead(chosen, 1, 8)
    rig.faults()
    found = bring(rig, chosen, 1, {0: [(block, 0) for block in range(2, 6)]})
    assert_right(rig, found, [list(range(8))], names, 1)
    assert len(found) == 4
    assert (chosen.poisoned, chosen.bad) == (set(), [])
    assert rig.total("checksum_failures") == 0
    chosen.close()
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_guesses_about_slots_that_are_given_away_harm_nobody(make_store: MakeStore) -> None:
    rig = make_store(SUMMED)
    context(rig, range(6))
    chosen = rig.store.choose([array(range(6))], [0])
    read_ahead(chosen, 1, 6)
    chosen.close()
    rig.store.drop_context("r")
    rig.store.abandon(array(range(6)))
    rig.write({2: 999}, epoch=2)
    rig.store.extend_context("s", 0, array([2]))
    assert rig.load({2: 999}, [], epoch=2, request="s").complete
    rig.store.frames.forget(array([2]))
    chosen = rig.store.choose([array([2])], [0])
    found = bring(rig, chosen, 1, {0: [(0, 0)]})
    assert found[(0, 0, 0)] == right(SUMMED, 999, 1, 0)
    assert chosen.bad == []
    assert rig.store._fetcher.bad == []
    chosen.close()
    rig.store.drop_context("s")
    rig.assert_no_leak()


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 999),
    kinds=st.sets(st.sampled_from(["eio", "short", "corrupt"]), min_size=1),
    rows=st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=8), min_size=1, max_size=4),
    geometry=st.sampled_from([SUMMED, SUMMED_ENCRYPTED]),
)
def test_random_faults_never_bring_a_wrong_byte(
    make_store: MakeStore,
    seed: int,
    kinds: set[str],
    rows: list[list[int]],
    geometry: SlotGeometry,
) -> None:
    rig = make_store(geometry, slots=16, frames=8, places=16)
    names = context(rig, range(16))
    rig.faults(
        *({"kind": k, "op": "read", "probability": 0.15, "seed": seed} for k in sorted(kinds))
    )
    for _ in range(2):
        chosen = rig.store.choose([array(row) for row in rows], range(len(rows)))
        for layer in range(geometry.layers):
            wanted = {r: [(b, (b + layer) % 4) for b in range(len(c))] for r, c in enumerate(rows)}
            asked = [row for row in wanted if row not in chosen.poisoned]
            found = bring(rig, chosen, layer, wanted)
            assert_right(rig, found, rows, names, layer)
            for row in asked:
                complete = all((row, b, p) in found for b, p in wanted[row])
                assert complete or row in chosen.poisoned
        chosen.close()
    rig.faults()
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_what_is_asked_for_has_as_much_room_beside_guesses(make_store: MakeStore) -> None:
    rig = make_store(SUMMED, places=16)
    context(rig, range(8))
    rig.store.choose([array(range(8))], [0]).close()
    chosen = rig.store.choose([array(range(8))], [0])
    room = chosen.room
    rig.faults({"kind": "stall", "op": "read", "seconds": 60.0})
    read_ahead(chosen, 1, 8)
    assert rig.store._fetcher.on_the_way() == 8
    assert chosen.room == room == 8
    rig.faults()
    chosen.close()
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_requests_of_a_batch_share_what_can_be_read_ahead(make_store: MakeStore) -> None:
    """One that wants many pages takes nothing from one that wants few."""
    rig = make_store(SUMMED, places=16)
    names = context(rig, range(12))
    rig.store.choose([array(range(12))], [0]).close()
    rows = [list(range(12)), list(range(4))]
    chosen = rig.store.choose([array(row) for row in rows], [0, 1])
    blocks = array([*range(12), *range(12, 16)])
    pages = chosen.pages(1, blocks, array([0] * 12 + [1] * 4))
    chosen.prefetch(pages, np.array([0, 12, 16], dtype=np.int32), idle=False)
    assert chosen.fetched.ahead == 8
    found = bring(rig, chosen, 1, {1: [(block, 1) for block in range(4)]})
    assert chosen.fetched.hits == 4
    found |= bring(rig, chosen, 1, {0: [(block, 0) for block in range(12)]})
    assert chosen.fetched.hits == 8
    assert len(found) == 16
    assert_right(rig, found, rows, names, 1)
    chosen.close()
    rig.store.drop_context("r")
    rig.assert_no_leak()
