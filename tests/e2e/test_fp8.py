"""Page mode with KV in fp8: what stock vLLM computes with the same KV, its scales included.

A number that rounding puts on the other side of one of 8 bits is an eighth of itself away there.
So stock vLLM, too, answers otherwise in chunks of another size: in this model log-probabilities of
the same text differ by 0.004. A lost block, or a scale that is left out, moves them by units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.e2e.models import make_scaled
from tests.e2e.stock import Stock
from tests.e2e.workload import ROOMY_DRAM, SHORT, kv_tokens, page_mode
from tests.kit.engine import Answer, Engine

WORST = 0.05
CHUNK, BLOCK = 256, 32


@dataclass(frozen=True)
class Run:
    """Answers of stock vLLM, of page mode, of an engine that begins with its store and has DRAM for
    all of it, and of one whose model has other scales."""

    wanted: list[Answer]
    got: list[Answer]
    again: list[Answer]
    other: list[Answer]
    kv_tokens: int
    from_ssd: float
    native: float


def engine(model: Path, options: dict[str, object], kv_dtype: str = "fp8") -> Engine:
    return Engine(
        model,
        ssdkv=options,
        kv_tokens=kv_tokens(128, CHUNK),
        max_num_batched_tokens=CHUNK,
        kv_cache_dtype=kv_dtype,
    )


@pytest.fixture(scope="module")
def run(
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    wanted, place = stock.answers("scaled", SHORT, logprobs=5, kv_dtype="fp8"), devices(2)
    with engine(models["scaled"], page_mode(place, dram="6MiB")) as first:
        got = first.answers(SHORT, logprobs=5)
        first.settle()
        room, from_ssd = first.kv_tokens, first.ssdkv("context_pages_streamed", tier="ssd")
    roomy = page_mode(place, dram=ROOMY_DRAM)
    with engine(models["scaled"], roomy) as second:
        again = second.answers(SHORT, logprobs=5)
        native = second.ssdkv("context_steps_native")
    other = make_scaled(tmp_path_factory.mktemp("other"), scales=(0.3, 1.8))
    with engine(other, roomy) as third:
        return Run(wanted, got, again, third.answers(SHORT, 1), room, from_ssd, native)


def test_scales_of_a_layer_say_nothing_of_wide_blocks(
    models: dict[str, Path], stock: Stock, devices: Callable[..., list[dict[str, str]]]
) -> None:
    """A checkpoint by llm-compressor gives its layers scales, whatever the KV cache's type."""

    def scale(model: torch.nn.Module) -> int:
        layers = [layer for layer in model.modules() if hasattr(layer, "_k_scale_float")]
        for layer in layers:
            layer._k_scale_float, layer._v_scale_float = 0.5, 0.25
        return len(layers)

    prompts = SHORT[:1]
    with engine(models["llama"], page_mode(devices(2), dram=ROOMY_DRAM), "auto") as wide:
        assert wide.llm.apply_model(scale)[0] > 0
        got = wide.answers(prompts)
    wanted = stock.answers("llama", prompts)
    assert [one.tokens for one in got] == [one.tokens for one in wanted]


def test_contexts_are_larger_than_the_kv_cache(run: Run) -> None:
    assert max(map(len, SHORT)) >= 4 * run.kv_tokens
    assert run.from_ssd > 0


def test_tokens_are_those_of_stock_vllm(run: Run) -> None:
    assert [a.tokens for a in run.got] == [a.tokens for a in run.wanted]


def test_log_probabilities_are_those_of_stock_vllm(run: Run) -> None:
    for answers in run.got, run.again:
        for wanted, got in zip(run.wanted, answers, strict=True):
            for theirs, ours in zip(wanted.logprobs, got.logprobs, strict=True):
                common = theirs.keys() & ours.keys()
                assert max(abs(theirs[token] - ours[token]) for token in common) <= WORST


def test_a_restart_finds_every_block(run: Run) -> None:
    assert [a.cached for a in run.again] == [(len(p) - 1) // BLOCK * BLOCK for p in SHORT]
    assert [a.tokens for a in run.again] == [a.tokens for a in run.wanted]
    assert run.native > 0


def test_models_with_other_scales_share_no_block(run: Run) -> None:
    assert {a.cached for a in run.other} == {0}


@pytest.mark.parametrize(
    ("selector", "model", "kv_dtype"),
    [("window", "qwen3", "fp8_e5m2"), ("bounds", "scaled", "fp8")],
)
def test_a_selector_that_may_choose_everything_is_exact(
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
    selector: str,
    model: str,
    kv_dtype: str,
) -> None:
    wanted = stock.answers(model, SHORT, kv_dtype=kv_dtype)
    sparse: dict[str, object] = {"exact_below": 0, "budget": 1, "token_order": "position"}
    sparse |= {"page_cache": "1MiB", "summaries": "2MiB"}
    options = page_mode(devices(2), dram="10MiB", selector=selector, sparse=sparse)
    with engine(models[model], options, kv_dtype) as served:
        got = served.answers(SHORT)
        assert served.ssdkv("sparse_selections") > 0
    assert [a.tokens for a in got] == [a.tokens for a in wanted]
