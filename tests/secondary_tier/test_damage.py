"""Chunks that have gone bad are named one by one, and commands see the store as any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm.config import VllmConfig

from tests.secondary_tier.rig import CHUNK_BYTES, content, key_of, running
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.store.maintenance.fsck import examined

Devices = Callable[[int], list[Path]]

KEYS = [key_of(number) for number in range(24)]
BAD = {3, 4, 11, 23}
ENCRYPTED = {"encryption": {"key_env": "SSDKV_TIER_KEY"}, "dram_gib": "8MiB"}


def spoil(devices: list[Path], positions: set[int]) -> None:
    """Flip a byte in the middle of chunks, wherever they lie."""
    left = {content(KEYS[position]).tobytes()[:64]: position for position in positions}
    for device in devices:
        for file in device.glob("*.data"):
            data = file.read_bytes()
            with file.open("r+b") as stream:
                for start in [start for start in left if data.find(start) >= 0]:
                    stream.seek(data.find(start) + CHUNK_BYTES // 2)
                    byte = data[data.find(start) + CHUNK_BYTES // 2]
                    stream.seek(data.find(start) + CHUNK_BYTES // 2)
                    stream.write(bytes([byte ^ 0x10]))
                    del left[start]
    assert not left


def test_damage_is_named_chunk_by_chunk(settings: VllmConfig, tmp_devices: Devices) -> None:
    devices = tmp_devices(2)
    with running(settings, devices) as engine:
        engine.store(KEYS, engine.begin())
        engine.settle()
    spoil(devices, BAD)
    with examined(devices, devices[0], write=False) as found:
        assert found.report.bad == len(BAD), found.report.problems
    good = [key for position, key in enumerate(KEYS) if position not in BAD]
    with running(settings, devices) as engine:
        context = engine.begin()
        assert engine.stored(KEYS, context) == set(range(len(KEYS)))
        assert engine.looked_up(KEYS, context) == good
        assert engine.stored(KEYS, context) == set(range(len(KEYS))) - BAD
        stats = engine.tier.get_stats()
        assert stats is not None
        values = stats.data["data"]
        assert values["vllm:ssdkv_slots_dropped"]["read_error",] == len(BAD)
        assert values["vllm:ssdkv_checksum_failures"][()] >= len(BAD)
        # They are computed, and stored again.
        engine.store([KEYS[position] for position in sorted(BAD)], context)
        engine.settle()
        engine.empty_pool()
        assert engine.looked_up(KEYS, context) == KEYS


def test_an_encrypted_tier_hides_chunks_and_finds_them_again(
    settings: VllmConfig, tmp_devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSDKV_TIER_KEY", "5a" * 32)
    devices = tmp_devices(1)
    with running(settings, devices, **ENCRYPTED) as engine:
        engine.store(KEYS, engine.begin())
        engine.settle()
        engine.empty_pool()
        assert engine.looked_up(KEYS, engine.begin()) == KEYS
    data = next(devices[0].glob("*.data")).read_bytes()
    assert not any(content(key).tobytes()[:64] in data for key in KEYS)
    with running(settings, devices, **ENCRYPTED) as engine:
        assert engine.looked_up(KEYS, engine.begin()) == KEYS


def test_commands_know_the_store(settings: VllmConfig, tmp_devices: Devices) -> None:
    devices = tmp_devices(2)
    with running(settings, devices) as engine:
        engine.store(KEYS, engine.begin())
        engine.settle()
    listed = CliRunner().invoke(app, ["ls", str(devices[0])])
    assert listed.exit_code == 0, listed.output
    assert "24" in listed.output
    checked = CliRunner().invoke(app, ["fsck", *map(str, devices)])
    assert checked.exit_code == 0, checked.output
