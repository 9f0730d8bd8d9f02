"""Alignment, bounds and lifetime of the arena."""

from __future__ import annotations

import errno
import gc
import logging
import mmap
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.store.memory.arena import HUGE_PAGE, Arena, SharedArena

PAGE = 4096
MIB = 1 << 20


def mapped(address: int, process: int | str = "self") -> dict[str, str] | None:
    """Fields of the mapping that holds ``address`` in /proc/<process>/smaps, or None."""
    fields: dict[str, str] | None = None
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        balancer = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if balancer:
            if fields is not None:
                return fields
            if int(balancer[1], 16) <= address < int(balancer[2], 16):
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


def test_populated_memory_is_there_before_it_is_touched() -> None:
    arena = Arena(64 * MIB + PAGE)
    arena.view(PAGE, PAGE)[:] = 9
    arena.populate()
    arena.populate()
    end = time.monotonic() + 60
    while (fields := mapped(arena.address)) is not None:
        if int(fields["Rss"].split()[0]) >= 64 * 1024 + 4:
            break
        assert time.monotonic() < end, fields["Rss"]
        time.sleep(0.01)
    assert (arena.view(PAGE, PAGE) == 9).all(), "what was there is kept"
    assert not arena.view(2 * PAGE, 64 * MIB - PAGE).any()
    arena.close()


def test_an_old_kernel_gives_memory_when_it_is_touched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_io, "populate", lambda *_: errno.EINVAL)
    arena = Arena(2 * MIB)
    with caplog.at_level(logging.INFO, "vllm_ssdkv"):
        arena.populate()
        arena.close()
    assert "not made ready at start (Invalid argument)" in caplog.text


def test_close_waits_only_for_the_piece_that_is_populated(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    begun = threading.Event()

    def populate(address: int, nbytes: int) -> int:
        asked.append(nbytes)
        begun.set()
        while is_open(arena):
            time.sleep(0.001)
        return 0

    def is_open(arena: Arena) -> bool:
        try:
            return arena.view(0, 1).size > 0
        except ValueError:
            return False

    monkeypatch.setattr(_io, "populate", populate)
    arena = Arena(256 * MIB)
    arena.populate()
    assert begun.wait(60)
    arena.close()
    assert asked == [32 * MIB]


def test_a_process_may_end_while_memory_is_populated() -> None:
    """Small pieces: the thread comes back from native code again and again."""
    script = """
from vllm_ssdkv.store.memory import arena
arena._POPULATED_AT_ONCE = 1 << 16
made = arena.Arena(1 << 29)
made.populate()
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_populating_what_is_not_mapped_is_an_error() -> None:
    assert _io.populate(PAGE, PAGE) == errno.ENOMEM


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


def test_others_read_a_shared_arena_and_cannot_write_to_it() -> None:
    arena = SharedArena(MIB)
    arena.view(PAGE, 4)[:] = 7
    other = mmap.mmap(arena.fd, MIB, prot=mmap.PROT_READ)
    assert other[PAGE : PAGE + 4] == b"\7\7\7\7"
    again = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDWR)
    for write in (
        lambda: mmap.mmap(arena.fd, MIB),
        lambda: os.pwrite(again, b"x", 0),
        lambda: os.ftruncate(again, PAGE),
    ):
        with pytest.raises(PermissionError):
            write()
    os.close(again)
    arena.view(0, 2)[:] = 5
    arena.close()
    arena.close()
    assert other[:2] == b"\5\5", "who has mapped it keeps it"


@pytest.mark.parametrize("nbytes", [0, 4095, -4096])
def test_a_shared_arena_has_whole_pages(nbytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 4096"):
        SharedArena(nbytes)
