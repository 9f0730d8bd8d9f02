"""The benchmark of loads in small: it measures what it says, and tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.config.io_engine import ThrottleRule
from vllm_ssdkv.profiling import bench_load as bench


def test_slow_drives_are_slow_for_everybody(tmp_devices: Callable[[int], list[Path]]) -> None:
    drive = ThrottleRule(bandwidth=50e6, latency_s=0.001)
    (row,) = bench.measure(
        tmp_devices(1),
        [128 * 1024],
        [2 * MIB],
        1,
        drive=drive,
        region_bytes=8 * MIB,
        engine_s=0.05,
    )
    assert max(row.load, row.reads, row.engine) <= 0.05


def test_it_measures_each_size_that_fits(tmp_devices: Callable[[int], list[Path]]) -> None:
    devices = tmp_devices(2)
    rows = bench.measure(
        devices, [128 * 1024, 2 * MIB], [MIB, 4 * MIB], 2, region_bytes=8 * MIB, engine_s=0.01
    )
    sizes = [(row.block_bytes, row.hit_bytes) for row in rows]
    assert sizes == [(128 * 1024, MIB), (128 * 1024, 4 * MIB), (2 * MIB, 4 * MIB)]
    for row in rows:
        assert min(row.load, row.reads, row.engine, row.check) > 0
        assert min(row.load_per_reads, row.load_per_engine, row.load_cpu_s_per_gb) > 0
        assert row.request_bytes % 4096 == 0
    assert all(not any(device.iterdir()) for device in devices)
    text = bench.table(rows)
    assert "\n| 128 KiB | 4 MiB | " in text
    assert text.count("\n") == 1 + len(rows)
