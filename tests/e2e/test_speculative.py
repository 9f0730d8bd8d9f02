"""Speculative decoding: stored blocks hold no draft that was rejected, in mode reuse with the
drafter's own KV beside the model's; in page mode one walk over the context serves all drafts of a
step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.drafters import draft_model, eagle, ngram
from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import kv_tokens, page_mode, reuse_mode
from tests.faults import set_faults
from tests.kit.engine import Answer, Engine, Tokens
from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.profiling.recall.recall import MODEL_DIR, ask

BLOCK = 32
PROMPTS = prompts((200, 300, 77, 640), seed=1)
OTHERWISE = [*PROMPTS[1][: 5 * BLOCK], *PROMPTS[2]]
"""Begins as another prompt does, and goes on otherwise after a whole number of blocks."""
KV_TOKENS = 32768

Devices = Callable[..., list[dict[str, str]]]
Proposals = list[list[list[int]]]


def start(model: Path, place: list[dict[str, str]] | None, drafter: dict[str, Any]) -> Engine:
    """An engine without HBM's own prefix cache: every hit is ours."""
    return Engine(
        model,
        ssdkv=None if place is None else reuse_mode(place),
        kv_tokens=KV_TOKENS,
        speculative_config=drafter,
        enable_prefix_caching=False,
    )


def hits(batch: list[Tokens], dropped: int = 0) -> list[int]:
    """Tokens that a store which knows every prompt serves."""
    return [((len(prompt) - 1) // BLOCK - dropped) * BLOCK for prompt in batch]


def right(engine: Engine) -> float:
    """Drafts that were accepted so far."""
    return engine.metric("vllm:spec_decode_num_accepted_tokens")


def check(got: list[Answer], wanted: list[Answer], cached: list[int]) -> None:
    assert [a.tokens for a in got] == [a.tokens for a in wanted]
    assert [a.cached for a in got] == cached


def test_a_draft_model(
    models: dict[str, Path], devices: Devices, stock: Stock, tmp_path: Path, by_layers: None
) -> None:
    """With KV of other tokens in its layers it would hardly ever be right. Layers of the drafter
    run several times in a step, and are copied after the last of them."""
    wanted, place = stock.answers("llama", PROMPTS), devices(2)
    drafter = draft_model(models["llama"], tmp_path / "draft")
    with start(models["llama"], place, drafter) as engine:
        check(engine.answers(PROMPTS), wanted, [0] * len(PROMPTS))
        accepted = right(engine)
        assert 0 < accepted < engine.metric("vllm:spec_decode_num_draft_tokens") / 2
        check(engine.answers(PROMPTS), wanted, hits(PROMPTS))
        assert right(engine) == 2 * accepted
        assert engine.ssdkv("layers_copied", when="beside") > 0
        engine.settle()
        engine.assert_nothing_held()
    with start(models["llama"], place, drafter) as engine:
        check(engine.answers(PROMPTS), wanted, hits(PROMPTS))
        assert right(engine) == accepted
        assert engine.ssdkv("hit_tokens", tier="ssd") == sum(hits(PROMPTS))


def test_decoded_blocks_with_drafts_rejected_in_them(
    models: dict[str, Path], devices: Devices, stock: Stock, tmp_path: Path
) -> None:
    """The next turn of a conversation hits what was decoded, and goes on as stock vLLM does."""
    first = PROMPTS[0]
    (answer,) = stock.answers("llama", [first])
    turn = [*first, *answer.tokens, *PROMPTS[2]]
    wanted = stock.answers("llama", [turn])
    drafter = draft_model(models["llama"], tmp_path / "draft")
    with start(models["llama"], devices(2), drafter) as engine:
        engine.answers([first])
        cached = (len(first) + len(answer.tokens) - 1) // BLOCK * BLOCK
        check(engine.answers([turn]), wanted, [cached])


def proposals(engine: Engine) -> Proposals:
    """What is drafted from now on, by step and request."""
    core = engine.llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    propose, found = runner.propose_draft_token_ids, []

    def watched(*args: object, **options: object) -> Any:  # noqa: ANN401 - vLLM's own
        drafts = propose(*args, **options)
        found.append(drafts.tolist())
        return drafts

    runner.propose_draft_token_ids = watched
    return found


@pytest.fixture(scope="module")
def head(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return eagle(models["llama"], tmp_path_factory.mktemp("eagle") / "head")


@pytest.fixture(scope="module")
def drafted(models: dict[str, Path], head: dict[str, Any]) -> list[Proposals]:
    """What the head drafts in stock vLLM, by prompt."""
    by_prompt = []
    with start(models["llama"], None, head) as engine:
        found = proposals(engine)
        for prompt in (*PROMPTS[:3], OTHERWISE):
            found.clear()
            engine.answers([prompt])
            by_prompt.append(list(found))
    return by_prompt


@pytest.fixture(scope="module")
def eagle_place(devices: Devices) -> list[dict[str, str]]:
    return devices(2)


@pytest.fixture(scope="module")
def engine(
    models: dict[str, Path],
    eagle_place: list[dict[str, str]],
    head: dict[str, Any],
    stock: Stock,
    drafted: list[Proposals],
) -> Iterator[Engine]:
    stock.answers("llama", [*PROMPTS, OTHERWISE])
    with start(models["llama"], eagle_place, head) as engine:
        yield engine


def test_a_head_drafts_from_loaded_blocks_what_it_would_have(
    engine: Engine, stock: Stock, drafted: list[Proposals]
) -> None:
    """The last block of a hit is computed again: the head needs hidden states from before."""
    wanted, found = stock.answers("llama", PROMPTS), proposals(engine)
    for turn in range(2):
        for number, drafts in enumerate(drafted[:3]):
            found.clear()
            cached = hits(PROMPTS, 1)[number] if turn else 0
            check(engine.answers([PROMPTS[number]]), [wanted[number]], [cached])
            assert found == drafts
    engine.settle()
    engine.assert_nothing_held()


def test_a_head_drafts_the_same_after_another_prompts_blocks(
    engine: Engine, stock: Stock, drafted: list[Proposals]
) -> None:
    """KV of a head belongs to the next token, too."""
    found = proposals(engine)
    check(engine.answers([OTHERWISE]), stock.answers("llama", [OTHERWISE]), [4 * BLOCK])
    assert found == drafted[3]
    engine.settle()
    engine.assert_nothing_held()


def test_a_store_with_a_heads_layers_is_not_taken_for_one_without(
    engine: Engine, models: dict[str, Path], eagle_place: list[dict[str, str]]
) -> None:
    engine.close()
    with pytest.raises(SSDKVError) as caught:
        Engine(models["llama"], ssdkv=reuse_mode(eagle_place), kv_tokens=8192).close()
    assert "draft" in str(caught.value)
    assert "layers" in str(caught.value)


def test_ngrams_share_the_store_of_an_engine_without(
    engine: Engine, models: dict[str, Path], devices: Devices, stock: Stock
) -> None:
    """In a process of its own."""
    engine.close()
    batch = [prompt[:60] * 4 for prompt in PROMPTS]
    wanted, place = stock.answers("llama", batch), devices(2)
    with Engine(models["llama"], ssdkv=reuse_mode(place), kv_tokens=KV_TOKENS) as plain:
        check(plain.answers(batch), wanted, [0] * len(batch))
        plain.settle()
    with Engine(
        models["llama"],
        ssdkv=reuse_mode(place),
        kv_tokens=KV_TOKENS,
        in_process=False,
        distributed_executor_backend="uni",
        speculative_config=ngram(),
    ) as drafting:
        check(drafting.answers(batch), wanted, hits(batch))
        assert drafting.metric("vllm:spec_decode_num_draft_tokens") > 0


def test_ngrams_in_page_mode_read_the_context_less_often(
    engine: Engine, devices: Devices, tmp_path: Path
) -> None:
    """The model copies from its context: after a token or two it is known what comes."""
    engine.close()
    questions = [ask("copy", tokens, seed) for tokens in (2048, 3000) for seed in (1, 2)]
    batch, wanted = [list(q.prompt) for q in questions], [q.answer for q in questions]
    most, block, window, chunk = len(questions[0].answer), 16, 64, 512
    settings: dict[str, Any] = {
        "kv_tokens": 4 * kv_tokens(window, chunk, block),
        "dtype": "bfloat16",
        "block_size": block,
        "max_num_batched_tokens": chunk,
        "max_model_len": 4096,
    }
    place, read, control = devices(2), [], tmp_path / "faults.json"
    set_faults(control)
    io = {"staging": "4MiB", "fault_file": str(control)}
    apart = {"in_process": False, "distributed_executor_backend": "uni"}
    for drafts in ({}, {**apart, "speculative_config": ngram()}):
        options = page_mode(place, window=window, dram="12MiB", io=io)
        with Engine(MODEL_DIR, ssdkv=options, **settings, **drafts) as paged:
            for turn in range(2):
                before = paged.ssdkv("context_pages_streamed") if turn else 0
                got = paged.answers(batch, most)
                assert [a.tokens for a in got] == wanted
                hit = [(len(p) - 1) // block * block for p in batch]
                assert [a.cached for a in got] == (hit if turn or drafts else [0] * len(batch))
            read.append(paged.ssdkv("context_pages_streamed") - before)
            if drafts:
                drafted = paged.metric("vllm:spec_decode_num_draft_tokens")
                assert 0 < right(paged) <= drafted
                # What a step samples from a context that it could not read goes to nobody.
                set_faults(control, {"kind": "dead", "device": 0, "after": 250})
                assert [a.tokens for a in paged.answers(batch, most)] == wanted
                for _ in range(20):  # metrics come once a second, with steps
                    time.sleep(0.25)
                    paged.answers(batch[:1], 1)
                assert paged.ssdkv("recomputed_requests", cause="context") > 0
            else:
                paged.settle()
    assert read[1] < read[0] / 2
