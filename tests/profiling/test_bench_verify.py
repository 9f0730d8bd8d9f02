"""Ratios of ``bench_verify`` are those within a turn."""

from __future__ import annotations

import pytest

from vllm_ssdkv.profiling.bench_verify import EVERY, summary


def test_a_machine_that_slows_down_changes_no_ratio() -> None:
    pace = [1.0, 1.0, 2.0, 4.0, 8.0]
    found = summary(
        {
            "out": [1.0 * one for one in pace],
            "off": [1.25 * one for one in pace],
            "verified": [1.5 * one for one in pace],
        }
    )
    assert found["off_to_out"] == (1.25, 1.25, 1.25)
    assert found["verified_to_off"] == (1.2, 1.2, 1.2)
    assert found["hit_s"] == 2.5
    assert found["more_s"] == 0.5
    assert found["share_in_every"] == pytest.approx(0.2 / EVERY)
