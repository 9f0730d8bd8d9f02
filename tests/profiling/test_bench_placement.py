"""The benchmark of placement in small: what does not depend on the machine is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.profiling.clusters import synthetic
from vllm_ssdkv.profiling import bench_placement as bench


def test_pages_of_one_slot_are_read_from_all_drives(tmp_path: Path) -> None:
    """All pages of the second block of each of 4 heads, in either step."""
    chosen = np.zeros((4, 2, 24), np.bool_)
    chosen[:, :, 8:16] = True
    work = bench.reads([chosen], 1)
    assert [sorted(zip(*map(np.ndarray.tolist, read), strict=True)) for read in work] == [
        [(1, page) for page in range(32)]
    ] * 2
    here = bench.Bench(tmp_path, heads=4, slots=3, bandwidth=100e6)
    found = {mode.name: here.measure(mode, work, 4, 1) for mode in bench.MODES}
    equal, heads, apart = found.values()
    # The layer is in two units, one of them shared with the next.
    assert (equal.busiest, equal.requests) == (2, 2)
    assert (heads.busiest, heads.requests) == (1, 4)
    assert apart.busiest == 1
    assert apart.requests > 28  # few of 32 are neighbours in memory, too
    # 128 KiB from the busiest of two drives, and 64 KiB from each.
    assert equal.step_s >= 0.0013
    assert heads.step_s >= 0.0006


def test_traces_become_rows(tmp_path: Path) -> None:
    traces = [synthetic.trace(f"made{seed}", seed=seed) for seed in range(2)]
    rows = bench.measure(traces, tmp_path, [2, 4], [1, 3], bandwidth=100e6, steps=3, repeats=1)
    assert [(row.order, row.batch, row.drives) for row in rows[:: len(bench.MODES)]] == [
        (order, batch, drives) for order in bench.ORDERS for batch in (1, 3) for drives in (2, 4)
    ]
    for row in rows:
        assert 1 <= row.measured.busiest <= row.drives
        assert min(row.linear, row.measured.requests, row.measured.step_s) > 0
    assert bench.table(rows).count("\n") == 1 + len(rows)
