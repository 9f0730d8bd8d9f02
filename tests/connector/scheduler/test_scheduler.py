"""The scheduler's half under vLLM's own scheduler, in random orders of events.

Real: vLLM's scheduler and block manager, :class:`SSDKVScheduler`, the index. Simulated: workers,
which compare whatever a request attends to with what its tokens say (``simulation.py``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.config import SpeculativeConfig, VllmConfig

from tests.connector.rank import BLOCK, Pace, Rank
from tests.connector.simulation import (
    STATE,
    STATE_IN_CHUNK,
    Simulation,
    drafts_like,
    engine_config,
)
from tests.e2e.models import make_llama
from vllm_ssdkv.base.errors import StoreFailedError
from vllm_ssdkv.connector.messages import BACKGROUND, Row

RUNS = 25
FAULTS = ("write", "load", "break", "full", "lose", "slow", "cool")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model") / "llama", layers=1)


@pytest.fixture(scope="module", params=["page", "reuse"])
def config(request: pytest.FixtureRequest, model: Path) -> VllmConfig:
    return engine_config(model, request.param)


class Turmoil:
    """One random run: requests come, end, are aborted and preempted while things fail."""

    def __init__(
        self,
        config: VllmConfig,
        seed: int,
        *,
        depth: int,
        faulty: bool,
        slots: tuple[int, ...] = (17, 20, 30, 60),
        drafts: SpeculativeConfig | None = None,
        windows: tuple[int | None, ...] = (None,),
        retention: int | None = None,
        x_share: float = 0.0,
    ):
        self.random = random.Random(seed)
        self.times = random.Random(seed)
        paged = config.kv_transfer_config.kv_connector_extra_config["mode"] == "page"
        config.scheduler_config.policy = self.times.choice(["fcfs", "priority"])
        hbm = [10 if depth > 1 else 8, 12, 24, 40] if paged else [17, 24, 40]
        hbm = [len(windows) * blocks for blocks in hbm]
        self.run = Simulation(
            config,
            depth=depth,
            ranks=self.random.choice([1, 2]),
            slots=self.random.choice(slots),
            hbm_blocks=self.random.choice(hbm),
            pace=self.times.choice([Pace(), Pace(0.001, 0.001), Pace(0.001, 0.1)]),
            drafts=drafts,
            windows=windows,
            retention=retention,
            verify_hits=self.times.choice([0, 1, 2]),
            x_share=x_share,
        )
        for rank in self.run.ranks:
            rank.streams = self.times.random() < 0.5
        self.faults = 6 if faulty else 0
        self.lost = False
        self.full = 3
        """Steps that may still find DRAM full. With the other faults they cannot be more than a
        request survives without getting further."""
        self.aborted: set[str] = set()
        self.prefixes = [[self.random.randrange(3, 500) for _ in range(100)] for _ in range(2)]

    def play(self, events: int) -> None:
        """Let things happen, then let everything end."""
        for number in range(events):
            event = self.random.choices(
                [self.add, self.step, self.io, self.abort, self.preempt, self.fail],
                [4, 10, 6, 1, 0.5, 1],
            )[0]
            event(number)
        for rank in self.run.ranks:
            rank.no_frames = 0
        self.run.run()
        self.run.check_answers(name for name in self.run.requests if name not in self.aborted)
        self.run.check_idle()

    def loaded(self) -> int:
        """Slots of all hits; what is stored under each key belongs there."""
        for slot in (s for rank in self.run.ranks for s in rank.slots.values() if s.key):
            assert slot.symbols == self.run.content[slot.key]
        return sum(len(load.slots) for plan in self.run.plans for load in plan.loads)

    def add(self, number: int) -> None:
        prefix = self.random.choice(self.prefixes)[: self.random.randrange(100)]
        own = [self.random.randrange(3, 500) for _ in range(self.random.randrange(1, 60))]
        self.run.add(str(number), prefix + own, self.random.randrange(1, 40), priority=number % 3)

    def step(self, _: int) -> None:
        for _ in range(self.random.randrange(1, 4)):
            self.run.step()

    def io(self, _: int) -> None:
        self.run.pace.now += self.times.choice([0.0, 20.0])
        for rank in self.run.ranks:
            for _ in range(self.random.randrange(4)):
                rank.end_write(good=True)
            for _ in range(self.random.randrange(2)):
                rank.end_load(True, self.run.hbm, self.run.content)

    def abort(self, _: int) -> None:
        ended = self.aborted | set(self.run.finished)
        alive = [name for name in self.run.requests if name not in ended]
        if alive:
            name = self.random.choice(alive)
            self.aborted.add(name)
            self.run.abort(name)

    def preempt(self, _: int) -> None:
        self.run.preempt_all()

    def fail(self, _: int) -> None:
        if self.faults == 0:
            return
        self.faults -= 1
        rank, kind = self.random.choice(self.run.ranks), self.random.choice(FAULTS)
        if kind == "write":
            rank.end_write(good=False)
        elif kind == "load":
            rank.end_load(False, self.run.hbm, self.run.content)
        elif kind == "break" and rank.slots:
            rank.broken.add(self.random.choice(sorted(rank.slots)))
        elif kind == "full" and self.full:
            steps = self.random.randint(1, self.full)
            rank.no_frames += steps
            self.full -= steps
        elif kind == "slow":
            rank.report.speeds.append((self.random.randrange(2), self.random.choice([0.2, 1.0])))
        elif kind == "cool":
            rank.cold.update(self.random.sample(sorted(rank.slots), len(rank.slots) // 2))
        elif kind == "lose" and not self.lost:
            self.lost = True
            self.run.lose_device(self.random.randrange(2))


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_answers_are_right_and_nothing_leaks(config: VllmConfig, depth: int) -> None:
    for seed in range(RUNS):
        Turmoil(config, seed, depth=depth, faulty=False).play(60)


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_nobody_finds_a_context_that_is_stored_as_x(model: Path, depth: int) -> None:
    """Not the request itself either, after a preemption; what else happens is as ever."""
    config, as_x, loaded = engine_config(model, "page"), 0, 0
    for seed in range(RUNS):
        turmoil = Turmoil(config, seed, depth=depth, faulty=False, x_share=0.5)
        turmoil.play(60)
        saved, found = set[tuple[int, int]](), set[tuple[int, int]]()
        for plan in turmoil.run.plans:
            pairs = zip(plan.save.slots.tolist(), plan.save.epochs.tolist(), strict=True)
            saved |= {pair for pair in pairs if pair[0] in plan.x_slots}
            for load in plan.loads:
                if load.request_id not in BACKGROUND:
                    found |= set(zip(load.slots.tolist(), load.epochs.tolist(), strict=True))
        assert not saved & found
        # Nor does it push out what somebody could find.
        assert not any(turmoil.run.ours.index.holds(*pair) for pair in saved)
        as_x, loaded = as_x + len(saved), loaded + len(found)
    assert as_x > 100
    assert loaded


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_answers_are_right_while_blocks_are_rewritten(config: VllmConfig, depth: int) -> None:
    """A device that is slow, now and then, where there is room to rewrite."""
    rewritten = 0.0
    for seed in range(200, 200 + RUNS):
        turmoil = Turmoil(config, seed, depth=depth, faulty=True, slots=(100, 150))
        turmoil.run.ranks[0].report.speeds.append((seed % 2, 0.2))
        for rank in turmoil.run.ranks:
            rank.report.frames = (8, 30, 1000)[seed % 3]
        try:
            turmoil.play(60)
        except StoreFailedError:
            assert turmoil.lost
        rewritten += turmoil.run.ours.counters.total("blocks_rewritten")
    assert rewritten > 0


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_answers_are_right_while_things_fail(config: VllmConfig, depth: int) -> None:
    for seed in range(100, 100 + RUNS):
        turmoil = Turmoil(config, seed, depth=depth, faulty=True)
        try:
            turmoil.play(60)
        except StoreFailedError:
            # Allowed only when a lost device has left too few slots.
            assert turmoil.lost


@pytest.mark.parametrize("method", ["ngram", "eagle"])
@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_answers_are_right_with_drafts(model: Path, depth: int, method: str) -> None:
    """Also while things fail, and what is stored is never KV of a draft that was rejected."""
    config, right, loaded = engine_config(model, "reuse"), 0, 0
    for seed in range(300, 300 + RUNS):
        turmoil = Turmoil(config, seed, depth=depth, faulty=True, drafts=drafts_like(method))
        turmoil.play(60)
        loaded += turmoil.loaded()
        right += turmoil.run.accepted
    assert right > 0
    assert loaded > 0


def test_answers_are_right_with_drafts_in_page_mode(model: Path) -> None:
    """Blocks are stored a step later than they are computed."""
    config, right, loaded = engine_config(model, "page"), 0, 0
    for seed in range(300, 300 + RUNS):
        turmoil = Turmoil(config, seed, depth=1, faulty=True, drafts=drafts_like("ngram"))
        try:
            turmoil.play(60)
        except StoreFailedError:
            assert turmoil.lost
        loaded += turmoil.loaded()
        right += turmoil.run.accepted
    assert right > 0
    assert loaded > 0


def test_blocks_with_drafts_are_stored_before_they_leave_the_least_window(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poison(self: Rank, row: Row) -> set[int]:
        raise AssertionError(f"a context has a hole, without a fault: {row}")

    monkeypatch.setattr(Rank, "poison", poison)
    config = engine_config(model, "page", hbm_window_tokens=BLOCK)
    for seed in range(RUNS):
        drafts = drafts_like("ngram", BLOCK - 1)
        turmoil = Turmoil(config, seed, depth=1, faulty=False, drafts=drafts)
        turmoil.run.right = 0.98
        turmoil.play(60)
        turmoil.loaded()


def loaded_from(
    model: Path,
    first_seed: int,
    retentions: Sequence[int | None] = (None,),
    **options: Any,  # noqa: ANN401 - of Turmoil
) -> int:
    """Slots of all hits of ``RUNS`` runs in reuse mode in which things fail; retentions in turn."""
    config, loaded = engine_config(model, "reuse"), 0
    for seed in range(first_seed, first_seed + RUNS):
        retention = retentions[seed % len(retentions)]
        turmoil = Turmoil(
            config, seed, faulty=True, slots=(60, 100, 300), retention=retention, **options
        )
        turmoil.play(60)
        loaded += turmoil.loaded()
    return loaded


@pytest.mark.parametrize("drafts", [None, "eagle"])
@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("windows", [(None, 40), (24, None, 3), (40,)])
def test_answers_are_right_with_sliding_windows(
    model: Path, windows: tuple[int | None, ...], depth: int, drafts: str | None
) -> None:
    drafted = drafts_like(drafts) if drafts else None
    assert loaded_from(model, 400, depth=depth, drafts=drafted, windows=windows) > 0


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize(
    "windows",
    [(None, STATE), (STATE, None, STATE), (None, STATE_IN_CHUNK), (24, None, STATE)],
)
def test_answers_are_right_with_states(
    model: Path, windows: tuple[int | None, ...], depth: int
) -> None:
    """Of Mamba layers and the like, which are there at the end of some blocks only."""
    kept = (0, None, 2 * BLOCK)
    assert loaded_from(model, 500, kept, depth=depth, windows=windows) > 0
