"""Chunks go through vLLM's own manager to the tier and back, across restarts and damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vllm.config import VllmConfig

from tests.secondary_tier.rig import key_of, running

Devices = Callable[[int], list[Path]]


def test_chunks_come_back_after_a_restart(settings: VllmConfig, tmp_devices: Devices) -> None:
    devices = tmp_devices(2)
    keys = [key_of(number) for number in range(20)]
    with running(settings, devices) as engine:
        context = engine.begin()
        assert engine.looked_up(keys, context) == []
        assert engine.store(keys, context) == keys
        engine.settle()
        engine.empty_pool()
        assert engine.looked_up(keys, context) == keys
        engine.end(context)
    with running(settings, devices) as engine:
        context = engine.begin()
        assert engine.looked_up(keys, context) == keys
        assert engine.looked_up([key_of(20)], context) == []
