"""Alignment, bounds and lifetime of the arena."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest

from vllm_ssdkv.errors import StoreError
from vllm_ssdkv.store.arena import HUGE_PAGE, Arena

PAGE = 4096
MIB = 1 << 20


def mapped(address: int, process: int | str = "self") -> dict[str, str] | None:
    """Fields of the mapping that holds ``address`` in /proc/<process>/smaps, or None."""
    fields: dict[str, str] | None = None
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        border = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if border:
            if fields is not None:
                return fields
            if int(border[1], 16) <= address < int(border[2], 16):
                fields = {}
        elif fields is not None:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    return fields


@pytest.mark.parametrize("nbytes", [PAGE, HUGE_PAGE, 5 * MIB + PAGE])
def test_begins_on_a_huge_page_and_holds_what_was_asked(nbytes: int) -> None:
    arena = Arena(nbytes)
    assert arena.address % HUGE_PAGE == 0
    assert arena.nbytes == nbytes
    view = arena.view(0, nbytes)
    assert (view.ctypes.data, view.size, view.dtype) == (arena.address, nbytes, np.uint8)
    assert not view.any()
    view[:] = 7  # every byte can be written
    assert (arena.view(nbytes - PAGE, PAGE) == 7).all()


def test_memory_comes_with_the_first_touch() -> None:
    arena = Arena(64 * MIB)
    arena.view(0, PAGE)[:] = 1
    fields = mapped(arena.address)
    assert fields is not None
    assert int(fields["Rss"].split()[0]) <= 4 * 1024


def test_flags_of_the_mapping() -> None:
    arena = Arena(2 * MIB)
    fields = mapped(arena.address)
    assert fields is not None
    flags = fields["VmFlags"].split()
    assert "dc" in flags  # not inherited by fork
    assert "dd" in flags  # not in core dumps
    assert ("hg" in flags) == arena.huge_pages


def test_a_child_does_not_share_it() -> None:
    arena = Arena(PAGE)
    arena.view(0, PAGE)[:] = 1
    end, stay = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(stay)
        os.read(end, 1)  # until the parent has looked
        os._exit(0)
    try:
        assert mapped(arena.address, child) is None
    finally:
        os.close(end)
        os.close(stay)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 1), (0, -1), (0, 2 * PAGE + 1), (2 * PAGE, 1), (2**63, 1)]
)
def test_views_stay_inside(offset: int, length: int) -> None:
    arena = Arena(2 * PAGE)
    with pytest.raises(ValueError, match="outside the arena"):
        arena.view(offset, length)
    assert arena.view(2 * PAGE, 0).size == 0


@pytest.mark.parametrize("nbytes", [0, -PAGE, PAGE + 1])
def test_impossible_sizes_are_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 4096"):
        Arena(nbytes)


def test_too_much_memory_is_a_clear_error() -> None:
    for nbytes in (1 << 56, 1 << 70):
        with pytest.raises(StoreError, match="lower the DRAM size"):
            Arena(nbytes)


def test_close_gives_the_memory_back_and_is_idempotent() -> None:
    arena = Arena(2 * MIB)
    address = arena.address
    assert mapped(address) is not None
    arena.close()
    assert mapped(address) is None
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        arena.view(0, 1)


def test_a_view_keeps_the_memory_after_close() -> None:
    arena = Arena(2 * MIB)
    view, address = arena.view(PAGE, PAGE), arena.address
    arena.close()
    view[:] = 3
    assert (view == 3).all()
    del view
    gc.collect()
    assert mapped(address) is None
