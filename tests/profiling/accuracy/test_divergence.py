"""Distances of distributions, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_ssdkv.profiling.accuracy.divergence import divergence

DENSE = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
OTHER = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()


def test_it_is_what_the_definition_says() -> None:
    found = divergence(DENSE, OTHER, [0, 1])
    assert found.kl == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2)
    assert found.loss == pytest.approx(-(math.log(0.25) + math.log(0.8)) / 2)
    assert found.same == 0.5


def test_it_is_of_the_other_from_the_dense_one() -> None:
    one, other = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    wanted = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    assert divergence(one, other, [0]).kl == pytest.approx(wanted)
    assert divergence(other, one, [0]).kl != pytest.approx(wanted)


def test_a_distribution_has_no_distance_from_itself() -> None:
    found = divergence(DENSE, DENSE, [2, 2])
    assert (found.kl, found.same) == (0.0, 1.0)
    assert found.loss == pytest.approx(-(math.log(0.25) + math.log(0.1)) / 2)
