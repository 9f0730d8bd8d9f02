"""Steps that native code runs layer by layer: each bit and count is that of the path in Python."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from vllm_ssdkv.attention.decode_plan import DecodePlan
from vllm_ssdkv.base.metrics import counter_key
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.request import RequestOptions
from vllm_ssdkv.connector.worker import page_mode
from vllm_ssdkv.profiling.decode_harness.decoder import PagedDecoder, Room
from vllm_ssdkv.profiling.decode_harness.models import make_model
from vllm_ssdkv.sparse.prefetch import Prefetcher

CPU = torch.device("cpu")
NATIVE = counter_key("context_steps_native")
STEPS, VOCABULARY = 3, 128
SELECTORS = ("exact", "window", "bounds", "spread", "codes", "sparf", "adaptive")
SCORERS = ("bounds", "spread", "codes", "sparf")
ASKED = st.one_of(
    st.none(),
    st.builds(RequestOptions, selector=st.sampled_from(("exact", "window", "adaptive"))),
    st.builds(RequestOptions, budget=st.sampled_from((0.1, 0.6))),
)
"""Options of requests to an engine whose selector scores pages."""


@dataclass(frozen=True)
class Case:
    """A model, its requests, and how they choose."""

    layers: int
    kv_heads: int
    group: int
    head_size: int
    dtype: torch.dtype
    block_tokens: int
    prompts: tuple[int, ...]
    window: int
    selector: str
    budget: float
    mass: float
    floor: float
    """Share of the budget."""
    sinks: int
    dense_layers: int
    asked: tuple[RequestOptions | None, ...]
    """Options of each request."""
    scorer: str
    """Scorer of `adaptive`."""
    channels: int
    granularity: str
    estimate_rest: bool
    """Options of some scorers, as are the two before; others do not get them."""

    def model(self) -> torch.nn.Module:
        heads = self.kv_heads * self.group
        config = LlamaConfig(
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            hidden_size=8 * heads,
            intermediate_size=32,
            vocab_size=VOCABULARY,
            max_position_embeddings=1024,
            initializer_range=0.3,
            tie_word_embeddings=False,
            eos_token_id=None,
            bos_token_id=None,
        )
        return make_model(config, CPU, self.dtype)

    def scoring(self) -> dict[str, object]:
        """Options of the scorer of pages or tokens."""
        scorer, made = self.selector, dict[str, object]()
        if scorer == "adaptive":
            scorer = made["scorer"] = self.scorer
        if scorer == "sparf":
            made |= {"channels": self.channels, "granularity": self.granularity}
        if scorer in {"sparf", "spread"}:
            made["estimate_rest"] = self.estimate_rest
        return made

    def options(self) -> SSDKVConfig:
        sparse = {
            "budget": self.budget,
            "mass": self.mass,
            "floor": self.floor * self.budget,
            "exact_below": 0,
            "sink_tokens": self.sinks,
            "dense_layers": self.dense_layers,
            **self.scoring(),
        }
        chosen = {} if self.selector == "exact" else {"sparse": sparse}
        return SSDKVConfig.from_extra_config(
            {
                "mode": "page",
                "selector": self.selector,
                "hbm_window_tokens": self.window,
                "dram_gib": "96MiB",
                "io": {"staging": "4MiB"},
                **chosen,
            }
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    prompts = tuple(draw(st.lists(st.integers(1, 400), min_size=1, max_size=4)))
    layers = draw(st.integers(1, 3))
    selector = draw(st.sampled_from(SELECTORS))
    asked = st.none() if selector in ("exact", "window") else ASKED
    return Case(
        layers,
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from((16, 32, 40))),
        draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))),
        draw(st.sampled_from((16, 32))),
        prompts,
        draw(st.sampled_from((32, 64))),
        selector,
        draw(st.floats(0.05, 1.0)),
        draw(st.sampled_from((0.5, 0.9, 1.0))),
        draw(st.floats(0.05, 1.0)),
        draw(st.sampled_from((0, 16, 40))),
        draw(st.integers(0, layers - 1)),
        tuple(draw(asked) for _ in prompts),
        draw(st.sampled_from(SCORERS)),
        draw(st.sampled_from((1, 5, 64))),
        draw(st.sampled_from(("page", "token"))),
        draw(st.booleans()),
    )


@dataclass(frozen=True)
class Run:
    """One life of a decoder.

    Attributes:
        logits: Behind each token, the prompts' last ones first, [steps, requests, vocabulary].
        chosen: Layer, pages and edges of each choice that a step keeps for the next one.
        counted: What was counted, but for times.
    """

    logits: torch.Tensor
    chosen: list[tuple[int, list[int], list[int]]]
    counted: dict[str, float]


def latest(
    guesses: Prefetcher, layers: int, names: list[str]
) -> list[tuple[int, list[int], list[int]]]:
    """Choices that are kept, of all layers that have one."""
    long = np.full(len(names), 1024)
    found = {layer: guesses.likely.recall(layer, names, long) for layer in range(layers)}
    return [
        (layer, one.pages.tolist(), one.begin.tolist())
        for layer, one in found.items()
        if one is not None
    ]


def run(case: Case, model: torch.nn.Module) -> Run:
    room = Room(len(case.prompts), max(case.prompts) + STEPS + 1, case.block_tokens, chunk=128)
    names = [str(number) for number in range(len(case.prompts))]
    random = torch.Generator().manual_seed(7)
    guesses, chosen = Prefetcher(), []
    with (
        tempfile.TemporaryDirectory() as directory,
        patch.object(page_mode, "Prefetcher", return_value=guesses),
        PagedDecoder(
            model, case.options(), room, Path(directory) / "store", durable=False
        ) as decoder,
    ):
        last = []
        for name, length in zip(names, case.prompts, strict=True):
            ids = torch.randint(0, VOCABULARY, (length,), generator=random).tolist()
            last.append(decoder.prefill(name, ids))
        for name, asked in zip(names, case.asked, strict=True):
            decoder.ask(name, asked)
        logits = [torch.stack(last)]
        for _ in range(STEPS):
            logits.append(decoder.step(names, logits[-1].argmax(-1)))
            chosen += latest(guesses, case.layers, names)
        counted = decoder.worker.counters.totals()
    kept_keys = {
        key: value
        for key, value in counted.items()
        if "seconds" not in key and "device=" not in key
    }
    return Run(torch.stack(logits), chosen, kept_keys)


EVER_FEWER = Case(
    layers=1,
    kv_heads=1,
    group=1,
    head_size=16,
    dtype=torch.float32,
    block_tokens=16,
    prompts=(384,),
    window=32,
    selector="adaptive",
    budget=0.128,
    mass=0.5,
    floor=1.0,
    sinks=0,
    dense_layers=0,
    asked=(None,),
    scorer="bounds",
    channels=1,
    granularity="page",
    estimate_rest=False,
)
"""The window takes all of the budget at the third token: its layers choose nothing."""


@settings(max_examples=25)
@example(case=EVER_FEWER)
@given(case=cases())
def test_native_code_computes_what_python_does(case: Case) -> None:
    """Bit for bit, from prompts on: outputs, choices and counts."""
    model = case.model()
    native = run(case, model)
    with patch.object(DecodePlan, "of", return_value=None):
        python = run(case, model)
    assert torch.equal(native.logits, python.logits)
    assert native.chosen == python.chosen
    steps = native.counted.pop(NATIVE)
    assert python.counted.pop(NATIVE) == 0
    assert steps == sum(-(-length // 128) for length in case.prompts) + STEPS
    assert native.counted == python.counted
