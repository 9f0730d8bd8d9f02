"""Work beside the forward pass: done once the read has ended, or taken back, never both."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.kit.waiting import until
from tests.store.conftest import PATIENCE_S
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.store.io.async_verifier import AsyncVerifier
from vllm_ssdkv.store.io.engines.protocol import I32


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
def verifier() -> Iterator[AsyncVerifier]:
    made = AsyncVerifier()
    yield made
    assert made.close(PATIENCE_S)


def test_work_is_done_when_the_read_has_ended(verifier: AsyncVerifier) -> None:
    reading, done = Reading(), threading.Event()
    asked = verifier.after(reading, lambda: done.set() or "found")
    assert not done.is_set()
    reading.end()
    assert done.wait(PATIENCE_S)
    assert asked.take(PATIENCE_S) == "found"
    assert asked.take(PATIENCE_S) == "found"


def test_work_is_done_in_order(verifier: AsyncVerifier) -> None:
    order: list[int] = []
    last = [verifier.after(Reading(ended=True), lambda n=n: order.append(n)) for n in range(50)][-1]
    until(lambda: not last.wanted())
    last.take(PATIENCE_S)
    assert order == list(range(50))


def test_work_that_was_taken_back_is_never_begun(verifier: AsyncVerifier) -> None:
    first, second = Reading(), Reading(ended=True)
    begun: list[str] = []
    mine = verifier.after(first, lambda: begun.append("first"))
    assert mine.take(0.0) is None
    first.end()
    # Nor does a read that hangs hold up the next one.
    hanging = verifier.after(Reading(), lambda: begun.append("hanging"))
    assert hanging.take(0.0) is None
    other = verifier.after(second, lambda: begun.append("second"))
    until(lambda: not other.wanted())
    other.take(PATIENCE_S)
    assert begun == ["second"]


def test_work_under_way_is_waited_for(verifier: AsyncVerifier) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return "found"

    asked = verifier.after(Reading(ended=True), work)
    assert begun.wait(PATIENCE_S)
    with pytest.raises(StoreError, match="not checked within 0 s"):
        asked.take(0.0)
    with pytest.raises(StoreError, match="not checked within 0 s"):
        asked.stop(0.0)
    threading.Timer(0.05, go_on.set).start()
    assert asked.take(PATIENCE_S) == "found"


def test_an_error_is_raised_where_the_result_is_taken(verifier: AsyncVerifier) -> None:
    def fail() -> None:
        raise RuntimeError("libcrypto refuses")

    asked = verifier.after(Reading(ended=True), fail)
    until(lambda: not asked.wanted())
    asked.stop(PATIENCE_S)
    with pytest.raises(RuntimeError, match="libcrypto refuses"):
        asked.take(PATIENCE_S)
    # The thread goes on.
    other = verifier.after(Reading(ended=True), lambda: "found")
    until(lambda: not other.wanted())
    assert other.take(PATIENCE_S) == "found"


def test_closing_waits_for_no_read() -> None:
    verifier = AsyncVerifier()
    asked = verifier.after(Reading(), lambda: "found")
    assert verifier.close(PATIENCE_S)
    assert verifier.close(PATIENCE_S)
    late = verifier.after(Reading(ended=True), lambda: "found")
    assert (asked.take(PATIENCE_S), late.take(PATIENCE_S)) == (None, None)


def test_a_read_that_cannot_be_waited_for_ends_no_thread(verifier: AsyncVerifier) -> None:
    class Broken(Reading):
        def wait(self, timeout_s: float) -> bool:
            raise RuntimeError("nobody thought of this")

    asked = verifier.after(Broken(), lambda: "never")
    until(lambda: not asked.wanted())
    with pytest.raises(RuntimeError, match="nobody thought of this"):
        asked.take(PATIENCE_S)
    next_one = verifier.after(Reading(ended=True), lambda: "found")
    until(lambda: not next_one.wanted())
    assert next_one.take(PATIENCE_S) == "found"
