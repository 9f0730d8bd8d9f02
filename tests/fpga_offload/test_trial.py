"""Trials of a backend: the oracle passes them, one that errs does not."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import pytest

from tests.oracles.fpga_backend import NumpyBackend
from vllm_ssdkv.fpga_offload.backend import AttendWork, Partials
from vllm_ssdkv.fpga_offload.description import KernelShape
from vllm_ssdkv.fpga_offload.trial import random_problem, run_problem


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 16, 77, 300])
def test_the_oracle_errs_by_rounding_only(
    dtype: Literal["float16", "bfloat16"], tokens: int
) -> None:
    shape = KernelShape(64, 5, dtype)
    problem = random_problem(shape, tokens, seed=3, checksum=True)
    found = run_problem(NumpyBackend(shape), problem)
    assert found.error < 1e-6
    assert found.wrong_digests == 0
    assert found.cycles is None


class Skewed(NumpyBackend):
    """One weight is too large, a digest wrong; it says how long it took."""

    def attend(self, work: AttendWork) -> Partials:
        found = super().attend(work)
        found.acc[0, 0, 0] += 1e-3 * np.abs(found.acc).max()
        assert found.digests is not None
        found.digests[2] += 1
        return dataclasses.replace(found, cycles=1000, beats=700)


def test_errors_are_found_and_cycles_are_told() -> None:
    shape = KernelShape(128, 1, "float16")
    found = run_problem(Skewed(shape), random_problem(shape, 100, checksum=True))
    assert 1e-4 < found.error < 1e-2
    assert found.wrong_digests == 1
    assert found.cycles is not None
    assert found.cycles.line_rate == pytest.approx(0.7)
    assert (found.cycles.tokens, found.cycles.group) == (100, 1)


def test_pages_lie_in_another_order_than_their_tokens() -> None:
    problem = random_problem(KernelShape(64, 1, "float16"), 500, seed=1)
    steps = np.diff(problem.work.entries["address"].astype(np.int64))
    assert set(np.sign(steps)) == {-1, 1}
    assert not np.any(problem.work.entries["address"] % 64)
    assert problem.work.entries["tokens"][-1] == 500 % 16
