"""Queue depths of devices."""

from __future__ import annotations

import numpy as np

from vllm_ssdkv.store.devices.queue_depths import QueueDepths
from vllm_ssdkv.store.io.engines.protocol import I32, PENDING


class Going:
    """A batch whose requests end when the test says so."""

    def __init__(self, count: int):
        self.values = np.full(count, PENDING, dtype=np.int32)

    def done(self) -> bool:
        return not (self.values == PENDING).any()

    def wait(self, timeout_s: float) -> bool:
        return self.done()

    def results(self) -> I32:
        return self.values


def test_what_is_left_is_what_has_not_ended() -> None:
    asked = QueueDepths(3)
    assert asked.pending().tolist() == [0, 0, 0]
    one, two = Going(3), Going(1)
    asked.add(one, np.array([0, 2, 2], dtype=np.uint16), np.array([8, 4, 16], dtype=np.uint32))
    asked.add(two, np.array([2], dtype=np.uint16), np.array([1], dtype=np.uint32))
    assert asked.pending().tolist() == [8, 0, 21]
    one.values[1] = 4
    assert asked.pending().tolist() == [8, 0, 17]
    one.values[0] = -5  # what has failed has ended, too
    two.values[0] = 1
    assert asked.pending().tolist() == [0, 0, 16]
    assert len(asked._batches) == 1
    one.values[2] = 16
    assert asked.pending().tolist() == [0, 0, 0]
    assert asked._batches == []


def test_what_nobody_asks_about_is_forgotten_all_the_same() -> None:
    asked = QueueDepths(1)
    one = np.zeros(1, dtype=np.uint16), np.full(1, 8, dtype=np.uint32)
    going = Going(1)
    asked.add(going, *one)
    for _ in range(10_000):
        ended = Going(1)
        ended.values[0] = 8
        asked.add(ended, *one)
        assert len(asked._batches) <= 64
    assert asked.pending().tolist() == [8]
    many = [Going(1) for _ in range(1000)]
    for batch in many:
        asked.add(batch, *one)
    assert asked.pending().tolist() == [8 * 1001]
