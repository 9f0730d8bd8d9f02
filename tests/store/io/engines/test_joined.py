"""Joined requests: neighbours on a device go to it as one, wherever they are in memory."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from vllm_ssdkv.base.errors import EngineUnavailableError
from vllm_ssdkv.store.io.engines.native import NativeEngine
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.io.engines.threads import ThreadsEngine
from vllm_ssdkv.store.io.engines.uring import UringEngine
from vllm_ssdkv.store.memory.arena import Arena

PAGE = 4096
PAGES = 300
PATIENCE_S = 30.0


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "data"
    path.write_bytes(np.random.default_rng(1).bytes(PAGES * PAGE))
    opened = os.open(path, os.O_RDWR)
    yield opened
    os.close(opened)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(PAGES * PAGE)
    yield made
    made.close()


@pytest.fixture(params=[UringEngine, ThreadsEngine])
def engine(request: pytest.FixtureRequest, fd: int, arena: Arena) -> Iterator[NativeEngine]:
    try:
        made: NativeEngine = request.param([fd], arena, 4)
    except EngineUnavailableError as error:
        pytest.skip(str(error))
    made.joined = True
    yield made
    assert made.close(PATIENCE_S)


def move(engine: NativeEngine, op: Op, pages: list[int], places: list[int]) -> list[int]:
    """Move pages of the device, in order; results."""
    count = len(pages)
    batch = engine.submit(
        op,
        np.zeros(count, dtype=np.uint16),
        np.array(pages, dtype=np.uint64) * PAGE,
        np.full(count, PAGE, dtype=np.uint32),
        np.array(places, dtype=np.uint64) * PAGE,
    )
    assert batch.wait(PATIENCE_S)
    return batch.results().tolist()


def test_each_request_has_its_bytes(engine: NativeEngine, fd: int, arena: Arena) -> None:
    random = np.random.default_rng(2)
    pages = sorted(random.choice(PAGES, 200, replace=False).tolist())
    places = random.permutation(PAGES)[:200].tolist()
    assert move(engine, Op.READ, pages, places) == [PAGE] * 200
    for page, place in zip(pages, places, strict=True):
        assert bytes(arena.view(place * PAGE, PAGE)) == os.pread(fd, PAGE, page * PAGE)
    arena.view(0, PAGES * PAGE)[:] = np.frombuffer(random.bytes(PAGES * PAGE), np.uint8)
    assert move(engine, Op.WRITE, pages, places) == [PAGE] * 200
    for page, place in zip(pages, places, strict=True):
        assert bytes(arena.view(place * PAGE, PAGE)) == os.pread(fd, PAGE, page * PAGE)
    runs = 1 + sum(b != a + 1 for a, b in pairwise(pages))
    for name in ("submitted", "requests"):
        assert engine.statistics()[f"read_{name}.0"] == runs
    assert engine.statistics()["write_bytes.0"] == 200 * PAGE


def test_none_is_larger_than_the_limits(engine: NativeEngine) -> None:
    """32 requests, so that one failure costs little."""
    assert move(engine, Op.READ, list(range(100)), list(range(100, 0, -1))) == [PAGE] * 100
    assert engine.statistics()["read_requests.0"] == 4


def test_the_end_of_the_file_is_that_of_each(engine: NativeEngine, fd: int) -> None:
    os.ftruncate(fd, 3 * PAGE + 512)
    assert move(engine, Op.READ, [1, 2, 3, 4, 5], [9, 7, 5, 3, 1]) == [PAGE, PAGE, 512, 0, 0]


def test_an_error_is_not_that_of_neighbours(engine: NativeEngine) -> None:
    """A place that cannot be written, as behind a limit of files: the others are tried alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12 * PAGE, hard))
    try:
        results = move(engine, Op.WRITE, [9, 10, 11, 12, 13, 20], [5, 3, 1, 7, 9, 0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert results == [PAGE] * 3 + [-errno.EFBIG] * 3
    counts = engine.statistics()
    assert counts["write_errors.0"] == 3
    assert counts["write_requests.0"] == counts["write_submitted.0"] == 6


def test_an_error_of_all_is_that_of_each(fd: int, arena: Arena, tmp_path: Path) -> None:
    read_only = os.open(tmp_path / "data", os.O_RDONLY)
    engine = ThreadsEngine([read_only], arena, 2)
    engine.joined = True
    try:
        assert move(engine, Op.WRITE, [1, 2, 9], [5, 3, 1]) == [-9, -9, -9]  # EBADF
        assert engine.statistics()["write_errors.0"] == 3
    finally:
        assert engine.close(PATIENCE_S)
        os.close(read_only)


def test_others_stay_apart(engine: NativeEngine) -> None:
    engine.joined = False
    assert move(engine, Op.READ, [1, 2, 3], [3, 2, 1]) == [PAGE] * 3
    assert engine.statistics()["read_requests.0"] == 3
