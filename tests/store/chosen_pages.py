"""Chosen pages of a store, brought and compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.store.conftest import (
    SUMMED,
    SUMMED_ENCRYPTED,
    StoreRig,
    array,
    content,
)
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.read.selected_context import SelectedContexts

BOTH = pytest.mark.parametrize("geometry", [SUMMED, SUMMED_ENCRYPTED], ids=["plain", "encrypted"])

Wanted = dict[int, list[tuple[int, int]]]
"""Row to (block, page in the layer)."""


def context(rig: StoreRig, slots: Sequence[int], request: str = "r") -> dict[int, int]:
    """Slots on the devices and a running request that refers to them, none of it in DRAM."""
    names = {slot: 700 + slot for slot in slots}
    rig.write(names)
    rig.store.extend_context(request, 0, array(list(names)))
    assert rig.load(names, [], request=request).complete
    rig.store.frames.forget(array(list(names)))
    return names


def bring(
    rig: StoreRig, chosen: SelectedContexts, layer: int, wanted: Wanted
) -> dict[tuple[int, int, int], bytes]:
    """Fetch pages; the payload of each that came, by row, block and page."""
    found: dict[tuple[int, int, int], bytes] = {}
    asked = [
        (row, block, page)
        for row, pages in wanted.items()
        for block, page in pages
        if row not in chosen.poisoned
    ]
    rows = chosen.rows.tolist()
    for start in range(0, len(asked), max(1, chosen.room)):
        part = asked[start : start + chosen.room]
        blocks = array([int(chosen.begin[rows.index(row)]) + block for row, block, _ in part])
        fetch = chosen.fetch(chosen.pages(layer, blocks, array([page for _, _, page in part])))
        good = chosen.complete(fetch, blocks)
        for entry, ok, address in zip(part, good.tolist(), fetch.address.tolist(), strict=True):
            if ok:
                data = rig.store.arena.view(
                    address - rig.store.arena.address, rig.geometry.payload_bytes
                )
                found[entry] = data.tobytes()
        chosen.release(fetch)
    return found


def right(geometry: SlotGeometry, name: int, layer: int, page: int) -> bytes:
    return content(geometry, name)[geometry.first_page(layer) + page].tobytes()


def assert_right(
    rig: StoreRig,
    found: dict[tuple[int, int, int], bytes],
    contexts: Sequence[Sequence[int]],
    names: dict[int, int],
    layer: int,
) -> None:
    for (row, block, page), data in found.items():
        name = names[contexts[row][block]]
        assert data == right(rig.geometry, name, layer, page), (row, block, page)


def read_requests(rig: StoreRig) -> int:
    totals = rig.files.engine.statistics()
    return sum(value for name, value in totals.items() if name.startswith("read_requests"))


def read_ahead(chosen: SelectedContexts, layer: int, blocks: int) -> None:
    """Page 0 of the first blocks, as a list of its own."""
    pages = chosen.pages(layer, array(range(blocks)), array([0] * blocks))
    chosen.prefetch(pages, np.array([0, blocks], dtype=np.int32), idle=False)


def cross(here: StoreRig, slot: int, pages: tuple[int, int]) -> None:
    """Spoil one page on one device and another one on another: each has a good copy."""
    first, second = (here.geometry.page_offset(page) + 9 for page in pages)
    here.flip(slot, first, copy=0)
    spoiled = here.place(slot, first)[0]
    (copy,) = (c for c in (0, 1) if here.place(slot, second, c)[0] != spoiled)
    here.flip(slot, second, copy=copy)
