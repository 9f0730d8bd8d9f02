"""Benchmark of nodes: it measures what it says, small."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.profiling import bench_node
from vllm_ssdkv.profiling.bench_node import FIGURES, Hit, Result, Streamed, figures, report


@pytest.mark.slow
def test_hits_and_misses_of_all_ways(tmp_devices: Callable[[int], list[Path]]) -> None:
    (scratch,) = tmp_devices(1)
    rows, missed = bench_node.measure_stores(
        scratch, (256 * 1024,), (MIB, 2 * MIB), rounds=2, dram=64 * MIB
    )
    assert [(row.hit_bytes, row.warm) for row in rows] == [
        (MIB, True),
        (MIB, False),
        (2 * MIB, True),
        (2 * MIB, False),
    ]
    for row in rows:
        assert set(row.ms) == set(row.ratio) == {"embedded", "unix", "tcp"}
        assert row.ratio["embedded"] == 1.0
        assert all(0 < row.best_ms[way] <= row.ms[way] for way in row.ms)
    assert missed["embedded"] < missed["unix"]
    text = report(Result(rows, missed, {"tcp": 1.0, "unix": 3.0}, ("iperf3", 2.0)))
    assert "- tcp: 1.00 GB/s, 0.50 of iperf3" in text
    assert "- unix: 3.00 GB/s\n" in f"{text}\n"
    assert list(scratch.iterdir()) == []


def test_figures_are_those_that_the_rows_were_made_with() -> None:
    rows = [
        Hit(
            block,
            hit,
            True,
            {},
            {"embedded": hit / 5e6, "tcp": hit / 5e6 + 1.5 + 0.02 * hit / block + hit * 3e-7},
            {},
        )
        for block in (MIB // 4, 2 * MIB)
        for hit in (8 * MIB, 32 * MIB, 64 * MIB)
    ]
    rows = [Hit(r.block_bytes, r.hit_bytes, r.warm, r.best_ms, r.best_ms, {}) for r in rows]
    found = figures(rows, {"tcp": Streamed(0.5, 1e-4)})["tcp"]
    assert found == pytest.approx(
        {
            "call_s": 1e-4,
            "bytes_per_s": 5e8,
            "load_s": 1.5e-3,
            "block_s": 2e-5,
            "byte_s": 3e-10,
        }
    )


def test_no_figure_is_negative() -> None:
    terms = np.array([[1.0, 4.0, 100.0], [1.0, 8.0, 100.0], [1.0, 8.0, 200.0], [1.0, 2.0, 50.0]])
    found = bench_node._fitted(terms, np.array([3.0, 1.0, 5.0, 2.0]))
    assert all(value >= 0 for value in found)
    assert sum(found) > 0


def test_the_figures_of_the_simulator_are_whole() -> None:
    found = json.loads(FIGURES.read_text())
    assert set(found) == {"unix", "tcp", "tls"}
    for kind, values in found.items():
        names = {"call_s", "bytes_per_s"}
        if kind != "tls":
            names |= {"load_s", "block_s", "byte_s", "attend_s"}
        assert set(values) == names
        assert all(value >= 0 for value in values.values())


def test_figures_are_written_beside_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "figures.json"
    path.write_text('{"tcp": {"call_s": 1.0, "attend_s": 2.0}}')
    monkeypatch.setattr(bench_node, "FIGURES", path)
    bench_node.write_figures({"tcp": {"call_s": 3.0}, "unix": {"attend_s": 4.0}})
    found = json.loads(path.read_text())
    assert found == {"tcp": {"call_s": 3.0, "attend_s": 2.0}, "unix": {"attend_s": 4.0}}


def test_a_plain_copy_takes_the_place_of_iperf3() -> None:
    assert bench_node.plain_copy(1) > 0
