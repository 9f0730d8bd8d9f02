"""The benchmark of encryption in small: it measures what it says, and tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vllm_ssdkv.profiling import bench_encryption as bench
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

SHAPE = SlotGeometry("paged", layers=2, heads=2, groups=1, payload_bytes=8192)
ROUNDS = 2


def test_it_measures_both_stores_and_the_cipher(
    tmp_devices: Callable[[int], list[Path]],
) -> None:
    phases = bench.store_speed(tmp_devices(2), 40, ROUNDS, SHAPE)
    assert phases.keys() == set(bench.PHASES)
    for by_name in phases.values():
        assert {name: len(speeds) for name, speeds in by_name.items()} == {
            "plain": ROUNDS,
            "encrypted": ROUNDS,
        }
        assert all(speed.rate > 0 for speeds in by_name.values() for speed in speeds)
    ciphers = {8192: bench.cipher_speed(8192, 3, 1 << 20)}
    assert {"native seal", "native open", "cryptography decrypt"} <= ciphers[8192].keys()
    text = "\n".join(bench.report(ciphers, phases))
    assert "OpenSSL" in text
    for row in ("8 KiB", *bench.PHASES):
        assert f"\n| {row} | " in text
