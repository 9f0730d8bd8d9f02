"""Requests that choose their selectors, in one batch: each gets what it would get alone, also when
they are preempted or given up and when devices fail under them.

A budget of everything makes a selector's tokens those of stock vLLM, although every page of the
context is chosen, fetched and attended to by itself. Tokens of a smaller budget are compared with
those of the request alone; where it is computed again, what it had decoded before is not the same
KV (docs/internals/page-mode.md), so there only its length is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.bench import Bench
from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import kv_tokens, page_mode
from tests.kit.engine import MAX_TOKENS, Engine, Tokens
from tests.kit.waiting import until
from tests.store.unhurried import open_unhurried_engines
from vllm_ssdkv.connector import active_worker
from vllm_ssdkv.store.cache.frames import NO_FRAME

WINDOW, CHUNK = 64, 256
LISTS = 8
"""The model has 4 layers with 2 KV heads."""
LOSSLESS: dict[str, dict[str, object]] = {
    "sparf": {"budget": 1},
    "adaptive": {"selector": "adaptive", "budget": 1},
    "window": {"selector": "window", "budget": 1},
    "swarm": {"selector": "swarm", "budget": 1},
    "exact": {"selector": "exact"},
    "refused": {"selector": "bounds"},
}
LOSSY: dict[str, dict[str, object] | None] = {
    "eighth": None,
    "tokens": {"budget_tokens": 200},
    "little window": {"selector": "window", "budget": 0.25},
    "clusters": {"selector": "swarm"},
}
ASKED = {**LOSSLESS, **LOSSY}
PROMPTS = dict(
    zip(ASKED, prompts((1500, 1100, 700, 500, 900, 400, 1300, 1000, 600, 800), 31), strict=True)
)
SPARSE = [name for name in ASKED if name not in {"exact", "refused"}]
OPTIONS: dict[str, object] = {
    "selector": "sparf",
    "sparse": {
        "budget": 0.125,
        "mass": 1,
        "floor": 0.125,
        "exact_below": 0,
        "page_cache": "2MiB",
        "summaries": "20MiB",
    },
}
"""Channels of all contexts are half of their KV, of 31 MB."""


@dataclass
class Mixed(Bench):
    """A bench whose requests choose. ``wanted_of``: answers of those that lose nothing."""

    wanted_of: dict[str, tuple[int, ...]] = field(default_factory=dict)
    asked: Mapping[str, Mapping[str, object] | None] = field(default_factory=lambda: ASKED)
    texts: Mapping[str, Tokens] = field(default_factory=lambda: PROMPTS)
    priorities: Mapping[str, int] = field(default_factory=dict)
    max_tokens: int = MAX_TOKENS

    def start(self) -> None:
        io = {"staging": "4MiB", "deadline": 2.0, "fault_file": str(self.control)}
        self.engine = Engine(
            self.model,
            ssdkv=page_mode(self.places, window=WINDOW, dram="40MiB", io=io, **OPTIONS),
            kv_tokens=3 * kv_tokens(WINDOW, CHUNK),
            max_num_seqs=len(ASKED),
            max_num_batched_tokens=CHUNK,
            max_model_len=2048,
        )

    def run(
        self,
        names: Sequence[str] = tuple(ASKED),
        after_step: Callable[[int], None] | None = None,
        given_up: Sequence[str] = (),
    ) -> dict[str, tuple[int, ...]]:
        """Ask in one batch; the tokens of each, those of lossless ones as they must be."""
        self.turn += 1
        for name in names:
            self.add(name)
        found = self.engine.run(after_step)
        self.engine.settle()
        got = {name: found[f"{self.turn}.{name}"] for name in names if name not in given_up}
        for name, tokens in got.items():
            assert len(tokens) == self.max_tokens, name
            assert tokens == self.wanted_of.get(name, tokens)[: self.max_tokens], name
        return got

    def add(self, name: str) -> None:
        """Queue one of this turn's requests."""
        self.engine.add(
            f"{self.turn}.{name}",
            self.texts[name],
            self.max_tokens,
            self.asked[name],
            self.priorities.get(name, 0),
        )

    def decoding(self) -> bool:
        """Whether all requests have been decoding for a while."""
        scheduler = self.engine.scheduler
        outputs = [request.num_output_tokens for request in scheduler.running]
        return len(outputs) == len(scheduler.requests) > 0 and min(outputs) >= 3

    def once_decoding(self, strike: Callable[[], None]) -> Callable[[int], None]:
        """Do this once, in the middle of decode."""
        done: list[bool] = []

        def after_step(step: int) -> None:
            if not done and self.decoding():
                done.append(True)
                strike()

        return after_step

    def assert_clean(self) -> None:
        super().assert_clean()
        assert self.count("dram_frames_dirty") == self.count("slots_pinned") == 0
        assert self.scheduler.remembers() == {}
        assert len(self.scheduler.asked) == 0
        worker = self.worker
        assert len(worker.page_mode.choices.means) == len(worker.page_mode.choices.clusters) == 0
        assert worker.store._contexts == {}
        # What was read ahead for a step that never came.
        until(lambda: worker.store._fetcher.on_the_way() == 0, "the end of what is read ahead")
        pages = worker.store._pages
        until(lambda: pages.usable() == pages.open_places, "the end of reads that hung")
        assert pages.taken() == 0
        assert worker.store._summaries.pinned() == 0
        worker.store.frames.audit()

    @property
    def worker(self) -> Any:  # noqa: ANN401 - our worker's half, in this process
        return active_worker.worker()


@pytest.fixture(scope="module")
def mixed(
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Mixed]:
    answers = stock.answers("llama", [PROMPTS[name] for name in LOSSLESS])
    wanted = {name: answer.tokens for name, answer in zip(LOSSLESS, answers, strict=True)}

    with pytest.MonkeyPatch.context() as patch:
        open_unhurried_engines(patch)
        control = tmp_path_factory.mktemp("faults") / "faults.json"
        made = Mixed(models["llama"], devices(4), control, [], wanted_of=wanted)
        yield made
        made.faults()
        made.engine.close()


def test_each_gets_what_it_gets_alone(mixed: Mixed) -> None:
    alone: dict[str, tuple[int, ...]] = {}
    # Clusters come from the queries that are computed: all of the prompt's, or those behind a hit.
    mixed.run(["clusters"])
    for name in LOSSY:
        alone |= mixed.run([name])
    before = mixed.count("sparse_selections")
    assert before == (len(LOSSY) + 1) * LISTS * (MAX_TOKENS - 1)
    together = mixed.run()
    assert {name: together[name] for name in LOSSY} == alone
    # They do choose, and not the same: no answer is that of exact attention by chance.
    assert len({*alone.values()}) == len(LOSSY)
    assert mixed.count("sparse_selections") - before == len(SPARSE) * LISTS * (MAX_TOKENS - 1)
    assert mixed.count("sparse_pages_fetched", tier="ssd") > 0
    assert mixed.count("context_pages_streamed", tier="ssd") > 0
    assert mixed.count("sparse_requests_refused") == 1
    for name in ("checksum_failures", "load_failures", "slots_dropped", "recomputed_requests"):
        assert mixed.count(name) == 0, name
    assert mixed.engine.metric("vllm:num_preemptions") == 0
    mixed.assert_clean()


def test_an_answer_says_how_it_was_made(mixed: Mixed) -> None:
    def told(asked: Mapping[str, object] | None) -> object:
        mixed.engine.add("told", PROMPTS["exact"], 2, asked)
        outputs = []
        while mixed.engine.llm.llm_engine.has_unfinished_requests():
            outputs += mixed.engine.llm.llm_engine.step()
        return outputs[-1].kv_transfer_params

    assert told(None) is None
    assert told({"budget": 0.5}) == {"ssdkv": {"selector": "sparf", "budget": 0.5}}
    wrong = told({"budget": 2})
    assert isinstance(wrong, dict)
    assert wrong["ssdkv"]["selector"] == "exact"
    assert "budget: got 2" in wrong["ssdkv"]["error"]
    mixed.engine.settle()


def test_given_up_while_tokens_are_decoded(mixed: Mixed) -> None:
    gone = ["sparf", "exact", "eighth"]

    def give_up() -> None:
        mixed.engine.abort(*(f"{mixed.turn}.{name}" for name in gone))

    mixed.run(after_step=mixed.once_decoding(give_up), given_up=gone)
    mixed.assert_clean()
    mixed.run(gone)


def test_preempted_while_tokens_are_decoded(mixed: Mixed) -> None:
    before = mixed.engine.metric("vllm:num_preemptions")

    def preempt() -> None:
        assert mixed.engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    mixed.run(after_step=mixed.once_decoding(preempt))
    assert mixed.engine.metric("vllm:num_preemptions") > before
    mixed.assert_clean()


def test_bits_flip_under_a_sparse_request(mixed: Mixed) -> None:
    """In pages that a selector reads: the request that reads them is computed again."""
    before = mixed.count("recomputed_requests")

    def flip() -> None:
        geometry = mixed.worker.layout.geometry
        inside = geometry.header_bytes + geometry.first_page(0) * geometry.page_bytes
        frames = mixed.worker.store.frames
        slots = mixed.context(f"{mixed.turn}.sparf")
        slot = next(slot for slot in slots if frames.frame_of(slot) == NO_FRAME)
        for page in range(geometry.pages_per_layer):
            mixed.flip(slot, inside + page * geometry.page_bytes + 100)

    mixed.run(after_step=mixed.once_decoding(flip))
    assert mixed.count("checksum_failures") > 0
    assert mixed.count("recomputed_requests") > before
    assert mixed.count("slots_dropped", cause="read_error") > 0
    mixed.assert_clean()


# Each device is given up, so the order matters; two of the four are left.
@pytest.mark.parametrize(("device", "kind"), [(2, "eio"), (3, "stall")])
def test_a_device_fails_while_tokens_are_decoded(mixed: Mixed, device: int, kind: str) -> None:
    before = mixed.count("recomputed_requests")
    rule = {"kind": kind, "device": device, "seconds": 30.0 if kind == "stall" else 0.0}
    mixed.run(after_step=mixed.once_decoding(lambda: mixed.faults(rule)))
    assert mixed.count("device_lost", device=mixed.paths[device]) == 1
    assert mixed.count("recomputed_requests") > before
    mixed.faults()
    mixed.run()
    mixed.assert_clean()
