"""Joined requests: the engine sees few, who waits sees all, each with its own result."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv import _io
from vllm_ssdkv.store.io.coalescing import MOST_REQUESTS, submit_coalesced
from vllm_ssdkv.store.io.engines.protocol import I32, PENDING, U16, U32, U64, Op

PAGE = 4096


class Done:
    """A batch with these results."""

    def __init__(self, results: list[int]):
        self._results = np.array(results, dtype=np.int32)

    def done(self) -> bool:
        return not (self._results == PENDING).any()

    def wait(self, timeout_s: float) -> bool:
        return self.done()

    def results(self) -> I32:
        return self._results.copy()


class Recorder:
    """An engine that keeps what it is given and says that all of it ended so."""

    name = "recorder"

    def __init__(self, outcome: int | None = None, cut: int = 0):
        self._outcome = outcome
        self._cut = cut
        self.requests: list[tuple[int, int, int, int]] = []

    def submit(self, op: Op, device: U16, offset: U64, length: U32, buffer: U64) -> Done:
        columns = (device.tolist(), offset.tolist(), length.tolist(), buffer.tolist())
        self.requests = list(zip(*columns, strict=True))
        if self._outcome is not None:
            return Done([self._outcome] * len(self.requests))
        return Done([max(0, size - self._cut) for _, _, size, _ in self.requests])

    def statistics(self) -> dict[str, int]:
        return {}

    def close(self, timeout_s: float) -> bool:
        return True


def send(engine: Recorder, requests: list[tuple[int, int, int]]) -> I32:
    """Requests of a page each: device, page of the device, page of the arena."""
    table = np.array(requests, dtype=np.int64).reshape(-1, 3)
    batch = submit_coalesced(
        engine,
        Op.READ,
        table[:, 0].astype(np.uint16),
        (table[:, 1] * PAGE).astype(np.uint64),
        np.full(len(table), PAGE, dtype=np.uint32),
        (table[:, 2] * PAGE).astype(np.uint64),
    )
    assert batch.done() == batch.wait(0)
    return batch.results()


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(0, 3)), max_size=40))
def test_every_byte_goes_where_it_would_go_alone(steps: list[tuple[int, int, int]]) -> None:
    """Requests that often follow each other."""
    requests: list[tuple[int, int, int]] = []
    for device, page, jump in steps:
        last = requests[-1] if requests else (0, 0, 0)
        follows = (last[0], last[1] + 1, last[2] + 1)
        requests.append(follows if jump else (device, page, 100 + page))
    engine = Recorder()
    assert send(engine, requests).tolist() == [PAGE] * len(requests)
    moved = [
        (device, offset // PAGE + i, buffer // PAGE + i)
        for device, offset, length, buffer in engine.requests
        for i in range(length // PAGE)
    ]
    assert moved == requests
    breaks = sum(
        (b[0], b[1], b[2]) != (a[0], a[1] + 1, a[2] + 1) for a, b in itertools.pairwise(requests)
    )
    assert len(engine.requests) == (breaks + 1 if requests else 0)


def test_requests_stay_of_bounded_size() -> None:
    engine = Recorder()
    count = 3 * MOST_REQUESTS + 1
    send(engine, [(0, i, i) for i in range(count)])
    sizes = [length // PAGE for _, _, length, _ in engine.requests]
    assert sizes == [MOST_REQUESTS] * 3 + [1]


def test_an_error_is_that_of_every_part() -> None:
    run = [(0, 5, 1), (0, 6, 2), (0, 7, 3)]
    assert send(Recorder(-5), run).tolist() == [-5] * 3
    assert send(Recorder(PENDING), run).tolist() == [PENDING] * 3


def test_what_is_missing_at_the_end_is_missing_at_the_end() -> None:
    run = [(0, 5, 1), (0, 6, 2), (0, 7, 3), (1, 0, 4)]
    assert send(Recorder(cut=PAGE + 10), run).tolist() == [PAGE, PAGE - 10, 0, 0]


def test_what_does_not_fit_is_refused() -> None:
    """By the native calls, before any memory is touched."""
    two, one = np.zeros(2, np.uint64), np.zeros(1, np.uint64)
    device, length = np.zeros(2, np.uint16), np.full(2, PAGE, np.uint32)
    with pytest.raises(ValueError, match="differ in length"):
        _io.coalesce_requests(device, two, length, one, MOST_REQUESTS)
    with pytest.raises(ValueError, match="at least"):
        _io.coalesce_requests(device, two, length, two, 0)
    results, begin = np.zeros(1, np.int32), np.zeros(2, np.int64)
    for run in (1, -1):
        with pytest.raises(ValueError, match="no request"):
            _io.part_results(results, np.array([0, run]), begin, length)
    with pytest.raises(ValueError, match="differ in length"):
        _io.part_results(results, begin, begin[:1], length)
