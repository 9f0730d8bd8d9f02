"""KV events as a router gets them, in random orders of what happens to a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from vllm.config import VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
    EventPublisherFactory,
)
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import ExternalBlockHash, maybe_convert_block_hash

from tests.connector.events import begin, prompt, stored
from tests.connector.rank import BLOCK
from tests.connector.scheduler.test_scheduler import Turmoil
from tests.connector.simulation import STATE, Simulation, engine_config
from tests.e2e.models import make_llama
from vllm_ssdkv.store.index.journal import Journal
from vllm_ssdkv.store.index.slot_index import SlotIndex

RUNS = 25

Block = tuple[ExternalBlockHash, int]
"""Hash and KV cache group."""

ALIKE = ("block_size", "lora_id", "lora_name")
"""Fields that our events have as vLLM's own of HBM."""


class Router(EventPublisher):
    """Replays what an engine publishes of our media, and checks each event alone."""

    latest: Router

    def __init__(self, data_parallel_rank: int = 0, **_: object):
        super().__init__(data_parallel_rank)
        self.held: dict[str, set[Block]] = {MEDIUM_STORAGE: set(), MEDIUM_CPU: set()}
        self.stored: list[BlockStored] = []
        self.hbm: dict[Block, tuple[object, ...]] = {}
        """Events of vLLM's own, of blocks in HBM."""
        self.removed = 0
        Router.latest = self

    def publish(self, events: EventBatch) -> None:
        for event in events.events:
            held = self.held.get(getattr(event, "medium", ""))
            if held is None:
                if isinstance(event, BlockStored) and is_whole(event):
                    self.hbm.update(told(event))
                continue
            named = [(one, event.group_idx) for one in event.block_hashes]
            if isinstance(event, BlockRemoved):
                assert held.issuperset(named), "what was never stored is removed"
                held.difference_update(named)
                self.removed += len(named)
            else:
                assert isinstance(event, BlockStored)
                assert held.isdisjoint(named), "what is stored is stored again"
                held.update(named)
                self.stored.append(event)
                for block, about in told(event).items():
                    parent, *others = self.hbm.get(block, about)
                    assert others == list(about[1:])
                    assert parent in (about[0], None)  # behind blocks of states that it skips

    def shutdown(self) -> None:
        pass


def is_whole(event: BlockStored) -> bool:
    """Check that tokens go with hashes: of states vLLM tells those of blocks that it skips, too."""
    return len(event.token_ids) == len(event.block_hashes) * event.block_size


def told(event: BlockStored) -> dict[Block, tuple[object, ...]]:
    """Fields of an event for each of its blocks."""
    size, hashes = event.block_size, event.block_hashes
    parents, extra = [event.parent_block_hash, *hashes], event.extra_keys or [None] * len(hashes)
    alike = [getattr(event, name) for name in ALIKE]
    return {
        (one, event.group_idx or 0): (
            parents[at],
            event.token_ids[at * size : (at + 1) * size],
            extra[at],
            *alike,
        )
        for at, one in enumerate(hashes)
    }


EventPublisherFactory.register_publisher("router", Router)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model") / "llama", layers=1)


def with_events(model: Path, mode: str, **options: object) -> VllmConfig:
    config = engine_config(model, mode, **options)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True)
    config.kv_events_config.publisher = "router"
    return config


@pytest.fixture(scope="module", params=["page", "reuse"])
def config(request: pytest.FixtureRequest, model: Path) -> VllmConfig:
    return with_events(model, request.param)


def found(run: Simulation) -> Iterator[tuple[Block, int, dict[str, Any]]]:
    """Every durable block that any request finds, as vLLM names it, its slot, and its event."""
    for name, request in run.requests.items():
        keys = run.ours.keys_of(request)
        run.ours.keys.forget(name)
        for part, (group, end) in enumerate(run._parts()):
            size, own = run.sizes[group], run.ours.groups.keys(keys, part)
            per_hash = min(run.sizes)
            for block, key in enumerate(own):
                slot = run.index.find(key)
                if slot is not None:
                    last = block * BLOCK + end
                    own_tokens = request.all_token_ids[last - size : last]
                    before = (last - size) // per_hash - 1
                    facts = {
                        "token_ids": own_tokens,
                        "block_size": size,
                        "parent_block_hash": None
                        if before < 0
                        else maybe_convert_block_hash(request.block_hashes[before]),
                    }
                    own_hash = request.block_hashes[last // per_hash - 1]
                    yield (maybe_convert_block_hash(own_hash), group), slot, facts


def check(run: Simulation, router: Router, *, whole: bool) -> None:
    """The router's index is the store's; without ``whole`` it may lack some."""
    index = set[Block]()
    facts: dict[tuple[ExternalBlockHash, int | None], dict[str, Any]] = {}
    for block, _, about in found(run):
        index.add(block)
        facts[block] = about
    assert router.held[MEDIUM_CPU] <= index, "blocks in DRAM can be found"
    replayed = router.held[MEDIUM_STORAGE]
    assert replayed == index if whole else replayed <= index
    for event in router.stored:
        (own,) = event.block_hashes
        about = facts.get((own, event.group_idx))
        if about is not None:
            assert {name: getattr(event, name) for name in about} == about


class Steady(Turmoil):
    """Nobody resets the cache, which hides what is stored until somebody asks for it."""

    def preempt(self, _: int) -> None:
        pass


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("resets", [False, True], ids=["steady", "resets"])
def test_the_replayed_index_is_the_stores(config: VllmConfig, depth: int, resets: bool) -> None:
    removed = kept = in_dram = 0
    for seed in range(100, 100 + RUNS):
        turmoil = (Turmoil if resets else Steady)(config, seed, depth=depth, faulty=seed % 2 > 0)
        for rank in turmoil.run.ranks:
            rank.report.frames = 8
        turmoil.play(60)
        check(turmoil.run, Router.latest, whole=not (resets or turmoil.lost))
        in_dram += len(Router.latest.held[MEDIUM_CPU])
        removed += Router.latest.removed
        kept += len(Router.latest.held[MEDIUM_STORAGE])
    assert removed
    assert kept
    assert in_dram


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [((None, 3 * BLOCK), None), ((None, 2 * BLOCK), (BLOCK // 2, BLOCK)), ((None, STATE), None)],
)
def test_groups(
    model: Path, windows: tuple[int | None, ...], sizes: tuple[int, ...] | None
) -> None:
    config, groups = with_events(model, "reuse"), set()
    for seed in range(RUNS):
        turmoil = Steady(config, seed, depth=1, faulty=False, windows=windows, sizes=sizes)
        turmoil.play(60)
        check(turmoil.run, Router.latest, whole=True)
        groups |= {group for _, group in Router.latest.held[MEDIUM_STORAGE]}
    assert groups == set(range(len(windows)))


def test_nobody_is_told_of_what_only_a_choice_finds(model: Path) -> None:
    config = with_events(
        model, "page", selector="bounds", sparse={"exact_below": 32, "budget": 0.5}
    )
    for seed in range(RUNS):
        turmoil = Steady(config, seed, depth=1, faulty=False)
        turmoil.play(60)
        check(turmoil.run, Router.latest, whole=True)


def test_other_weights_hide_everything(config: VllmConfig) -> None:
    run = Simulation(config)
    stored(run, prompt(100), prompt(60, seed=1))
    router = Router.latest
    assert router.held[MEDIUM_STORAGE]
    run.reload(1)
    for seed in (2, 3):  # weights change under the first: it is not stored
        run.add(f"other {seed}", prompt(50, seed=seed), 1)
        run.run()
    check(run, router, whole=True)
    assert len(router.held[MEDIUM_STORAGE]) == 50 // BLOCK


def test_a_reset_hides_everything_until_somebody_asks(config: VllmConfig) -> None:
    run = Simulation(config)
    stored(run, prompt(100))
    router = Router.latest
    before = set(router.held[MEDIUM_STORAGE])
    assert run.scheduler.reset_prefix_cache()
    run.add("other", prompt(BLOCK - 1, seed=2), 1)
    run.run()
    assert not router.held[MEDIUM_STORAGE]
    run.add("asks", prompt(100), 1)
    run.run()
    assert router.held[MEDIUM_STORAGE] == before


def test_a_device_that_is_gone(config: VllmConfig) -> None:
    run = Simulation(config)
    stored(run, prompt(150))
    router = Router.latest
    before = set(router.held[MEDIUM_STORAGE])
    run.lose_device(0)
    run.add("other", prompt(BLOCK - 1, seed=2), 1)
    run.run()
    check(run, router, whole=True)
    assert router.held[MEDIUM_STORAGE] < before


def opened(path: Path) -> SlotIndex:
    return SlotIndex(40, Journal(path, store=UUID(int=1), fingerprint=bytes(16), num_slots=40))


def test_blocks_of_an_earlier_run_are_told_of_when_they_are_asked_for(
    config: VllmConfig, tmp_path: Path
) -> None:
    run = Simulation(config, index=opened(tmp_path / "journal"))
    stored(run, prompt(100))
    before = set(Router.latest.held[MEDIUM_STORAGE])
    assert run.index.close()
    run = Simulation(config, index=opened(tmp_path / "journal"))
    router = Router.latest
    run.add("other", prompt(BLOCK - 1, seed=2), 1)
    run.run()
    assert not router.held[MEDIUM_STORAGE]
    run.add("asks", prompt(100), 1)
    run.run()
    assert router.held[MEDIUM_STORAGE] == before
    check(run, router, whole=True)
    if not run.paged:  # whose windows in HBM are not vLLM's to find
        assert router.hbm.keys() >= router.held[MEDIUM_STORAGE]


def test_dram_is_told_of_as_the_scheduler_believes_it(config: VllmConfig) -> None:
    run = Simulation(config, frames=8)
    begin_with = prompt(20, seed=9)
    run.add("first", begin_with, 1)  # a worker tells of its frames with its first report
    begin(run, "first")
    run.run()
    router = Router.latest
    for seed in range(4):
        run.add(str(seed), prompt(60, seed=seed), 1)
        run.run()
        run.empty_hbm()
        in_dram = {block for block, slot, _ in found(run) if slot in run.choice.resident}
        assert in_dram
        assert router.held[MEDIUM_CPU] == in_dram
    run.add("again", prompt(60, seed=0), 1)
    run.run()
    in_dram = {block for block, slot, _ in found(run) if slot in run.choice.resident}
    assert router.held[MEDIUM_CPU] == in_dram
    assert len(in_dram) < len(router.held[MEDIUM_STORAGE])


def test_a_block_that_is_dropped_before_it_is_durable_is_not_in_dram(model: Path) -> None:
    run = Simulation(with_events(model, "reuse"), frames=8)
    run.add("first", prompt(20, seed=9), 1)  # a worker tells of its frames with its first report
    run.run()
    router, durable = Router.latest, set(Router.latest.held[MEDIUM_STORAGE])
    run.add("asks", prompt(60), 8)
    while router.held[MEDIUM_CPU] <= durable:
        run.step()
    assert router.held[MEDIUM_STORAGE] == durable
    for block, slot, _ in list(found(run)):
        if block not in durable:
            run.ours._parts.slots.drop(slot, "weights")
    run.step()
    assert router.held[MEDIUM_CPU] <= durable
    run.run()


@pytest.mark.parametrize("adapter", [None, LoRARequest("helpful", 1, "/adapter")])
def test_what_a_changed_adapter_computed_is_not_told_of_when_it_is_written(
    model: Path, adapter: LoRARequest | None
) -> None:
    run = Simulation(with_events(model, "reuse"))
    events = run.ours._parts.events
    assert events is not None
    request = run.add("asks", prompt(BLOCK), 1, lora_request=adapter)
    known = events._named(request, run.ours.groups.block(0, 0), 7)
    events._written_soon[7] = events._held_soon[7] = known
    events.hide([1])
    left = {7: known} if adapter is None else {}
    assert events._written_soon == events._held_soon == left


def test_events_name_the_session(model: Path) -> None:
    run = Simulation(with_events(model, "reuse"))
    run.add("asks", prompt(100), 1).session_id = "session"
    run.run()
    assert Router.latest.stored
    assert {event.session_id for event in Router.latest.stored} == {"session"}


def test_nothing_is_told_unless_vllm_publishes(model: Path) -> None:
    run = Simulation(engine_config(model, "reuse"))
    stored(run, prompt(100))
    assert run.scheduler.connector.take_events() == ()
