"""Sparse decode in the real engine: the recall model answers from an eighth of its context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.attention.newest import values_at
from tests.e2e.workload import kv_tokens, page_mode
from tests.faults import set_faults
from tests.kit.engine import Answer, Engine
from vllm_ssdkv.connector import active_worker
from vllm_ssdkv.connector.attention_impl import PagedAttentionImpl, PagedMetadata
from vllm_ssdkv.connector.worker import device_memory
from vllm_ssdkv.profiling.recall.recall import MODEL_DIR, Question, Task, ask

WINDOW, CHUNK, BLOCK = 64, 512, 16
BUDGET = 1 / 8
TASKS: tuple[Task, ...] = ("single", "copy")
"""An eighth of so short a context is too little for page bounds in the others, which have many
needles."""
QUESTIONS = [
    ask(task, tokens, seed) for task in TASKS for tokens in (2048, 3000) for seed in (1, 2)
]
LISTS = 6
"""The model has 3 layers with 2 KV heads."""
PAGE_BYTES = 4096
"""K and V of 16 tokens of a KV head of the model."""


@dataclass
class Recall:
    """An engine with the recall model; :meth:`start` begins its next life on the same devices."""

    places: list[dict[str, Any]]
    selector: str
    control: Path
    options: dict[str, object] = field(default_factory=dict)
    dram: str = "12MiB"
    block: int = BLOCK
    window: int = WINDOW
    longest: int = 4096
    turn: int = 0
    decoded: list[list[int]] = field(default_factory=list)
    """Prompts and what followed them, as :func:`decode` made them."""

    def start(self) -> None:
        sparse = {"exact_below": 0, "page_cache": "1MiB", "summaries": "3MiB", **self.options}
        io = {"staging": "4MiB", "fault_file": str(self.control)}
        self.engine = Engine(
            MODEL_DIR,
            ssdkv=page_mode(
                self.places,
                window=self.window,
                dram=self.dram,
                selector=self.selector,
                sparse=sparse,
                io=io,
            ),
            kv_tokens=8 * kv_tokens(self.window, CHUNK, self.block),
            dtype="bfloat16",
            block_size=self.block,
            max_num_batched_tokens=CHUNK,
            max_model_len=self.longest,
        )

    def right(
        self,
        questions: Sequence[Question] = QUESTIONS,
        after_step: Callable[[int], None] | None = None,
    ) -> int:
        """Ask in one batch; how many answers are right, to the last token."""
        self.turn += 1
        names = [f"{self.turn}.{number}" for number in range(len(questions))]
        for name, question in zip(names, questions, strict=True):
            self.engine.add(name, list(question.prompt), len(question.answer))
        got = self.engine.run(after_step)
        self.engine.settle()
        return sum(got[n] == q.answer for n, q in zip(names, questions, strict=True))

    def count(self, name: str, **labels: str) -> float:
        """A metric; 0 while a counter that names devices has not counted."""
        try:
            return self.engine.ssdkv(name, **labels)
        except KeyError:
            return 0.0

    def faults(self, *rules: dict[str, Any]) -> None:
        set_faults(self.control, *rules)


@pytest.fixture(scope="module")
def recall(
    devices: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recall]:
    """The engine with page bounds, after it has answered all questions once."""
    control = tmp_path_factory.mktemp("faults") / "faults.json"
    made = Recall(devices(4), "bounds", control, {"budget": BUDGET})
    made.start()
    yield made
    made.faults()
    made.engine.close()


def test_an_eighth_of_the_context_is_enough(recall: Recall) -> None:
    """Requests of different lengths in one batch."""
    engine = recall.engine
    assert recall.right() == len(QUESTIONS)
    selected = engine.ssdkv("sparse_pages_selected")
    assert 0 < selected <= BUDGET * engine.ssdkv("sparse_pages_in_context")
    # The first token of an answer comes from the prompt's last one.
    tokens = sum(len(question.answer) - 1 for question in QUESTIONS)
    assert engine.ssdkv("sparse_selections") == LISTS * tokens
    longest = max(len(question.answer) for question in QUESTIONS) - 1
    assert longest <= engine.ssdkv("context_steps", attention="sparse") <= tokens
    chunks = sum(-(-len(question.prompt) // CHUNK) for question in QUESTIONS)
    assert 0 < engine.ssdkv("context_steps", attention="exact") < chunks + tokens
    fetched = [engine.ssdkv("sparse_pages_fetched", tier=t) for t in ("dram", "page_cache", "ssd")]
    assert sum(fetched) == selected
    assert fetched[2] > 0
    # The page cache holds less than a step chooses, so that guesses have something to bring.
    assert 0 < engine.ssdkv("sparse_read_ahead_hits") <= engine.ssdkv("sparse_pages_read_ahead")
    assert engine.ssdkv("sparse_rows_exact") == 0
    assert 0 < engine.ssdkv("sparse_missing_mass") < engine.ssdkv("sparse_selections")
    for name in ("checksum_failures", "load_failures", "slots_dropped", "recomputed_requests"):
        assert engine.ssdkv(name) == 0, name


DECODED = 60
EXACT = {"selector": "exact"}


def decode(recall: Recall, prompt: Sequence[int]) -> None:
    """Store a prompt, and tokens that are decoded behind it from a part of it."""
    recall.engine.add("decode", prompt, DECODED)
    found = recall.engine.run()["decode"]
    recall.engine.settle()
    recall.decoded.append([*prompt, *found])


def answer(
    recall: Recall, tokens: Sequence[int], asked: dict[str, object], salt: str = ""
) -> Answer:
    """Answer to these tokens. With a ``salt`` nothing is found."""
    prompt: dict[str, object] = {"prompt_token_ids": list(tokens)}
    (output,) = recall.engine.llm.generate(
        [prompt | ({"cache_salt": salt} if salt else {})],
        Engine.sampling(4, logprobs=1, extra_args={"kv_transfer_params": {"ssdkv": asked}}),
        use_tqdm=False,
    )
    recall.engine.settle()
    (text,) = output.outputs
    chances = [{t: p.logprob for t, p in position.items()} for position in text.logprobs]
    return Answer(tuple(text.token_ids), int(output.num_cached_tokens or 0), tuple(chances))


def assert_found_up_to_what_was_decoded(recall: Recall, tokens: Sequence[int]) -> None:
    """A request that attends to everything finds the prompt; one that chooses alike, all."""
    wanted = answer(recall, tokens, EXACT, salt="alone")
    alike = answer(recall, tokens, {"selector": recall.selector})
    got = answer(recall, tokens, EXACT)
    whole = (len(tokens) - 1) // BLOCK * BLOCK
    assert (wanted.cached, alike.cached) == (0, whole)
    assert got.cached == (len(tokens) - DECODED) // BLOCK * BLOCK
    assert got.tokens == wanted.tokens
    for one, other in zip(got.logprobs, wanted.logprobs, strict=True):
        assert one == pytest.approx(other, abs=0.02)
    assert answer(recall, tokens, EXACT).cached == whole, "what an exact request has computed"


def test_exact_requests_find_nothing_that_was_decoded_by_choosing(recall: Recall) -> None:
    for number in (0, 1):
        decode(recall, QUESTIONS[number].prompt[100:1100])
    assert_found_up_to_what_was_decoded(recall, recall.decoded[0])


def test_after_a_restart_contexts_are_not_read_but_in_parts(recall: Recall) -> None:
    recall.engine.close()
    recall.start()
    engine = recall.engine
    asked = [question for question in QUESTIONS if question.task == "copy"]
    seen: list[tuple[float, ...]] = []

    def note(step: int) -> None:
        running = engine.scheduler.running
        if len(running) == len(asked) and all(r.num_output_tokens for r in running):
            # What vLLM was told last may be older.
            worker = active_worker.worker()
            assert worker is not None
            totals = worker.counters.totals().items()
            counted = ("bytes_read|", "sparse_pages_in_context")
            seen.append(tuple(sum(n for key, n in totals if key.startswith(c)) for c in counted))

    assert recall.right(asked, note) == len(asked)
    assert recall.count("hit_tokens", tier="ssd") >= sum(len(q.prompt) - BLOCK for q in asked)
    # The last tokens of a prompt, which are no full block, are computed, and exactly: one walk.
    walk = sum(len(question.prompt) // BLOCK for question in asked) * LISTS
    assert 0 < recall.count("context_pages_streamed") <= walk
    # While tokens were decoded. What exact attention reads is all of the context.
    read, context = (last - first for first, last in zip(seen[0], seen[-1], strict=True))
    assert 0 < read <= 0.16 * context * PAGE_BYTES


def test_nor_do_they_after_a_restart(recall: Recall) -> None:
    assert_found_up_to_what_was_decoded(recall, recall.decoded[1])


def test_attention_is_handed_the_v_that_the_cache_has(
    recall: Recall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contract with vLLM: mean V takes that of the newest tokens from there."""
    same: list[bool] = []
    forward = PagedAttentionImpl.forward

    def watched(
        self: PagedAttentionImpl,
        layer: Any,  # noqa: ANN401 - vLLM's own signature
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        *others: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        worker = active_worker.worker()
        if attn_metadata is not None and worker is not None and worker.page_mode.step is not None:
            tokens = attn_metadata.num_actual_tokens
            blocks, inside = np.divmod(attn_metadata.slot_mapping[:tokens].numpy(), BLOCK)
            cache = kv_cache.view(kv_cache.shape[0], -1)
            cached = values_at(cache, worker.page_mode.block_layout, blocks, inside)
            same.append(torch.equal(cached, value[:tokens].view(cached.shape)))
        return forward(self, layer, query, key, value, kv_cache, attn_metadata, *others, **named)

    monkeypatch.setattr(PagedAttentionImpl, "forward", watched)
    assert recall.right(QUESTIONS[:2]) == 2
    assert len(same) > 3 * 2048 // CHUNK
    assert all(same)


def test_a_device_that_dies_while_tokens_are_decoded(recall: Recall) -> None:
    def strike(step: int) -> None:
        if step == 4:
            recall.faults({"kind": "eio", "device": 2})

    assert recall.right(after_step=strike) == len(QUESTIONS)
    assert recall.engine.ssdkv("device_lost", device=recall.places[2]["path"]) == 1
    assert recall.right() == len(QUESTIONS)


def test_where_dram_has_all_contexts_a_layer_is_one_native_call(
    recall: Recall,
    devices: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
    by_layers: None,
) -> None:
    """Layers of prompts leave HBM one by one, and summaries with them."""
    recall.engine.close()
    options = {"budget": BUDGET, "summaries": "8MiB"}
    found = Recall(devices(2), "bounds", tmp_path / "faults.json", options, dram="96MiB")
    found.start()
    try:
        assert found.right() == len(QUESTIONS)
        choosing = found.count("context_steps", attention="sparse")
        assert found.count("context_steps_native") >= choosing > 0
        assert found.count("step_copies", way="layers") >= sum(
            len(question.prompt) // CHUNK for question in QUESTIONS
        )
        assert found.count("sparse_bytes_fetched", pages="summary") == 0, "all were kept"
        assert found.count("sparse_pages_fetched", tier="dram") > 0
        assert found.count("sparse_pages_fetched", tier="ssd") == 0
    finally:
        found.engine.close()


def test_a_window_alone_does_not_know_the_answers(recall: Recall) -> None:
    """Same budget, same questions, and the same store: so the questions tell selectors apart."""
    recall.engine.close()
    blind = Recall(recall.places, "window", recall.control.with_name("none"), {"budget": BUDGET})
    blind.start()
    try:
        assert blind.right() == 0
        assert blind.count("hit_tokens", tier="ssd") > 0
        assert blind.count("sparse_pages_selected") > 0
    finally:
        blind.engine.close()


def test_summaries_in_memory_of_the_device(
    recall: Recall, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A piece of DRAM stands for it: it is taken with the model, and handed to the worker."""
    monkeypatch.setattr(device_memory, "_is_host", lambda device: False)
    for size, places in (("16MiB", True), ("1MiB", False)):
        recall.engine.close()
        recall.options = {"budget": BUDGET, "hbm_summaries": size}
        caplog.clear()
        recall.start()
        worker: Any = active_worker.worker()
        assert (worker.store.device_places > 0) == places
        assert device_memory.held_for_summaries() == 0
        lines = [line for line in caplog.messages if "sparse.hbm_summaries has room" in line]
        assert len(lines) == (not places)
        assert recall.right() == len(QUESTIONS)
        assert recall.engine.ssdkv("sparse_rows_exact") == 0
        assert recall.engine.ssdkv("sparse_selections") > 0


def test_codes_answer_where_needles_are_many(
    recall: Recall, devices: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Selectors `codes` and `adaptive` answer every task, from one store."""
    recall.engine.close()
    places, control = devices(2), tmp_path / "faults.json"
    tasks: tuple[Task, ...] = ("multikey", "chain", "single", "copy")
    questions = [ask(task, 3000, seed) for task in tasks for seed in (1, 2)]
    for selector, options in (("codes", {"budget": BUDGET}), ("adaptive", {"budget": 1.0})):
        found = Recall(places, selector, control, {"summaries": "5MiB", **options}, dram="16MiB")
        found.start()
        try:
            assert found.right(questions) == len(questions)
            selected = found.count("sparse_pages_selected")
            assert 0 < selected < 0.5 * found.count("sparse_pages_in_context")
            assert found.count("sparse_selections_short") == 0
            assert found.count("sparse_rows_exact") == 0
            if selector == "adaptive":
                assert found.count("hit_tokens", tier="ssd") > 0
        finally:
            found.engine.close()
