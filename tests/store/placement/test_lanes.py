"""Lanes follow the weights, in a short list, evenly spread."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.store.placement.lanes import MAX_LANES, lanes_for, partners

weights = st.lists(st.floats(0.05, 50.0, allow_nan=False), min_size=1, max_size=8)


def test_known_lists() -> None:
    # These are part of the on-disk format: they must never change.
    assert lanes_for([1.0]) == (0,)
    assert lanes_for([1.0, 1.0, 1.0]) == (0, 1, 2)
    assert lanes_for([7.0, 7.0]) == (0, 1)
    assert lanes_for([2.0, 1.0]) == (0, 1, 0)
    assert lanes_for([1.0, 3.0]) == (1, 0, 1, 1)
    assert lanes_for([0.5, 1.0, 1.0]) == (1, 2, 0, 1, 2)


@given(weights)
def test_every_device_has_a_lane_and_the_list_is_short(values: list[float]) -> None:
    lanes = lanes_for(values)
    assert set(lanes) == set(range(len(values)))
    assert len(values) <= len(lanes) <= MAX_LANES


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_shares_follow_small_ratios(values: list[int]) -> None:
    lanes = lanes_for([float(v) for v in values])
    for device, weight in enumerate(values):
        share = weight / sum(values)
        assert lanes.count(device) / len(lanes) == pytest.approx(share, rel=0.02 + 1e-9)


@given(weights, st.floats(0.01, 100.0))
def test_only_ratios_matter_for_the_shares(values: list[float], factor: float) -> None:
    lanes = lanes_for(values)
    scaled = lanes_for([v * factor for v in values])
    for device in range(len(values)):
        assert lanes.count(device) / len(lanes) == pytest.approx(
            scaled.count(device) / len(scaled), rel=0.05, abs=0.03
        )


@given(weights)
def test_lanes_of_a_device_are_spread(values: list[float]) -> None:
    lanes = lanes_for(values)
    for device in range(len(values)):
        count = lanes.count(device)
        ideal = len(lanes) / count
        doubled = lanes + lanes
        at = [i for i, lane in enumerate(doubled) if lane == device]
        assert max(b - a for a, b in pairwise(at)) <= 2 * ideal + 1


@pytest.mark.parametrize("bad", [[], [0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_impossible_weights_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        lanes_for(bad)


def test_more_devices_than_lanes() -> None:
    assert lanes_for([1.0] * 100) == tuple(range(100))


def test_known_partners() -> None:
    # These are part of the on-disk format, too.
    assert partners((0, 1)) == (1, 0)
    assert partners((0, 1, 2, 3)) == (1, 2, 3, 0)
    assert partners((2, 0, 1, 0)) == (3, 2, 1, 0)


@given(st.lists(st.floats(0.05, 50.0, allow_nan=False), min_size=2, max_size=8))
def test_two_copies_lie_on_two_devices(values: list[float]) -> None:
    lanes = lanes_for(values, copies=2)
    other = partners(lanes)
    assert sorted(other) == list(range(len(lanes)))
    assert all(lanes[lane] != lanes[partner] for lane, partner in enumerate(other))
    assert set(lanes) == set(range(len(values)))
    assert len(lanes) <= MAX_LANES
    most = max(range(len(values)), key=values.__getitem__)
    if values[most] >= sum(values) / 2:
        # The others have a lane at least, however slow they are.
        assert len(lanes) / 2 - len(values) / 2 <= lanes.count(most) <= len(lanes) / 2 * 1.05


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.randoms())
def test_partners_do_not_depend_on_the_numbers_of_devices(
    values: list[int], random: Random
) -> None:
    """They change when a device goes away."""
    lanes = lanes_for([float(v) for v in values], copies=2)
    numbers = random.sample(range(20), len(values))
    assert partners(tuple(numbers[device] for device in lanes)) == partners(lanes)


def test_what_cannot_have_two_copies_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 copies on 1 device"):
        lanes_for([1.0], copies=2)
    with pytest.raises(ValueError, match=r"2 of 3 lanes"):
        partners((0, 1, 0))
