"""Policy of writes: alone, and under vLLM's scheduler (``simulation.py``)."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.connector.events import gauges
from tests.connector.rank import BLOCK, DEVICES, SLOT_BYTES, Pace
from tests.connector.simulation import WINDOW, Simulation, engine_config
from tests.e2e.models import make_llama
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.sizes import GIB, MIB
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.store.devices.wear import WearLedger
from vllm_ssdkv.store.write_policy import WritePolicy, open_write_policy

DAY = 86400.0
BUDGET = 16 * MIB
"""The least there is."""


class Rig:
    """A policy over two devices, the second of which has the options given."""

    def __init__(self, tmp_path: Path, admission: str = "all", **second: object):
        self.now = 0.0
        self.counters = Counters()
        self.paths = [str(tmp_path / name) for name in "ab"]
        devices: list[object] = [self.paths[0], {"path": self.paths[1], **second}]
        config = SSDKVConfig.from_extra_config({"devices": devices, "admission": admission})
        self.wear = WearLedger(None, self.paths, self.counters, clock=lambda: self.now)
        self.policy = WritePolicy(
            config, config.devices, self.wear, [1000.0, 1000.0], 100, self.counters
        )

    def gauges(self) -> dict[str, float]:
        self.policy.update_gauges(self.paths)
        return {
            key.replace(self.paths[0], "a").replace(self.paths[1], "b"): value
            for key, value in self.counters.take_gauges().items()
        }


def keys(*names: int) -> list[bytes]:
    return [random.Random(name).randbytes(32) for name in names]


def test_everything_is_admitted_unless_asked(tmp_path: Path) -> None:
    policy = Rig(tmp_path).policy
    assert policy.admitted(keys(1, 2)).all()
    assert policy.should_write(keys(1, 2), 10**9) == [True, True]
    assert not policy.used_up(10**9)


def test_the_second_use_is_admitted(tmp_path: Path) -> None:
    policy = Rig(tmp_path, "second_use").policy
    policy.record_access(keys(1, 2))
    assert not policy.admitted(keys(1, 2, 3)).any()
    policy.record_access(keys(2, 3))
    assert policy.admitted(keys(1, 2, 3)).tolist() == [False, True, False]
    assert policy.should_write(keys(1, 2, 3), 0) == [False, True, False]


def test_a_budget_counts_what_is_under_way(tmp_path: Path) -> None:
    rig = Rig(tmp_path, daily_write_budget=BUDGET)
    slots = BUDGET // 1000
    assert not rig.policy.used_up(slots - 1)
    assert rig.policy.used_up(slots)
    rig.policy.wrote([(1, BUDGET - 1500)])
    assert not rig.policy.used_up(0)
    assert rig.policy.used_up(1)
    assert rig.policy.should_write(keys(1), 1) == [False]


def test_the_first_device_without_budget_counts_for_all(tmp_path: Path) -> None:
    rig = Rig(tmp_path, daily_write_budget=BUDGET)
    rig.policy.wrote([(0, 100 * BUDGET)])
    assert not rig.policy.used_up(0)
    rig.policy.wrote([(1, BUDGET)])
    assert rig.policy.used_up(0)


def test_a_used_up_budget_is_said_once_a_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path, daily_write_budget=BUDGET)
    with caplog.at_level(logging.WARNING, "vllm_ssdkv"):
        for _ in range(2):
            rig.policy.wrote([(1, BUDGET)])
            for _ in range(5):
                assert rig.policy.used_up(0)
            rig.now += DAY
            assert not rig.policy.used_up(0)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert rig.paths[1] in lines[0]
    assert "(16 MiB)" in lines[0]


def test_shares_are_shown_where_they_are_known(tmp_path: Path) -> None:
    rig = Rig(tmp_path, tbw=4 * GIB, daily_write_budget=BUDGET)
    rig.policy.wrote([(0, 5), (1, BUDGET // 2), (1, BUDGET // 4)])
    assert rig.gauges() == {
        "wear_bytes|device=a": 5.0,
        "wear_bytes|device=b": BUDGET * 3 / 4,
        "wear_used|device=b": BUDGET * 3 / 4 / (4 * GIB),
        "write_budget_used|device=b": 0.75,
    }


def test_without_devices_in_the_options_bytes_are_counted_still() -> None:
    counters = Counters()
    wear = WearLedger(None, ["default"], counters)
    policy = WritePolicy(SSDKVConfig(), [None], wear, [1000.0], 100, counters)
    policy.wrote([(0, 77)])
    assert not policy.used_up(0)
    policy.update_gauges(["/default"])
    assert counters.take_gauges() == {"wear_bytes|device=/default": 77.0}


def test_options_stay_with_their_device_when_another_one_is_missing(tmp_path: Path) -> None:
    """The manifest has those first that are there."""
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    devices = [
        {"path": a, "tbw": "1TB", "daily_write_budget": BUDGET},
        {"path": b, "tbw": "4TB"},
    ]
    config = SSDKVConfig.from_extra_config({"devices": devices})
    there = [SimpleNamespace(path=b, files=["1"], present=True)]
    away = [SimpleNamespace(path=a, files=["2"], present=False)]
    place: Any = SimpleNamespace(
        paths=(a, b),
        state=tmp_path,
        stored=lambda: SimpleNamespace(
            devices=there + away, geometries=[SimpleNamespace(unit_bytes=4096)]
        ),
        config=config,
    )
    placement: Any = SimpleNamespace(devices=2, device_bytes=lambda _: 1000, slots=1)
    counters = Counters()
    policy = open_write_policy(place, placement, 100, counters)
    policy.wrote([(0, 10**12)])
    assert not policy.used_up(10**9)
    policy.update_gauges([b, a])
    assert counters.take_gauges()[f"wear_used|device={b}"] == 0.25
    policy.close()


# ---- under vLLM's scheduler ----

Make = Callable[..., Simulation]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    model = make_llama(tmp_path_factory.mktemp("model") / "llama", layers=1)

    def simulation(mode: str, *, frames: int = 1000, **options: object) -> Simulation:
        run = Simulation(engine_config(model, mode, **options), slots=60, frames=frames)
        # With the first step the workers say how much DRAM they have.
        run.add("first", prompt(5), 1)
        run.run()
        return run

    return simulation


def prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 500) for _ in range(length)]


def ask(run: Simulation, tokens: list[int], count: int = 4) -> tuple[int, int]:
    """Ask a prompt and let everything end: blocks loaded, and blocks written."""
    name = str(len(run.requests))
    before = sum(len(plan.commit.slots) for plan in run.plans)
    run.add(name, tokens, count)
    run.run()
    run.check_answers([name])
    run.check_idle()
    assert run.scheduler.reset_prefix_cache()
    loads = [load for plan in run.plans for load in plan.loads if load.request_id == name]
    written = sum(len(plan.commit.slots) for plan in run.plans) - before
    return sum(len(load.slots) for load in loads), written


def skipped(run: Simulation, cause: str) -> float:
    return run.ours.counters.total("stores_skipped", cause=cause)


def test_reuse_mode_stores_what_comes_back(make: Make) -> None:
    run = make("reuse", admission="second_use")
    assert [ask(run, prompt(100)) for _ in range(3)] == [(0, 0), (0, 6), (6, 0)]
    assert skipped(run, "admission") == 6
    # Of another prompt with the same head nothing but its own tail is new.
    assert ask(run, prompt(48) + prompt(50, 1)) == (3, 0)
    assert skipped(run, "admission") == 9


def test_a_request_that_retains_its_blocks_is_admitted_at_once(make: Make) -> None:
    run = make("reuse", admission="second_use")
    asked = {"extra_args": {"kv_transfer_params": {"ssdkv": {"retain": "1m"}}}}
    run.add("a", prompt(100), 1, asked)
    run.run()
    assert run.index.gauges()["retained"] == run.index.gauges()["ready"] == 6


def test_page_mode_writes_what_leaves_the_window(make: Make) -> None:
    run = make("page", admission="second_use")
    blocks = 160 // BLOCK
    found, written = ask(run, prompt(150), 10)
    assert found == 0
    assert 0 < written <= blocks - WINDOW // BLOCK + 1
    assert skipped(run, "admission") == 159 // BLOCK - written
    # The second time all of it is worth a write.
    again = ask(run, prompt(150), 10)
    assert again[0] == written
    assert written + again[1] >= 150 // BLOCK


def test_a_short_request_in_page_mode_writes_nothing(make: Make) -> None:
    run = make("page", admission="second_use")
    assert ask(run, prompt(WINDOW - 8), 4) == (0, 0)
    assert run.index.gauges()["ready"] == 0


def test_too_many_held_blocks_are_written_all_the_same(make: Make) -> None:
    """Frames of blocks that wait must not keep those of others from being written."""
    run = make("page", admission="second_use", frames=3)
    assert ask(run, prompt(WINDOW - 8), 4) == (0, 1)


def devices(tmp_path: Path, **second: object) -> list[object]:
    return [str(tmp_path / "a"), {"path": str(tmp_path / "b"), **second}]


def use_up(run: Simulation) -> None:
    run.write_policy.wrote([(1, BUDGET)])


def test_reuse_mode_stores_nothing_over_its_budget(make: Make, tmp_path: Path) -> None:
    run = make("reuse", devices=devices(tmp_path, daily_write_budget=BUDGET))
    assert ask(run, prompt(100)) == (0, 6)
    use_up(run)
    assert ask(run, prompt(100, 1)) == (0, 0)
    assert skipped(run, "budget") == 6
    assert ask(run, prompt(100)) == (6, 0), "what is stored is found"
    run.pace.now += DAY
    assert ask(run, prompt(100, 1)) == (0, 6)


def test_page_mode_serves_over_its_budget(make: Make, tmp_path: Path) -> None:
    run = make("page", devices=devices(tmp_path, daily_write_budget=BUDGET))
    use_up(run)
    assert ask(run, prompt(WINDOW - 8)) == (0, 0)
    found, written = ask(run, prompt(150), 10)
    assert (found, 0 < written < 9) == (0, True)
    assert skipped(run, "budget") > 0


def test_workers_tell_what_they_wrote(make: Make) -> None:
    run = make("reuse", devices=["/a", "/b"])
    ask(run, prompt(100))
    assert gauges(run)["wear_bytes|device=device0"] == 6 * SLOT_BYTES / DEVICES


def test_a_preempted_request_is_no_second_use(make: Make) -> None:
    run = make("reuse", admission="second_use")
    run.add("a", prompt(100), 10)
    for _ in range(6):
        run.step()
        run.end_io()
    run.preempt_all()
    assert run.preempted == 1
    run.run()
    run.check_answers("a")
    assert run.index.gauges()["ready"] == 0


def test_nobody_waits_for_a_budget(make: Make, tmp_path: Path) -> None:
    run = make("page", devices=devices(tmp_path, daily_write_budget=BUDGET))
    use_up(run)
    for number in range(4):
        run.add(str(number), prompt(100 + number, number), 20)
    run.run()
    run.check_answers(map(str, range(4)))
    run.check_idle()


def test_pace_is_the_ledgers_clock() -> None:
    """The budgets above depend on it."""
    assert Pace().now < DAY
