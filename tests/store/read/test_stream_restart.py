"""A walk over a layer that was given up begins anew, for somebody else."""

from __future__ import annotations

import pytest

from tests.store.conftest import PAGED, PAGED_ENCRYPTED, MakeStore
from tests.store.read.test_context_stream import away, context, stored
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED], ids=["plain", "encrypted"])
@pytest.mark.parametrize("seen", [0, 1, 2, 5])
def test_all_pieces_come_again(make_store: MakeStore, geometry: SlotGeometry, seen: int) -> None:
    """After so many pieces of each layer, of blocks in DRAM and of others that two rows share."""
    rig = make_store(geometry, frames=20, staging=8)
    names = stored(rig, range(20))
    context(rig, names)
    away(rig, list(range(3, 20)))
    rows = [list(range(20)), list(range(5, 15))]
    walk = rig.walk(*rows, given_up=seen)
    rig.assert_rows(walk, *[[names[slot] for slot in row] for row in rows])
    assert walk.bad == []
    assert walk.pieces == rig.walk(*rows).pieces  # each of them once
    rig.store.drop_context("r")
    rig.assert_no_leak()
