"""Every reason for which a request waits: a situation in which it is given, and its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest

from tests.connector.events import begin, end, hits, prompt, stored
from tests.connector.simulation import SEATS, Simulation, engine_config
from tests.e2e.models import make_llama
from vllm_ssdkv.base.errors import StoreFailedError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.wait_reason import WaitReason
from vllm_ssdkv.connector.scheduler import page_admission
from vllm_ssdkv.connector.scheduler.match import Hit, Match, Miss, Wait, WaitCounter
from vllm_ssdkv.store.own_store import owned

Configs = dict[str, VllmConfig]


def waits(run: Simulation) -> dict[str, float]:
    """How often requests have begun to wait, by reason."""
    counters = run.ours.counters
    counts = {r.label: counters.total("waits", reason=r.label) for r in WaitReason}
    return {label: count for label, count in counts.items() if count}


def steps(run: Simulation, count: int) -> None:
    for _ in range(count):
        run.step()
        run.end_io()


def fail_load(run: Simulation) -> None:
    """Of the request that was added last."""
    while not run.ranks[0].loads:
        run.step()
    run.ranks[0].end_load(False, run.hbm, run.content)
    run.step()  # which tells of it


# ---- situations, each at a time when the request "waits" has waited for some steps ----


def slots(configs: Configs) -> Simulation:
    run = Simulation(configs["page"], slots=17, hbm_blocks=40)
    run.add("holds", prompt(150), 20)
    begin(run, "holds")
    run.add("waits", prompt(150, 1), 20)
    steps(run, 5)
    assert run.ours.counters.total("slot_waits") > 1, "it was asked for again"
    return run


def new_slots(configs: Configs) -> Simulation:
    """Segments are striped anew, and the manifest has not got the first one yet."""
    run = Simulation(configs["page"], slots=20)
    run.manifest.late = True
    run.ranks[0].report.speeds.append((0, 0.5))
    run.add("tells", prompt(20), 4)
    run.run()
    run.add("waits", prompt(150), 20)
    steps(run, 5)
    run.manifest.late = False
    return run


def seats(configs: Configs) -> Simulation:
    run = Simulation(configs["priority"], slots=400, hbm_blocks=400)
    stored(run, *(prompt(40, seed) for seed in range(SEATS + 1)))
    running = [f"running {n}" for n in range(SEATS)]
    for n, name in enumerate(running):
        run.add(name, prompt(10, -1 - n), 30 if n else 8)
    begin(run, *running)
    for n in range(SEATS):
        run.add(f"ahead {n}", prompt(40, n), 4, priority=1)
    run.add("waits", prompt(40, SEATS), 4, priority=2)
    while "running 0" not in run.finished:
        run.step()
    for _ in range(5):  # in which the hits are loaded
        run.step()
    return run


def hbm(configs: Configs, *behind: str) -> Simulation:
    """A hit with a window in HBM that others fill, and requests behind it."""
    run = Simulation(configs["reuse"], windows=(None, 8), hbm_blocks=26, slots=3000)
    head = prompt(160)
    stored(run, [*head, 5])
    run.add("holds", prompt(100, 1), 30)
    begin(run, "holds")
    run.add("waits", head + prompt(40, 7), 2)
    for name in behind:
        run.add(name, prompt(20, 9), 2)
    steps(run, 3)
    return run


def hbm_turn(configs: Configs) -> Simulation:
    return hbm(configs, "behind")


def retry_turn(configs: Configs) -> Simulation:
    """A load has failed, and the second one is under way."""
    run = Simulation(configs["reuse"], slots=60, hbm_blocks=60)
    stored(run, prompt(100))
    run.add("fails", prompt(100), 4)
    fail_load(run)
    run.add("waits", prompt(40, 1), 4)
    for _ in range(5):
        run.step()
    return run


def retry_hbm(configs: Configs) -> Simulation:
    """While the load was under way another request has taken more of HBM."""
    run = Simulation(configs["reuse"], slots=60, hbm_blocks=18)
    stored(run, prompt(100))
    run.add("holds", prompt(150, 1), 30)
    begin(run, "holds")
    run.add("waits", prompt(100), 4)
    for _ in range(12):
        run.step()
    fail_load(run)
    steps(run, 5)
    return run


def adapter(configs: Configs) -> Simulation:
    """vLLM holds it, and no worker has told of it."""
    run = Simulation(configs["reuse"], slots=60, hbm_blocks=60)
    run.files[1] = 0
    run.load_adapter(1)
    run.add("waits", prompt(40), 4, lora_request=LoRARequest("helpful", 1, "/adapter"))
    run.step()
    return run


def digest(configs: Configs) -> Simulation:
    """The cache was reset; the workers digest their weights in the next step."""
    run = Simulation(configs["reuse"], slots=60, hbm_blocks=60)
    assert run.scheduler.reset_prefix_cache()
    run.add("waits", prompt(40), 4)
    run.step()
    return run


def elsewhere(configs: Configs) -> Simulation:
    """Another engine of the node computes its blocks, for as long as it is asked five times."""
    run = Simulation(configs["reuse"], slots=60, hbm_blocks=60)
    answers = iter([True] * 5)
    run.index.awaits = lambda *_: next(answers, False)  # type: ignore[method-assign]  # as a node
    run.add("waits", prompt(40), 4)
    steps(run, 4)
    return run


def paused(configs: Configs, mode: str = "page", **options: int) -> Simulation:
    """A rank has told that a device takes no writes, which is tried again in an hour."""
    run = Simulation(configs[mode], slots=60, hbm_blocks=60, **options)
    run.ranks[0].report.writing.append((0, 3600.0))
    run.add("tells", prompt(20), 4)
    run.run()
    return run


def writes_paused(configs: Configs) -> Simulation:
    run = paused(configs)
    run.add("waits", prompt(100, 1), 4)
    steps(run, 5)
    run.ranks[0].report.writing.append((0, 0.0))
    return run


SITUATIONS: dict[WaitReason, Callable[[Configs], Simulation]] = {
    WaitReason.ADAPTER: adapter,
    WaitReason.DIGEST: digest,
    WaitReason.HBM: hbm,
    WaitReason.HBM_TURN: hbm_turn,
    WaitReason.RETRY_TURN: retry_turn,
    WaitReason.RETRY_HBM: retry_hbm,
    WaitReason.ELSEWHERE: elsewhere,
    WaitReason.NEW_SLOTS: new_slots,
    WaitReason.SLOTS: slots,
    WaitReason.WRITES_PAUSED: writes_paused,
    WaitReason.SEATS: seats,
}
BESIDE = {WaitReason.HBM_TURN: WaitReason.HBM}
"""A reason that another request has for one to have it."""


@pytest.fixture(scope="module")
def all_configs(configs: Configs, tmp_path_factory: pytest.TempPathFactory) -> Configs:
    model: Path = make_llama(tmp_path_factory.mktemp("model") / "llama", layers=1)
    priority = engine_config(model, "reuse")
    priority.scheduler_config.policy = "priority"
    return {**configs, "priority": priority}


def test_every_reason_has_a_situation() -> None:
    assert set(SITUATIONS) == set(WaitReason)


@pytest.mark.parametrize("reason", SITUATIONS, ids=lambda reason: reason.label)
def test_a_wait_is_counted_once_and_ends(all_configs: Configs, reason: WaitReason) -> None:
    run = SITUATIONS[reason](all_configs)
    waiting = "behind" if reason is WaitReason.HBM_TURN else "waits"
    assert not run.delivered[waiting], "it has not begun"
    others = [BESIDE[reason]] if reason in BESIDE else []
    assert waits(run) == {r.label: 1 for r in (reason, *others)}
    end(run, *(name for name in run.requests if not name.startswith("stored")))


def test_slots_that_never_come_end_the_engine(all_configs: Configs) -> None:
    """The manifest, for which they wait, cannot be saved."""
    run = new_slots(all_configs)
    run.manifest.late = True
    steps(run, 2)
    run.pace.now += page_admission.NEW_SLOTS_DEADLINE_S
    steps(run, 2)
    run.pace.now += 1.0
    with pytest.raises(
        StoreFailedError, match=r"new slots since .* be saved: store\.json: of a test"
    ):
        run.step()


def test_writes_that_never_go_on_cost_the_device_or_end_the_engine(
    all_configs: Configs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that nothing else runs beside waits for a minute."""
    run = paused(all_configs)
    devices = len(run.rebalancer.weights)
    assert devices > 1
    run.add("waits", prompt(100, 1), 4)
    steps(run, 5)
    assert not run.delivered["waits"]
    monkeypatch.setattr(page_admission, "WRITES_DEADLINE_S", 0.0)
    run.run()
    assert run.finished >= {"waits"}, "it goes on with the other devices"
    path = owned(run.ours._parts.store.own).weights.paths[0]
    assert run.ours.counters.total("device_lost", device=path) == 1
    run.ranks[0].report.writing += [(device, 3600.0) for device in range(1, devices)]
    run.add("tells again", prompt(20, 2), 4)
    steps(run, 3)
    run.add("waits for ever", prompt(20, 3), 4)
    with pytest.raises(StoreFailedError, match=r"nothing can be written to .* no other device"):
        steps(run, 10)


def test_reuse_stores_nothing_while_nothing_can_be_written(all_configs: Configs) -> None:
    """Then one block shows that there is room again, and hits are served all the time."""
    run = Simulation(all_configs["reuse"], slots=60, hbm_blocks=60)
    stored(run, prompt(40), prompt(40, 9))
    devices = range(len(run.rebalancer.weights))
    run.ranks[0].report.writing += [(device, 3600.0) for device in devices]
    run.add("tells", prompt(40), 2)
    run.run()
    counters, ready = run.ours.counters, run.index.gauges()["ready"]
    run.add("not stored", prompt(100, 1), 2)
    run.add("a hit", [*prompt(40, 9), 7], 2)
    run.run()
    assert run.index.gauges()["ready"] == ready
    assert counters.total("stores_skipped", cause="writes_paused") > 0
    assert hits(run, "a hit")
    # The pause is over: the next block is the trial, alone.
    run.ranks[0].report.writing += [(device, 1e-6) for device in devices]
    run.add("tries", prompt(100, 2), 2)
    steps(run, 2)
    assert len(run.ours._parts.slots.writing) <= 1
    run.ranks[0].report.writing += [(device, 0.0) for device in devices]
    run.run()
    run.add("stored", prompt(100, 3), 2)
    run.run()
    assert run.index.gauges()["ready"] > ready + 3


def test_who_is_given_up_while_it_waits_is_forgotten(all_configs: Configs) -> None:
    run = slots(all_configs)
    assert run.ours.remembers()["waits"] == 1
    run.abort("waits")
    assert "waits" not in run.ours.remembers()
    end(run, "holds")


ANSWERS = st.one_of(
    st.sampled_from(WaitReason).map(Wait), st.just(Miss()), st.integers(1, 9).map(Hit)
)


@given(st.lists(st.tuples(st.sampled_from("abc"), ANSWERS)))
def test_a_wait_begins_when_the_last_answer_was_another_one(
    answers: list[tuple[str, Match]],
) -> None:
    counters = Counters()
    counter, last = WaitCounter(counters), dict[str, Match]()
    begun = dict.fromkeys(WaitReason, 0)
    for name, answer in answers:
        if isinstance(answer, Wait) and last.get(name) != answer:
            begun[answer.reason] += 1
        last[name] = answer
        counter.answered(name, answer)
    for reason, count in begun.items():
        assert counters.total("waits", reason=reason.label) == count
    assert len(counter) == sum(isinstance(answer, Wait) for answer in last.values())
