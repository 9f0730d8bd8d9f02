"""Devices that fail while the engine runs: every request ends, with the tokens of stock vLLM."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.bench import CHUNK, DEADLINE_S, HANG_S, PROMPTS, WINDOW, Bench, engine_options
from tests.e2e.stock import Stock
from tests.e2e.workload import kv_tokens
from tests.kit.engine import Engine
from vllm_ssdkv.base.errors import StoreFailedError

StartBench = Callable[..., Bench]

KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "eio": ({"kind": "eio"}, "eio", "Input/output error"),
    "enospc": ({"kind": "enospc", "op": "write"}, "enospc", "No space left"),
    "short": ({"kind": "short", "op": "read"}, "short", "fewer bytes"),
    "stall": ({"kind": "stall", "seconds": 30.0}, "deadline", "did not end within 2 s"),
    "dead": ({"kind": "dead"}, "other", "No such device"),
}


START, FLIGHT = "from the start", "in mid-flight"
SHORT = {("eio", START), ("enospc", FLIGHT), ("short", START), ("stall", FLIGHT), ("dead", START)}
"""Each kind once in `make test`; `make soak` has all of them at both times."""


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        pytest.param(
            kind, when, id=f"{kind}-{when}", marks=() if (kind, when) in SHORT else pytest.mark.soak
        )
        for kind in KINDS
        for when in (START, FLIGHT)
    ],
)
def test_a_device_that_fails(bench: StartBench, log: list[str], kind: str, when: str) -> None:
    here = bench()
    rule, label, text = KINDS[kind]
    victim = here.paths[2]

    def strike(step: int) -> None:
        if step == 8:
            here.faults(rule | {"device": 2})

    if when == START:
        here.faults(rule | {"device": 2})
        here.ask()
    else:
        here.ask(strike)
    assert here.count("io_errors", device=victim, kind=label) > 0
    assert here.count("device_lost", device=victim) == 1
    assert here.count("device_state", device=victim) == 0
    assert here.count("device_state", device=here.paths[0]) == 1
    assert here.count("device_lost", device=here.paths[0]) == 0
    (line,) = [line for line in log if "out of use" in line]
    assert victim in line
    assert any(victim in line and text in line for line in log)
    # It stays out of use, and everything goes on without it.
    here.ask()
    here.assert_clean()


def until(here: Bench, over: Callable[[], bool]) -> None:
    """Ask until something is so."""
    end = time.monotonic() + HANG_S
    while not over():
        assert time.monotonic() < end
        here.ask()


HEALS: tuple[dict[str, Any], ...] = (
    {"kind": "enospc", "op": "write", "count": 8},
    {"kind": "eio", "op": "write", "count": 16},
    {"kind": "eio", "op": "read", "count": 6},
    {"kind": "stall", "seconds": DEADLINE_S + 1, "count": 1},
)
"""Faults that end by themselves. The first one is in every sequence."""

LOST = ("read_error", "write_error", "restriped")
"""Causes for which a block may be gone after such a fault: of those that were read meanwhile."""


def healthy(here: Bench) -> bool:
    """Check whether all devices are in use, and take writes."""
    there = [here.count("device_state", device=path) for path in here.paths]
    return there == [1] * 4 and not any(here.count("writes_paused", device=p) for p in here.paths)


def stored(here: Bench) -> int:
    """Blocks of all prompts that are found."""
    return sum(len(here.stored(prompt)) for prompt in range(len(here.prompts)))


def heal(here: Bench, source: random.Random) -> None:
    """A sequence of faults, of one device or of all: what was stored is found, or was dropped for a
    cause; then, and after a restart."""
    for number in range(3):
        before = stored(here)
        dropped = sum(here.count("slots_dropped", cause=cause) for cause in LOST)
        rule = HEALS[source.randrange(len(HEALS)) if number else 0]
        where = {} if source.random() < 0.5 or not number else {"device": source.randrange(4)}
        here.faults(rule | where)
        here.ask()
        here.faults()
        until(here, lambda: healthy(here))
        dropped = sum(here.count("slots_dropped", cause=cause) for cause in LOST) - dropped
        assert stored(here) >= before - dropped, rule
        here.assert_clean()
    found = stored(here)
    here.restart()
    assert stored(here) == found
    here.ask()
    assert here.count("hit_tokens", tier="ssd") > 0
    here.assert_clean()


@pytest.mark.parametrize("mode", ["reuse", "page"])
def test_faults_that_heal_cost_nothing(bench: StartBench, mode: str) -> None:
    here = bench(mode)
    here.ask()
    heal(here, random.Random(1))


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["reuse", "page"])
def test_faults_that_heal_cost_nothing_for_long(
    bench: StartBench, mode: str, soak_rounds: int
) -> None:
    here, source = bench(mode), random.Random()
    here.ask()
    for _ in range(10 * soak_rounds):
        heal(here, source)


def test_a_data_file_that_is_deleted(bench: StartBench, log: list[str]) -> None:
    """What was in it is lost; nothing else is, now and after a restart."""
    here = bench()
    victim = here.paths[2]

    def strike(step: int) -> None:
        if step == 8:
            (Path(victim) / "rank0.data").unlink()

    here.ask(strike)
    here.ask()
    assert here.count("device_lost", device=victim) == 1
    assert here.count("device_state", device=victim) == 0
    assert here.count("store_bytes", device=here.paths[0]) > 0
    (line,) = [line for line in log if "out of use" in line]
    assert victim in line
    assert "its data file was removed" in line
    here.assert_clean()
    here.restart()
    here.ask()
    assert here.count("device_state", device=victim) == 1
    here.assert_clean()


def test_a_device_that_garbles_what_it_returns(bench: StartBench, log: list[str]) -> None:
    here = bench()
    here.faults({"kind": "corrupt", "device": 1})
    here.ask()
    assert here.count("checksum_failures") >= 8
    assert here.count("slots_dropped", cause="read_error") > 0
    assert here.count("device_lost", device=here.paths[1]) == 1
    assert any(f"{here.paths[1]} is out of use" in line and "checksums" in line for line in log)
    here.ask()
    here.assert_clean()


def test_faults_that_pass(bench: StartBench) -> None:
    """Some of everything, everywhere, one after the other: nothing is given up."""
    here = bench(io={"deadline": HANG_S})
    for number, rule in enumerate(
        (
            {"kind": "eio", "probability": 0.005},
            {"kind": "short", "op": "read", "probability": 0.005},
            {"kind": "enospc", "op": "write", "probability": 0.2},
            {"kind": "corrupt", "probability": 0.005},
            {"kind": "latency", "seconds": 0.02, "probability": 0.3},
            {"kind": "stall", "device": 3, "seconds": DEADLINE_S / 3, "count": 3},
        )
    ):
        here.faults(rule | {"seed": number})
        here.ask()
    assert [here.count("device_lost", device=path) for path in here.paths] == [0] * 4
    assert here.count("io_errors") > 0
    assert here.count("io_deadline_exceeded") == 0
    here.assert_clean()


def test_every_device_dies(bench: StartBench) -> None:
    here = bench()

    def strike(step: int) -> None:
        if step == 8:
            here.faults({"kind": "dead"})

    begin = time.monotonic()
    with pytest.raises(StoreFailedError) as error:
        here.ask(strike)
    assert time.monotonic() - begin < HANG_S
    assert all(path in str(error.value) for path in here.paths)


@pytest.mark.parametrize(
    "kind", ["eio", pytest.param("stall", marks=pytest.mark.soak), "corrupt", "dead"]
)
def test_reuse_mode_computes_what_it_cannot_read(bench: StartBench, kind: str) -> None:
    here = bench("reuse")
    here.ask()
    here.faults({"kind": kind, "device": 2, "seconds": 30.0 if kind == "stall" else 0.0})
    here.ask()
    assert here.count("load_failures") > 0
    here.ask()
    assert here.count("device_lost", device=here.paths[2]) == 1
    gauges = here.engine.scheduler.connector.scheduler.index.gauges()
    assert gauges["masked"] + gauges["lost"] > 0
    here.assert_clean()


def test_reuse_mode_without_any_device(bench: StartBench) -> None:
    """A cache must not end requests: it only stops being of use."""
    here = bench("reuse")
    here.ask()
    here.faults({"kind": "dead"})
    for _ in range(2):
        here.ask()
    assert [here.count("device_lost", device=path) for path in here.paths] == [1] * 4


def test_a_hung_device_behind_the_processes_that_users_get(
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
    tmp_path: Path,
) -> None:
    """Engine core and worker in processes of their own, steps scheduled ahead of their results."""
    wanted = [answer.tokens for answer in stock.answers("llama", PROMPTS)]
    places, control = devices(4), tmp_path / "faults.json"
    control.write_text('[{"kind": "stall", "device": 2, "after": 300, "seconds": 30}]')
    with Engine(
        models["llama"],
        ssdkv=engine_options("page", places, control),
        kv_tokens=2 * kv_tokens(WINDOW, CHUNK),
        max_num_batched_tokens=CHUNK,
        max_model_len=4096,
        in_process=False,
    ) as engine:
        begin = time.monotonic()
        for _ in range(2):
            assert [a.tokens for a in engine.answers(PROMPTS)] == wanted
        assert time.monotonic() - begin < HANG_S
        assert engine.ssdkv("device_lost", device=places[2]["path"]) == 1
        assert engine.ssdkv("io_deadline_exceeded") > 0
        control.write_text("[]")
