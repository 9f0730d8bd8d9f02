"""The scrub of a running engine, and the check of what it leaves behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.e2e.bench import HANG_S, Bench, flip_bit
from vllm_ssdkv.store.maintenance import scrubber
from vllm_ssdkv.store.maintenance.fsck import examined
from vllm_ssdkv.store.maintenance.repair import repair

StartBench = Callable[..., Bench]


def test_a_page_that_goes_bad_while_nobody_asks(
    bench: StartBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is dropped before a request can run into it, and everything else is as it should be."""
    # The first pass may be over before the page goes bad; the next one must not be an hour away.
    monkeypatch.setattr(scrubber, "PASS_S", 0.2)
    here = bench("reuse", io={"scrub_rate": "1GiB"})
    here.ask()
    slots = here.stored(0)
    geometry = here.scheduler.rebalancer.placement.geometry
    here.flip(slots[7], geometry.page_offset(1) + 500)
    worker = get_kv_transfer_group().worker

    def wait_for(metric: str, more_than: int) -> None:
        deadline = time.monotonic() + HANG_S
        while worker.counters.total(metric) <= more_than:
            assert time.monotonic() < deadline, f"{metric} is {worker.counters.total(metric)}"
            time.sleep(0.05)

    deadline = time.monotonic() + HANG_S
    while not worker.store._scrubber._bad:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert here.count("slots_dropped", cause="read_error") == here.count("scrub_bad_pages") == 0
    # The scheduler hears of it in the next step, whoever makes it.
    here.engine.add("anything", here.prompts[4][:40])
    here.engine.run()
    assert here.count("slots_dropped", cause="read_error") == here.count("scrub_bad_pages") == 1
    assert slots[7] not in here.stored(0)
    here.ask()
    assert here.count("load_failures") == 0
    assert here.count("checksum_failures") > 0
    # Requests have interrupted the scrub; it goes on when nobody asks.
    wait_for("scrub_bytes", len(slots) * geometry.slot_bytes)
    here.assert_clean()

    extents = here.scheduler.rebalancer.placement.extents(np.array(slots[3:4]), 0, 4096)
    here.engine.close()
    paths = [Path(path) for path in here.paths]
    with examined(paths) as found:
        assert found.report.clean, found.report.problems
        assert found.report.stored == found.report.checked_slots > len(slots)
    flip_bit(paths[int(extents.device[0])] / "rank0.data", int(extents.offset[0]) + 100)
    with examined(paths, write=True) as found:
        assert found.report.counts == {"header": 1}
        repair(found)
    here.restart()
    here.ask()
    assert here.count("header_mismatches") == here.count("load_failures") == 0
