"""The scheduler's half under vLLM's own scheduler, in random orders of events.

Real: vLLM's scheduler and block manager, :class:`SSDKVScheduler`, the index. Simulated: workers,
which compare whatever a request attends to with what its tokens say (``simulation.py``).
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from tests.connector.events import EXACT_BELOW, Make, begin, end, gauges, hits, prompt, stored
from tests.connector.rank import BLOCK, Pace, Rank
from tests.connector.simulation import (
    CHUNK,
    STATE,
    STATE_IN_CHUNK,
    WINDOW,
    Simulation,
    drafts_like,
    engine_config,
)
from tests.connector.symbols import answer
from tests.e2e.models import make_llama
from vllm_ssdkv.base.errors import StoreFailedError
from vllm_ssdkv.connector.messages import BACKGROUND, PROBE, RankReport, Row
from vllm_ssdkv.connector.scheduler import context_recovery
from vllm_ssdkv.store import own_store
from vllm_ssdkv.store.index.journal import Journal
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.own_store import owned
from vllm_ssdkv.store.unread_slots import RETRY_S

RUNS = 25
FAULTS = ("write", "load", "break", "full", "lose", "slow", "cool", "pause")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model") / "llama", layers=1)


@pytest.fixture(scope="module", params=["page", "reuse"])
def config(request: pytest.FixtureRequest, model: Path) -> VllmConfig:
    return engine_config(model, request.param)


def test_an_engine_that_stores_nothing_looks_at_each_block_once(
    reuse: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = reuse(slots=60, hbm_blocks=60), []
    identities = run.ours._parts.identities
    computes = identities.computes

    def look(request: Request, first: int, stop: int | None, blocks: Sequence[list[int]]) -> None:
        if stop is not None:
            seen.extend(range(first, stop))
        computes(request, first, stop, blocks)

    monkeypatch.setattr(run.ours.policy, "_stores", False)
    monkeypatch.setattr(identities, "computes", look)
    run.add("asks", prompt(100), 40)
    run.run()
    assert seen == list(range((100 + 39) // BLOCK))
    assert not run.index.counters["published"]


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
        x_blocks: int = 2,
        sizes: tuple[int, ...] | None = None,
    ):
        self.random = random.Random(seed)
        self.times = random.Random(seed)
        paged = config.kv_transfer_config.kv_connector_extra_config["mode"] == "page"
        config.scheduler_config.policy = self.times.choice(["fcfs", "priority"])
        hbm = [10 if depth > 1 else 8, 12, 24, 40] if paged else [17, 24, 40]
        parts = sum(BLOCK // size for size in sizes or [BLOCK] * len(windows))
        hbm = [parts * blocks for blocks in hbm]
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
            x_blocks=x_blocks,
            sizes=sizes,
        )
        for rank in self.run.ranks:
            rank.streams = self.times.random() < 0.5
        self.faults = 6 if faulty else 0
        self.lost: list[int] = []
        """Device that was lost, if one was."""
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
        for device in self.lost:  # who needs more slots than the other has waits for it
            self.run.return_device(device)
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
        elif kind == "pause":
            rank.pause_writes()
        elif kind == "lose" and not self.lost:
            self.lost = [self.random.randrange(2)]
            self.run.lose_device(self.lost[0])


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
    assert as_x > 50
    assert loaded


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_slot_of_x_is_full_before_its_first_block_leaves_the_window(
    model: Path, monkeypatch: pytest.MonkeyPatch, depth: int, blocks: int
) -> None:
    """The least window of so many blocks to a slot."""

    def poison(self: Rank, row: Row) -> set[int]:
        raise AssertionError(f"a context has a hole, without a fault: {row}")

    monkeypatch.setattr(Rank, "poison", poison)
    config = engine_config(model, "page", hbm_window_tokens=blocks * BLOCK)
    sizes = set[int]()
    for seed in range(RUNS // 5):
        turmoil = Turmoil(config, seed, depth=depth, faulty=False, x_share=1.0, x_blocks=4)
        turmoil.play(60)
        sizes |= {len(x) for plan in turmoil.run.plans for x in plan.x_slots.values()}
    assert sizes == {blocks}


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_answers_from_x_are_right_while_things_fail(model: Path, depth: int) -> None:
    config, as_x = engine_config(model, "page"), 0
    for seed in range(500, 500 + RUNS // 2):
        share = (0.5, 1.0)[seed % 2]
        # One device alone has room for the longest request.
        turmoil = Turmoil(config, seed, depth=depth, faulty=True, slots=(40, 60), x_share=share)
        turmoil.play(60)
        as_x += sum(len(plan.x_slots) for plan in turmoil.run.plans)
    assert as_x > 50


@pytest.mark.parametrize(("share", "together", "slots"), [(0.0, 1, 9), (1.0, 3, 4)])
def test_x_of_two_blocks_takes_one_slot(
    page: Make, share: float, together: int, slots: int
) -> None:
    """Requests have at most 11 blocks and fill 9: three contexts where one of K and V has room."""
    run, most = page(slots=20, hbm_blocks=60, x_share=share), 0
    for name in range(3):
        run.add(str(name), prompt(150, name), 10)
    while run.scheduler.has_requests():
        run.step()
        most = max(most, len(run.ours.requests))
        run.end_io()
    assert most == together
    assert run.index.counters["allocated"] == 3 * slots
    run.run()
    run.check_answers(["0", "1", "2"])
    run.check_idle()


def test_a_hit_that_only_x_has_room_beside_is_computed_as_x(page: Make) -> None:
    run, known = page(slots=20, hbm_blocks=60, x_share=0.0), prompt(150)
    cached = {}
    for name, share, others in (("first", 0.0, 0), ("alone", 1.0, 0), ("crowded", 1.0, 2)):
        run.ours.policy.x_admission.share = share
        for other in range(others):
            run.add(f"other {other}", prompt(150, 1 + other), 30)
            run.step()
        run.add(name, known, 10)
        run.run()
        cached[name] = run.began[name]
    assert cached == {"first": 0, "alone": 9 * BLOCK, "crowded": 0}
    run.check_answers(cached)
    run.check_idle()


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


@pytest.mark.parametrize("drafts", [None, "eagle"])
@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("windows", "sizes"),
    [((40, None), (16, 8)), ((None, 20, 40), (16, 8, 4)), ((40, None, None), (8, 8, 16))],
)
def test_answers_are_right_with_blocks_of_several_sizes(
    model: Path,
    windows: tuple[int | None, ...],
    sizes: tuple[int, ...],
    depth: int,
    drafts: str | None,
) -> None:
    drafted = drafts_like(drafts) if drafts else None
    options: Any = {"depth": depth, "drafts": drafted, "windows": windows, "sizes": sizes}
    assert loaded_from(model, 600, **options) > 0


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_answers_are_right_with_states_in_smaller_blocks(model: Path, depth: int) -> None:
    options: Any = {"depth": depth, "windows": (None, STATE, 24), "sizes": (16, 8, 8)}
    assert loaded_from(model, 700, (0, None, 2 * BLOCK), **options) > 0


# ---- choice between loading a hit and computing it ----


def ask_again(run: Simulation, tokens: list[int], times: int) -> list[int]:
    """Blocks that were loaded each time a stored prompt was asked for again."""
    loaded = []
    for _ in range(times):
        name = str(len(run.requests))
        run.add(name, tokens, 4)
        run.run()
        run.check_answers([name])
        run.check_idle()
        assert run.scheduler.reset_prefix_cache()
        loaded.append(sum(hits(run, name)))
    return loaded


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_hits_on_a_slow_drive_are_computed_after_the_first(
    reuse: Make, depth: int, ranks: int
) -> None:
    run = reuse(pace=Pace(token_s=0.001, block_s=1.0), depth=depth, ranks=ranks)
    stored(run, prompt(100))
    allocated = run.index.counters["allocated"]
    assert ask_again(run, prompt(100), 4) == [6, 0, 0, 0]
    assert run.ours.counters.total("hit_tokens_computed") == 3 * 6 * BLOCK
    assert run.index.counters["allocated"] == allocated, "what is stored is not stored again"


def test_hits_on_a_fast_drive_are_loaded(reuse: Make) -> None:
    run = reuse(pace=Pace(token_s=0.001, block_s=0.0001))
    stored(run, prompt(100))
    assert ask_again(run, prompt(100), 4) == [6, 6, 6, 6]
    assert run.ours.counters.total("hit_tokens_computed") == 0


def test_page_mode_loads_in_any_case(page: Make) -> None:
    run = page(pace=Pace(token_s=0.001, block_s=1.0))
    stored(run, prompt(100))
    assert ask_again(run, prompt(100), 3) == [6, 6, 6]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_drive_that_is_fast_again_is_used_again(reuse: Make, depth: int) -> None:
    run = reuse(pace=Pace(token_s=0.001, block_s=1.0), depth=depth)
    stored(run, prompt(100))
    assert ask_again(run, prompt(100), 2) == [6, 0]
    run.pace.block_s = 0.0001
    loaded = []
    for _ in range(5):
        run.pace.now += 60.0
        loaded += ask_again(run, prompt(100), 1)
    computed = loaded.count(0)
    assert 1 <= computed <= 2
    assert loaded == [0] * computed + [6] * (5 - computed)
    probes = [load for plan in run.plans for load in plan.loads if load.request_id == PROBE]
    assert len(probes) == run.ours.counters.total("load_probes") == computed
    assert not any(load.block_ids.any() for load in probes), "a probe touches no block of HBM"
    assert not any(load.whole for load in probes), "and needs no frames for longer"


def test_a_probe_that_finds_bad_bytes_drops_them(reuse: Make) -> None:
    run = reuse(pace=Pace(token_s=0.001, block_s=1.0))
    stored(run, prompt(100))
    assert ask_again(run, prompt(100), 2) == [6, 0]
    run.pace.now += 60.0
    run.ranks[0].broken.update(run.ranks[0].slots)
    assert ask_again(run, prompt(100), 1) == [0]
    assert run.ours.counters.total("slots_dropped", cause="read_error") >= 1


# ---- loads that fail ----


def test_a_hit_that_is_attended_to_as_a_whole_is_said_to_be(page: Make, sparse: Make) -> None:
    """Such a hit is worth frames for all of its blocks: others read only what they choose."""
    short, long = prompt(EXACT_BELOW - 1), prompt(EXACT_BELOW, seed=1)
    for make, wanted in ((page, [True, True]), (sparse, [True, False])):
        run = make()
        stored(run, short, long)
        for name, tokens in (("short", short), ("long", long)):
            run.add(name, tokens, 4)
            end(run, name)
        loads = [load for plan in run.plans for load in plan.loads]
        assert [load.whole for load in loads] == wanted


# ---- the scheduler's half in single events, each with what must follow; see ``simulation.py`` ----


ONE_REQUEST = -(-(WINDOW - 1 + CHUNK) // BLOCK) + 1
"""HBM blocks that page mode needs for one request, whatever its length."""

# ---- admission ----


@pytest.mark.parametrize(("slots", "together"), [(17, 1), (22, 2), (32, 2), (33, 3)])
def test_requests_wait_for_slots(page: Make, slots: int, together: int) -> None:
    run = page(slots=slots, hbm_blocks=40)
    for name in "abc":
        run.add(name, prompt(150, ord(name)), 20)  # 11 slots each
    most = 0
    while run.scheduler.has_requests():
        run.step()
        run.end_io()
        most = max(most, len(run.scheduler.running))
    assert most == together
    end(run, *"abc")


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_who_reads_no_prefix_cache_waits_too(page: Make, depth: int) -> None:
    """vLLM does not listen to a connector that has such a request wait."""
    run = page(slots=20, hbm_blocks=60, depth=depth)
    for name in "abcd":
        run.add(name, prompt(150, ord(name)), 40, sampling={"prompt_logprobs": 1})
    run.abort("c")
    end(run, *"abd")
    assert run.ours.counters.total("slot_waits") > 0


def test_what_was_reserved_and_not_used_is_given_back(page: Make) -> None:
    run = page(slots=40)
    run.add("a", prompt(20), 200)
    run.step()
    assert run.index.gauges()["reserved"] > 10
    run.abort("a")
    run.run()
    run.check_idle()


def test_a_session_may_outgrow_its_reservation(page: Make) -> None:
    run = page(slots=40)
    session = run.add("a", prompt(40), 4, resumable=True)
    for _ in range(10):
        run.step()
        run.end_io()
    assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    more = Request("a", prompt(150, 1), session.sampling_params, None, resumable=True)
    run.scheduler.add_request(more)
    for _ in range(12):
        run.step()
        run.end_io()
    assert session.num_computed_tokens > 40 + 150
    run.abort("a")
    run.run()
    run.check_idle()


# ---- sharing ----


def test_two_that_run_with_one_prompt_store_it_once(page: Make) -> None:
    run = page(slots=60, hbm_blocks=40)
    tokens = prompt(128)
    run.add("a", tokens, 4)
    run.step()
    run.add("b", tokens, 4)
    end(run, *"ab")
    # The block in which their answers end belongs to both as well.
    assert run.index.counters["allocated"] <= 9


def test_a_prompt_is_stored_once_in_reuse_mode(reuse: Make) -> None:
    run = reuse(slots=60, hbm_blocks=60)
    for name in "abc":
        run.add(name, prompt(128), 4)
    end(run, *"abc")
    assert run.index.counters["allocated"] == 8


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stored_prompt_hits(page: Make, reuse: Make, depth: int) -> None:
    for make in (page, reuse):
        run = make(depth=depth)
        stored(run, prompt(100))
        run.add("a", prompt(100), 4)
        run.add("b", prompt(64) + prompt(9, 1), 4)
        end(run, *"ab")
        assert (hits(run, "a"), hits(run, "b")) == ([6], [4])


@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_decoded_is_stored(page: Make, reuse: Make, depth: int) -> None:
    for make in (page, reuse):
        run = make(depth=depth)
        request = run.add("a", prompt(40), 100)
        end(run, "a")
        assert len(run.index.lookup(run.ours.keys_of(request))) == (40 + 99) // BLOCK


def test_what_is_still_being_loaded_is_nobody_elses(page: Make) -> None:
    """Workers know the checksums of a context when it has arrived."""
    run = page(slots=60, hbm_blocks=40)
    stored(run, prompt(150))
    run.add("hit", prompt(150), 4)
    run.step()
    other = run.add("computed", prompt(150), 4)
    other.skip_reading_prefix_cache = True
    theirs = {slot for plan in run.plans for load in plan.loads for slot in load.slots.tolist()}
    assert len(theirs) > 4
    for _ in range(3):
        run.step()
    assert run.ours.requests["computed"].slots
    assert not theirs & set(run.ours.requests["computed"].slots)
    end(run, "hit", "computed")


def test_salts_keep_prompts_apart(reuse: Make) -> None:
    run = reuse()
    for name, salt in (("a", None), ("b", "x"), ("c", "y"), ("d", "x")):
        run.add(name, prompt(100), 4, cache_salt=salt)
        run.run()
        run.scheduler.reset_prefix_cache()
    end(run, *"abcd")
    assert [hits(run, name) for name in "abcd"] == [[], [], [], [6]]


def test_keys_of_a_part(reuse: Make) -> None:
    run = reuse()
    request = run.add("a", prompt(100), 1)
    keys = run.ours.keys_of(request)
    assert len(keys) == 6
    assert run.ours.keys_of(request, 4, 1) == keys[1:4]
    assert run.ours.keys_of(request, 99, 5) == keys[5:]


# ---- writes that fail ----


def test_a_failed_write_is_never_found(page: Make, reuse: Make) -> None:
    for make in (page, reuse):
        run = make(slots=60)
        run.add("a", prompt(100), 4)
        run.step()
        for rank in run.ranks:
            rank.end_write(good=True)
            rank.end_write(good=False)
        run.run()
        run.scheduler.reset_prefix_cache()
        run.add("b", prompt(100), 4)
        end(run, *"ab")
        # The first block, then the hole.
        assert hits(run, "b") == [1]
        assert run.ours.counters.total("slots_dropped", cause="write_error") == 1


def test_one_rank_that_fails_fails_the_slot(reuse: Make) -> None:
    run = reuse(slots=60, ranks=2)
    run.add("a", prompt(40), 4)
    run.step()
    first, second = run.ranks
    first.end_write(good=True)
    run.step()
    assert not run.index.counters["dropped"]
    second.end_write(good=False)
    run.run()
    run.scheduler.reset_prefix_cache()
    run.add("b", prompt(40), 4)
    end(run, *"ab")
    assert hits(run, "b") == []


def test_what_finds_no_room_in_dram_is_skipped(reuse: Make) -> None:
    run = reuse(slots=60)
    run.ranks[0].no_frames = 1000
    run.add("a", prompt(100), 4)
    run.run()
    run.ranks[0].no_frames = 0
    assert run.index.gauges()["ready"] == 0
    end(run, "a")


def test_page_mode_starts_again_when_a_block_was_not_held(page: Make) -> None:
    run = page(slots=60)
    run.add("a", prompt(100), 20)
    run.step()
    run.ranks[0].no_frames = 1
    run.step()
    assert not run.ranks[0].no_frames
    end(run, "a")
    assert run.ours.counters.total("recomputed_requests", cause="context") == 1


def test_page_mode_gives_up_where_nothing_can_be_held(
    page: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_recovery, "LOST_S", 0.0)
    run = page(slots=60)
    run.add("a", prompt(100), 20)
    run.ranks[0].no_frames = 1000
    with pytest.raises(StoreFailedError, match="request a was lost 8 times in a row"):
        run.run()
    assert run.ours.counters.total("recomputed_requests", cause="context") == 9


# ---- contexts that cannot be read ----


@pytest.mark.parametrize("depth", [1, 2])
def test_a_context_with_a_bad_slot_is_computed_again(page: Make, depth: int) -> None:
    run = page(slots=60, depth=depth)
    run.add("a", prompt(150), 30)
    while len(run.delivered["a"]) < 10:
        run.step()
        run.end_io()
    slot = run.ranks[0].contexts["a"][2]
    run.ranks[0].broken.add(slot)
    # Every token that is delivered is a right one, those of steps under way included.
    right = answer(prompt(150), 30)
    while run.scheduler.has_requests():
        run.step()
        run.end_io()
        assert run.delivered["a"] == right[: len(run.delivered["a"])]
    end(run, "a")
    assert run.ours.counters.total("recomputed_requests", cause="context") == 1
    # It went on from the two blocks before the bad one.
    assert hits(run, "a") == [2]


def test_only_the_request_with_the_bad_slot_is_sent_back(page: Make) -> None:
    run = page(slots=60, hbm_blocks=40)
    run.add("a", prompt(150, 1), 30)
    run.add("b", prompt(150, 2), 30)
    begin(run, "b")
    run.ranks[0].broken.add(run.ranks[0].contexts["b"][1])
    end(run, *"ab")
    assert run.requests["a"].num_preemptions == 0
    assert run.requests["b"].num_preemptions == 1


def test_a_reset_of_the_cache_frees_slots_to_be_trimmed(reuse: Make) -> None:
    run = reuse(slots=60, on_reset="forget")
    stored(run, prompt(100))
    assert all(plan.trim is None for plan in run.plans)
    assert run.ours.reset()
    run.add("a", prompt(20), 4)
    plan = run.step()
    assert plan is not None
    assert plan.trim is not None
    assert sorted(plan.trim.tolist()) == list(range(60))
    end(run, "a")
    assert run.plans[-1].trim is None


@pytest.mark.parametrize("mode", ["page", "reuse"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_load_is_tried_once_more(
    configs: dict[str, VllmConfig], mode: str, depth: int
) -> None:
    run = Simulation(configs[mode], depth=depth)
    stored(run, prompt(100))
    run.add("a", prompt(100), 4)
    while not run.ranks[0].loads:
        run.step()
    run.ranks[0].broken.add(int(run.ranks[0].loads[0].slots[3]))
    end(run, "a")
    # Of the second load there are the blocks before the bad one.
    assert hits(run, "a") == [6, 3]
    assert run.ours.counters.total("recomputed_requests", cause="hit") == 1


@pytest.mark.parametrize("mode", ["page", "reuse"])
def test_loads_that_keep_failing_are_given_up(configs: dict[str, VllmConfig], mode: str) -> None:
    run = Simulation(configs[mode])
    stored(run, prompt(100))
    run.add("a", prompt(100), 4)
    for _ in range(20):
        run.step()
        for rank in run.ranks:
            rank.end_load(False, run.hbm, run.content)
    end(run, "a")
    assert len(hits(run, "a")) == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_load_in_an_hbm_for_one(page: Make, depth: int) -> None:
    """vLLM keeps the blocks of the failed load reserved; they must not keep the request out."""
    blocks = ONE_REQUEST + 1 + (depth - 1) * CHUNK // BLOCK
    run = page(depth=depth, hbm_blocks=blocks, slots=17)
    stored(run, prompt(150))
    run.add("a", prompt(150), 20)
    run.add("b", prompt(150) + prompt(20, 1), 20)
    while not run.ranks[0].loads:
        run.step()
    run.ranks[0].end_load(False, run.hbm, run.content)
    end(run, *"ab")


def test_a_failed_load_in_front_of_one_that_holds_hbm(page: Make) -> None:
    """vLLM looks at nobody behind a request that does not fit."""
    run = page(hbm_blocks=ONE_REQUEST + 3, slots=60)
    stored(run, prompt(130, 1), prompt(64, 2))
    run.add("a", prompt(130, 1) + prompt(60, 3), 20)
    run.add("b", prompt(64, 2) + prompt(60, 4), 20)
    while len(run.ranks[0].loads) < 2:
        run.step()
    run.ranks[0].end_load(False, run.hbm, run.content)
    end(run, *"ab")


def test_loads_leave_room_to_go_on(page: Make) -> None:
    """Loads are admitted only while one of them can still compute its next chunk."""
    run = page(hbm_blocks=ONE_REQUEST + 3, slots=80)
    known = [prompt(112, seed) for seed in range(4)]
    stored(run, *known)
    for name, tokens in zip("abcd", known, strict=True):
        run.add(name, tokens + prompt(60, ord(name)), 20)
    end(run, *"abcd")
    assert all(hits(run, name) == [7] for name in "abcd")


def test_a_request_that_is_given_up_while_it_loads(page: Make, reuse: Make) -> None:
    for make in (page, reuse):
        for good in (True, False):
            run = make()
            stored(run, prompt(100))
            run.add("a", prompt(100), 4)
            run.step()
            run.abort("a")
            run.step()
            # The load still writes to HBM, so its slots stay.
            assert run.index.gauges()["pinned"] >= 6
            for rank in run.ranks:
                rank.end_load(good, run.hbm, run.content)
            run.run()
            run.check_idle()


# ---- devices ----


def test_a_lost_device_takes_its_slots_along(page: Make) -> None:
    run = page(slots=60)
    run.add("a", prompt(150), 30)
    begin(run, "a")
    run.lose_device(0)
    run.step()
    steps = len(run.plans)
    end(run, "a")
    gauges = run.index.gauges()
    assert gauges["lost"] + gauges["masked"] == 30
    run.add("b", prompt(150), 4)
    end(run, "b")
    handed_out = np.concatenate([plan.save.slots for plan in run.plans[steps:]])
    assert len(handed_out)
    # Each was on the other device when it was written: the workers look.
    assert (1,) in {segment.lanes for segment in run.placement.segments}


def test_a_slow_device_gets_less_of_what_is_stored_later(page: Make) -> None:
    run = page(slots=60, ranks=2)
    run.add("a", prompt(150), 30)
    end(run, "a")
    run.ranks[0].report.speeds.append((1, 0.5))
    run.ranks[1].report.speeds.append((1, 0.2))
    run.add("b", prompt(100), 30)
    end(run, "b")
    assert gauges(run)["device_share|device=device1"] == pytest.approx(1 / 6)
    shares = {s.lanes.count(1) / len(s.lanes) for s in run.placement.segments}
    assert min(shares) == pytest.approx(1 / 6)
    for rank in run.ranks:
        rank.report.speeds.append((1, 1.0))
    run.add("c", prompt(100), 2)
    end(run, "c")
    assert gauges(run)["device_share|device=device1"] == 0.5


def test_a_store_too_small_to_spare_a_slow_device_does_not(page: Make) -> None:
    """A share of a fifth would leave ten of seventeen slots; requests need eleven."""
    run = page(slots=17)
    run.ranks[0].report.speeds.append((0, 0.2))
    run.add("a", prompt(20), 4)
    end(run, "a")
    assert run.rebalancer.weights == [0.2, 1.0]
    for name in "bcd":  # segments are striped anew one after the other
        run.add(name, prompt(150, ord(name)), 20)
        end(run, name)
    assert run.rebalancer.weights == [1.0, 1.0]
    assert run.rebalancer.placement.slots == 17
    run.ranks[0].report.speeds.append((0, 0.5))  # known, and no help
    run.add("e", prompt(150), 20)
    end(run, "e")
    assert run.rebalancer.weights == [1.0, 1.0]


def test_a_store_that_can_serve_nobody_says_so(page: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """When nobody waits any more for the device to come back."""
    monkeypatch.setattr(own_store, "RETURN_S", 0.0)
    run = page(slots=20)
    run.lose_device(1)
    run.add("a", prompt(20), 4)
    end(run, "a")  # needs two slots, ten are left
    run.add("b", prompt(200), 20)
    with pytest.raises(StoreFailedError, match="device1") as caught:
        run.run()
    assert "needs 14 slots, 10 can be had" in str(caught.value)
    assert "Replace them and restart" in str(caught.value)


# ---- the end of things ----


def test_preempted_and_resumed_in_one_step(page: Make) -> None:
    run = page(slots=60)
    run.add("a", prompt(150), 30)
    while len(run.delivered["a"]) < 5:
        run.step()
        run.end_io()
    run.preempt_all()
    run.step()
    assert run.requests["a"].num_preemptions == 1
    end(run, "a")
    assert hits(run, "a") == [9]


@pytest.mark.parametrize("on_reset", ["keep", "forget"])
@pytest.mark.parametrize("told", [False, True], ids=["HBM alone", "connector too"])
@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_a_reset_hides_the_store_until_weights_are_digested(
    page: Make, reuse: Make, on_reset: str, told: bool, depth: int
) -> None:
    for make in (page, reuse):
        run = make(on_reset=on_reset, depth=depth, ranks=2)
        stored(run, prompt(100))
        assert run.scheduler.reset_prefix_cache(reset_connector=told)
        forgotten = told and on_reset == "forget"
        assert run.index.gauges()["ready"] == (0 if forgotten else 6)
        run.step()
        assert all(rank.resets == 0 for rank in run.ranks), "nobody computes: weights may be away"
        run.add("a", prompt(100), 4)
        end(run, "a")
        assert all(rank.resets >= 1 for rank in run.ranks)
        run.empty_hbm()
        run.add("b", prompt(100), 4)
        end(run, "b")
        assert (hits(run, "a"), hits(run, "b")) == ([] if forgotten else [6], [6])
        dropped = run.rebalancer._counters.total("slots_dropped", cause="reset")
        assert dropped == (6 if forgotten else 0)


def test_requests_compute_where_no_digest_comes(reuse: Make) -> None:
    """A rank that does not tell keeps the store hidden, and nobody waits for it for long."""
    run = reuse()
    stored(run, prompt(100))
    assert run.scheduler.reset_prefix_cache()
    run.ranks[0].resets = 1  # it takes the digest for taken, and tells of none
    run.add("a", prompt(120), 4)
    end(run, "a")
    run.empty_hbm()
    run.add("b", prompt(120), 4)
    end(run, "b")
    assert hits(run, "a") == hits(run, "b") == []
    assert run.index.gauges()["ready"] == 6, "nothing is stored"


@pytest.mark.parametrize("on_reset", ["keep", "forget"])
def test_a_reset_beside_a_load(page: Make, reuse: Make, on_reset: str) -> None:
    """vLLM cannot reset HBM then. The load goes on, and nothing raises or hangs."""
    for make in (page, reuse):
        run = make(on_reset=on_reset)
        stored(run, prompt(100))
        run.add("a", prompt(100), 4)
        run.step()
        assert run.ranks[0].loads
        assert not run.scheduler.reset_prefix_cache(reset_connector=True)
        assert run.ours.reset(), "the connector has been reset"
        end(run, "a")
        assert run.began["a"] == 96


@pytest.mark.parametrize("on_reset", ["keep", "forget"])
@pytest.mark.parametrize("reset", ["no", "before", "after"])
def test_a_restart_finds_what_was_durable(
    reuse: Make, tmp_path: Path, reset: str, on_reset: str
) -> None:
    def index() -> SlotIndex:
        journal = Journal(
            tmp_path / "journal", store=UUID(int=1), fingerprint=bytes(16), num_slots=40
        )
        return SlotIndex(40, journal)

    run = reuse(index=index(), on_reset=on_reset)
    if reset == "before":
        assert run.scheduler.reset_prefix_cache(reset_connector=True)
    stored(run, prompt(100))
    if reset == "after":
        assert run.scheduler.reset_prefix_cache(reset_connector=True)
    run.ours.close()
    again = reuse(index=index())
    again.ranks = run.ranks
    again.content = run.content
    again.add("a", prompt(100), 4)
    end(again, "a")
    assert hits(again, "a") == ([] if (reset, on_reset) == ("after", "forget") else [6])
    again.ours.close()


def test_all_blocks_of_a_report_are_one_write(reuse: Make, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", store=UUID(int=1), fingerprint=bytes(16), num_slots=40)
    run = reuse(index=SlotIndex(40, journal))
    stored(run, prompt(100))
    counters = journal.counters
    assert counters["appended_records"] == 6
    assert counters["writes"] < 6
    run.ours.close()


def test_the_engine_keeps_stepping_until_writes_are_known(reuse: Make) -> None:
    run = reuse()
    run.add("a", prompt(100), 1)
    while "a" not in run.finished:
        run.step()
    assert run.ours.unfinished()
    assert run.scheduler.has_requests()
    run.end_io()
    for _ in range(3):
        run.step()
    assert not run.ours.unfinished()
    assert not run.scheduler.has_requests()


@pytest.mark.parametrize("depth", [1, 2])
def test_who_is_kept_while_the_engine_is_paused_asks_for_no_steps(
    page: Make, reuse: Make, depth: int
) -> None:
    for make in (page, reuse):
        run = make(depth=depth)
        for name in "ab":
            run.add(name, prompt(100, ord(name)), 50)
        for _ in range(6):
            run.step()
        run.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for _ in range(8):
            run.step()
            run.end_io()
        assert run.ours.requests
        assert not run.ours.unfinished()
        run.scheduler.set_pause_state(PauseState.UNPAUSED)
        end(run, *"ab")


# ---- slots that could not be read ----


@pytest.mark.parametrize("mode", ["page", "reuse"])
def test_a_load_that_failed_takes_nothing_from_the_store(
    page: Make, reuse: Make, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request computes what could not be read, and others find it all when it can."""
    run = {"page": page, "reuse": reuse}[mode](slots=60, ranks=2)
    stored(run, prompt(100))
    keys = run.ours.keys_of(run.requests["stored 0"])
    before = run.index.lookup(keys).tolist()
    assert len(before) == 6
    run.ranks[1].failing.add(before[2])
    run.add("b", prompt(100), 1)
    end(run, "b")
    assert hits(run, "b") == [6, 2], "one try of all, and one of what is still found"
    run.ranks[1].failing.clear()
    now = time.monotonic() + RETRY_S
    monkeypatch.setattr(owned(run.ours._parts.store.own).unread, "_clock", lambda: now)
    run.empty_hbm()
    run.add("c", prompt(100), 1)
    end(run, "c")
    assert hits(run, "c") == [6]
    assert run.ours.counters.total("slots_dropped", cause="read_error") == 0
    assert run.index.gauges()["masked"] == 0


def test_a_context_that_could_not_be_read_takes_nothing_from_the_store(page: Make) -> None:
    """It is computed again from the block on that could not be read: there is no second failure."""
    run = page(slots=60)
    run.add("a", prompt(100), 30)
    begin(run, "a")
    run.end_io()
    run.step()
    rank = run.ranks[0]
    rank.failing.add(rank.contexts["a"][1])
    end(run, "a")
    assert run.ours.counters.total("slots_dropped", cause="read_error") == 0
    assert run.ours.counters.total("recomputed_requests", cause="context") == 1
    assert len(run.index.lookup(run.ours.keys_of(run.requests["a"]))) >= 6


# ---- slots that the scrub found bad ----


def test_a_bad_slot_is_dropped_once_whoever_tells(reuse: Make) -> None:
    run = reuse(slots=60, ranks=2)
    keys = run.ours.keys_of(run.add("a", prompt(100), 4))
    run.run()
    stored = run.index.lookup(keys).tolist()
    assert len(stored) == 6
    slot, epoch = stored[2], run.index.epoch(stored[2])
    # The scrub of each rank, a load, and one that read the slot's last life.
    run.ours.reported(
        [
            (0, RankReport(bad=[(slot, epoch), (stored[3], run.index.epoch(stored[3]) - 1)])),
            (1, RankReport(bad=[(slot, epoch), (slot, -1)])),
        ],
        (),
    )
    assert run.ours.counters.total("slots_dropped", cause="read_error") == 1
    assert run.index.gauges()["ready"] == 5
    # Whoever told of it hears that it was stored; nobody hears so of a copy in an old life.
    mended = [(0, RankReport(mended=[(stored[0], 1), (stored[1], 9)]))]
    run.ours.reported(mended, ())
    plan = run.ours.plan(SchedulerOutput.make_empty())
    assert plan.believed == [(slot, epoch), (stored[0], 1)]
    for rank in run.ranks:
        rank.broken.add(slot)
    run.scheduler.reset_prefix_cache()
    run.add("b", prompt(100), 4)
    end(run, *"ab")
    assert hits(run, "b") == [2]


# ---- loads for models with sliding windows or states, in HBM that has room for few; see ----


LONG = 160
"""Tokens of a hit that is longer than what vLLM lets a window's group hold at a time."""


@pytest.mark.parametrize(
    ("windows", "blocks", "depth", "count"),
    [
        ((None, 8, 8, 8, 8, 8), 44, 1, 2),
        ((None, 8, 8, 8, 8, 8), 48, 1, 3),
        ((None, 8, 8, 8, 8, 8), 58, 2, 3),
        ((None, 8, 8, 8, 8, 8), 62, 2, 4),
        ((None, 8, 8, 8, 8, 8), 200, 2, 4),
        ((8,), 6, 1, 4),
        ((8,), 7, 1, 4),
    ],
)
def test_requests_that_are_loaded_can_go_on(
    reuse: Make, windows: tuple[int | None, ...], blocks: int, depth: int, count: int
) -> None:
    run = reuse(windows=windows, hbm_blocks=blocks, depth=depth, slots=600)
    heads = [prompt(LONG, seed) for seed in range(count)]
    stored(run, *[[*head, 5] for head in heads])
    for number, head in enumerate(heads):
        run.add(str(number), head + prompt(48, 30 + number), 2)
    end(run, *map(str, range(count)))
    whole = LONG // BLOCK
    windows_only = 1 if windows[0] else whole + (len(windows) - 1)
    for number in range(count):
        assert hits(run, str(number)) == [windows_only]


@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_overtakes_a_request_that_waits_for_room(reuse: Make, depth: int) -> None:
    """However many small ones come behind it."""
    run = reuse(windows=(None, 8), hbm_blocks=26, depth=depth, slots=3000)
    head = prompt(LONG)
    stored(run, [*head, 5])

    def small() -> None:
        number = len(run.requests)
        run.add(f"small {number}", prompt(40, 100 + number), 30 + 7 * (number % 5))

    for _ in range(3):
        small()
    for _ in range(6):
        run.step()
        run.end_io()
    run.add("big", head + prompt(40, 7), 2)
    before = len(run.requests)
    while "big" not in run.finished:
        if len(run.scheduler.requests) < 6:
            small()
        run.step()
        run.end_io()
        assert len(run.requests) < before + 20, "it waits for ever"
    end(run, *[name for name in run.requests if not name.startswith("stored")])


def test_a_request_that_shares_blocks_with_another_is_loaded_beside_it(reuse: Make) -> None:
    run = reuse(windows=(None, 8), hbm_blocks=24, slots=3000)
    head = prompt(LONG)
    stored(run, [*head, *prompt(16, 1), 5], [*head, *prompt(16, 2), 5])
    run.add("a", head + prompt(8, 3), 60)
    for _ in range(8):
        run.step()
        run.end_io()
    run.add("b", [*head, *prompt(16, 2), 9, 9], 4)
    while "b" not in run.finished:
        assert "a" not in run.finished
        run.step()
        run.end_io()
    end(run, "a", "b")


def test_a_state_that_only_hbm_has_is_stored_when_it_is_used(reuse: Make) -> None:
    """Here it was lost, or evicted; or a first use was not worth a write."""
    run = reuse(windows=(None, STATE, STATE), hbm_blocks=80, slots=300, retention=0)
    head = prompt(100)
    run.add("a", head, 2)
    run.run()
    run.index.drop(run.index.lookup(run.ours.groups.keys(run.ours.keys_of(run.requests["a"]), 0)))
    for group in (1, 2):
        for key in run.ours.groups.keys(run.ours.keys_of(run.requests["a"]), group):
            if (slot := run.index.find(key)) is not None:
                run.index.drop(np.array([slot]))
    run.add("b", [*head, 7, 8, 9], 2)
    run.run()
    assert hits(run, "b") == [], "it was in HBM"
    assert run.scheduler.reset_prefix_cache()
    run.add("c", [*head, 10], 2)
    end(run, "a", "b", "c")
    whole = 100 // BLOCK
    assert hits(run, "c") == [whole + 2]


def test_a_load_that_failed_waits_for_no_more_than_it_needs(reuse: Make) -> None:
    """A request holds few blocks of a group with a state, whatever its length."""
    run = reuse(windows=(None, STATE, STATE, STATE), hbm_blocks=33, slots=400, retention=0)
    head = prompt(100)
    stored(run, head)
    run.add("long", prompt(20, 5), 120)
    for _ in range(4):
        run.step()
        run.end_io()
    run.add("b", head, 2)
    while not run.ranks[0].loads:
        run.step()
    run.ranks[0].end_load(False, run.hbm, run.content)
    while "b" not in run.finished:
        assert "long" not in run.finished
        run.step()
        run.end_io()
    end(run, "long", "b")
