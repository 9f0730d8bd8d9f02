"""Credits of a channel."""

from __future__ import annotations

import threading
import time

import pytest

from vllm_ssdkv.base.errors import NodeGoneError
from vllm_ssdkv.node.protocol.credits import Credits


def test_bytes_wait_until_there_is_credit_for_all_of_them() -> None:
    credits = Credits()
    credits.add(10)
    taken = threading.Event()

    def take() -> None:
        credits.take(15, deadline=time.monotonic() + 10)
        taken.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert not taken.wait(0.05)
    credits.add(5)
    thread.join(10)
    assert taken.is_set()
    assert credits.left == 0


def test_a_deadline_ends_the_wait_and_costs_nothing() -> None:
    credits = Credits()
    credits.add(10)
    with pytest.raises(NodeGoneError, match="10 of 11 bytes"):
        credits.take(11, deadline=time.monotonic() + 0.01)
    assert credits.left == 10


def test_an_end_wakes_who_waits() -> None:
    credits = Credits()
    threading.Timer(0.05, credits.close).start()
    begin = time.monotonic()
    with pytest.raises(NodeGoneError, match="ended"):
        credits.take(1, deadline=begin + 10)
    assert time.monotonic() < begin + 5


def test_credit_has_an_end() -> None:
    credits = Credits()
    for _ in range(3):
        credits.add(2**64 - 1)
    assert credits.left == 1 << 40
