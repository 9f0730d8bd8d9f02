"""The frequency sketch: never too little, seldom too much, and it forgets."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.store.index.frequency_sketch import COUNTERS_PER_KEY, FrequencySketch


def key(name: int) -> bytes:
    return hashlib.blake2b(name.to_bytes(8, "little"), digest_size=32).digest()


def keys(first: int, count: int) -> list[bytes]:
    return [key(name) for name in range(first, first + count)]


@given(st.lists(st.sets(st.integers(0, 30)), max_size=40))
def test_no_count_is_too_low(batches: list[set[int]]) -> None:
    sketch = FrequencySketch(1000)
    for batch in batches:
        sketch.add([key(name) for name in batch])
    for name in range(31):
        assert sketch.count([key(name)])[0] >= sum(name in batch for batch in batches)


def test_counts_are_seldom_too_high() -> None:
    sketch = FrequencySketch(4096)
    sketch.add(keys(0, 4096))
    assert (sketch.count(keys(0, 4096)) == 1).mean() > 0.99
    assert (sketch.count(keys(10_000, 4096)) == 0).mean() > 0.9


def test_at_the_end_of_a_sample_it_still_tells_twice_from_never() -> None:
    sketch = FrequencySketch(1024)
    for first in range(0, sketch._sample - 64, 64):
        sketch.add(keys(first, 64))
    assert (sketch.count(keys(10**6, 4096)) < 2).mean() > 0.97


def test_what_was_popular_once_is_forgotten() -> None:
    sketch = FrequencySketch(512)
    for _ in range(8):
        sketch.add([key(1)])
    assert sketch.count([key(1)])[0] == 8
    sketch.add(keys(100, sketch._sample - 8))
    assert sketch.count([key(1)])[0] in (4, 5)


def test_what_is_halved_counts_half_towards_the_next_time() -> None:
    sketch = FrequencySketch(512)
    for sample in (sketch._sample, sketch._sample // 2):
        sketch.add(keys(100, sample - 8))
        for _ in range(7):
            sketch.add([key(1)])
        before = sketch.count([key(1)])[0]
        sketch.add([key(2)])
        assert sketch.count([key(1)])[0] == before // 2


def test_a_counter_does_not_run_over() -> None:
    sketch = FrequencySketch(1024)
    for _ in range(300):
        sketch.add([key(1)])
    assert sketch.count([key(1)])[0] == 255


def test_nothing_is_nothing() -> None:
    sketch = FrequencySketch(10)
    sketch.add([])
    assert len(sketch.count([])) == 0


@pytest.mark.parametrize("slots", [1, 100, 4096, 100_000])
def test_memory_is_bounded(slots: int) -> None:
    assert FrequencySketch(slots).nbytes <= max(256, 2 * COUNTERS_PER_KEY * slots)
