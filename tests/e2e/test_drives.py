"""Drives that come, go, die and slow down under a real engine: always the tokens of stock vLLM."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.e2e.bench import HANG_S, Bench
from tests.kit.clock import Clock
from vllm_ssdkv.store.devices import throughput
from vllm_ssdkv.store.io import slot_io, slot_request
from vllm_ssdkv.store.io.testing import throttled

StartBench = Callable[..., Bench]

TROUBLE = ("load_failures", "recomputed_requests", "header_mismatches", "checksum_failures")

VICTIM = 1


def assert_no_trouble(here: Bench) -> None:
    assert [here.count(name) for name in TROUBLE] == [0] * len(TROUBLE)
    here.assert_clean()


def used(here: Bench) -> set[int]:
    """Devices that slots are striped over."""
    segments = here.scheduler.rebalancer.placement.segments
    return {device for segment in segments if segment.slots for device in segment.lanes}


def test_drives_removed_and_added_between_runs(
    bench: StartBench, devices: Callable[..., list[dict[str, Any]]], log: list[str]
) -> None:
    here = bench(count=3)
    here.ask()
    three = here.places

    # Without one of them: what touched it is computed again, and nothing else.
    here.places = [three[0], three[2]]
    here.restart()
    assert any(f"{three[1]['path']} is not among the devices any more" in line for line in log)
    here.ask()
    assert_no_trouble(here)

    # With it again, and one more: what was stored meanwhile is found, and the new one is used.
    more = devices(1, "16MiB")
    here.places = [*three, *more]
    here.restart()
    here.ask()
    assert here.count("hit_tokens") > 0
    assert 3 in used(here)
    assert_no_trouble(here)


def test_the_first_drive_is_lost_with_the_state(bench: StartBench) -> None:
    """It holds manifest and journal. With two copies all that was stored is found again."""
    here = bench(count=3, replicas=2)
    here.ask()
    stored = sum(len(here.stored(prompt)) for prompt in range(len(here.prompts)))
    here.engine.close()
    shutil.rmtree(here.paths[0])
    here.places = here.places[1:]
    here.start()
    here.ask()
    assert here.count("recovered_slots") >= stored
    assert here.count("manifest_restores") == here.count("journal_rebuilds") == 1
    assert here.count("hit_tokens") > 0
    assert_no_trouble(here)
    # And the next start knows of nothing.
    here.restart()
    here.ask()
    assert here.count("manifest_restores") == here.count("journal_rebuilds") == 0
    assert here.count("hit_tokens") > 0
    assert_no_trouble(here)


def test_a_drive_dies_and_is_read_elsewhere(bench: StartBench) -> None:
    """Under running requests, with two copies: nothing is computed again."""
    # With room: how much is given up for new lanes depends on how soon the manifest is saved.
    here = bench(count=3, replicas=2, capacity_mib=64)
    struck: list[int] = []

    def strike(step: int) -> None:
        if step == 12:
            here.faults({"kind": "dead", "device": VICTIM})
            struck.append(step)

    here.ask(strike)
    assert struck
    end = time.monotonic() + HANG_S
    while not here.count("device_lost", device=here.paths[VICTIM]):
        assert time.monotonic() < end, "nobody noticed the dead drive"
        here.ask()
    assert here.count("device_lost", device=here.paths[VICTIM]) == 1
    assert here.count("slots_dropped") == 0
    assert here.count("single_copies") > 0
    assert_no_trouble(here)
    # What it held is found as before.
    stored = [here.stored(prompt) for prompt in range(len(here.prompts))]
    assert all(stored)
    here.ask()
    assert_no_trouble(here)

    # The next run begins without it.
    here.faults()
    dead = here.places[VICTIM]
    here.places = [place for place in here.places if place is not dead]
    here.restart()
    for prompt, slots in enumerate(stored):
        assert here.stored(prompt) == slots
    here.ask()
    assert here.count("hit_tokens", tier="ssd") > 0
    assert here.count("slots_dropped") == 0
    assert_no_trouble(here)

    # It comes back as it was: old copies on it are not taken for new ones.
    here.places = [here.places[0], dead, here.places[1]]
    here.restart()
    here.ask()
    assert here.count("hit_tokens", tier="ssd") > 0
    assert here.count("device_lost", device=dead["path"]) == 0
    assert_no_trouble(here)


def with_a_slow_drive(
    bench: StartBench,
    monkeypatch: pytest.MonkeyPatch,
    mode: str = "page",
    capacity_mib: int = 16,
) -> Bench:
    """Three drives, one with a tenth of the others' speed, which is noticed within few reads."""
    Clock().govern(monkeypatch, slot_io, slot_request, throttled)
    monkeypatch.setattr(throughput, "WINDOW_S", 0.05)
    monkeypatch.setattr(throughput, "MIN_PART_BYTES", 64 * 1024)
    monkeypatch.setattr(throughput, "MIN_WINDOW_BYTES", 128 * 1024)
    rules = [
        {"device": device, "bandwidth": "4MiB" if device == VICTIM else "40MiB"}
        for device in range(3)
    ]
    return bench(mode, 3, {"throttle": rules, "deadline": HANG_S}, capacity_mib=capacity_mib)


def test_the_share_of_a_slow_drive_falls(
    bench: StartBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = with_a_slow_drive(bench, monkeypatch)
    here.ask()
    fair = 1 / len(here.paths)
    end = time.monotonic() + HANG_S
    while here.count("device_share", device=here.paths[VICTIM]) > 0.6 * fair:
        assert time.monotonic() < end, "nobody noticed the slow drive"
        here.ask()
    for other in (0, 2):
        assert here.count("device_share", device=here.paths[other]) > fair
    assert here.count("device_lost", device=here.paths[VICTIM]) == 0
    assert_no_trouble(here)


@pytest.mark.parametrize("mode", ["page", "reuse"])
def test_what_is_read_again_leaves_a_slow_drive(
    bench: StartBench, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """And is read from its new place, also after a restart."""
    here = with_a_slow_drive(bench, monkeypatch, mode, capacity_mib=64)
    here.ask()
    end = time.monotonic() + HANG_S
    while here.count("blocks_rewritten") == 0:
        assert time.monotonic() < end, "nothing is rewritten"
        here.ask()
    here.ask()
    assert here.count("device_lost", device=here.paths[VICTIM]) == 0
    assert_no_trouble(here)

    stored = [here.stored(prompt) for prompt in range(len(here.prompts))]
    slots = np.array([slot for prompt in stored for slot in prompt])
    assert not here.scheduler.rebalancer.outdated(slots).all()
    here.restart()
    assert [here.stored(prompt) for prompt in range(len(here.prompts))] == stored
    here.ask()
    assert here.count("hit_tokens", tier="ssd") > 0
    assert_no_trouble(here)
