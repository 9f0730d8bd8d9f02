"""Work beside the forward pass: done once the read has ended, or taken back, never both."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.store.conftest import PATIENCE_S, until
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.store.io.engines.protocol import I32
from vllm_ssdkv.store.read.async_verifier import Unsealer


class Reading:
    """A batch that ends when the test says so."""

    def __init__(self, *, ended: bool = False) -> None:
        self._ended = threading.Event()
        if ended:
            self.end()

    def end(self) -> None:
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)

    def results(self) -> I32:
        return np.zeros(0, dtype=np.int32)


@pytest.fixture
def unsealer() -> Iterator[Unsealer]:
    made = Unsealer()
    yield made
    assert made.close(PATIENCE_S)


def test_work_is_done_when_the_read_has_ended(unsealer: Unsealer) -> None:
    reading, done = Reading(), threading.Event()
    asked = unsealer.after(reading, lambda: done.set() or "found")
    assert not done.is_set()
    reading.end()
    assert done.wait(PATIENCE_S)
    assert asked.take(PATIENCE_S) == "found"
    assert asked.take(PATIENCE_S) == "found"


def test_work_is_done_in_order(unsealer: Unsealer) -> None:
    order: list[int] = []
    last = [unsealer.after(Reading(ended=True), lambda n=n: order.append(n)) for n in range(50)][-1]
    until(lambda: not last.wanted())
    last.take(PATIENCE_S)
    assert order == list(range(50))


def test_work_that_was_taken_back_is_never_begun(unsealer: Unsealer) -> None:
    first, second = Reading(), Reading(ended=True)
    begun: list[str] = []
    mine = unsealer.after(first, lambda: begun.append("first"))
    assert mine.take(0.0) is None
    first.end()
    # Nor does a read that hangs hold up the next one.
    hanging = unsealer.after(Reading(), lambda: begun.append("hanging"))
    assert hanging.take(0.0) is None
    other = unsealer.after(second, lambda: begun.append("second"))
    until(lambda: not other.wanted())
    other.take(PATIENCE_S)
    assert begun == ["second"]


def test_work_under_way_is_waited_for(unsealer: Unsealer) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return "found"

    asked = unsealer.after(Reading(ended=True), work)
    assert begun.wait(PATIENCE_S)
    with pytest.raises(StoreError, match="not checked within 0 s"):
        asked.take(0.0)
    with pytest.raises(StoreError, match="not checked within 0 s"):
        asked.stop(0.0)
    threading.Timer(0.05, go_on.set).start()
    assert asked.take(PATIENCE_S) == "found"


def test_an_error_is_raised_where_the_result_is_taken(unsealer: Unsealer) -> None:
    def fail() -> None:
        raise RuntimeError("libcrypto refuses")

    asked = unsealer.after(Reading(ended=True), fail)
    until(lambda: not asked.wanted())
    asked.stop(PATIENCE_S)
    with pytest.raises(RuntimeError, match="libcrypto refuses"):
        asked.take(PATIENCE_S)
    # The thread goes on.
    other = unsealer.after(Reading(ended=True), lambda: "found")
    until(lambda: not other.wanted())
    assert other.take(PATIENCE_S) == "found"


def test_closing_waits_for_no_read() -> None:
    unsealer = Unsealer()
    asked = unsealer.after(Reading(), lambda: "found")
    assert unsealer.close(PATIENCE_S)
    assert unsealer.close(PATIENCE_S)
    late = unsealer.after(Reading(ended=True), lambda: "found")
    assert (asked.take(PATIENCE_S), late.take(PATIENCE_S)) == (None, None)
