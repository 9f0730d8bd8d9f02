"""Verified hits: what changes KV unseen by every digest suspends the store; rounding never does."""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner
from vllm.lora.request import LoRARequest

from tests.conftest import SOAK_ROUNDS
from tests.e2e.bench import HANG_S
from tests.e2e.drafters import eagle
from tests.e2e.models import prompts
from tests.e2e.test_lora import RANK, make_adapter
from tests.e2e.workload import kv_tokens, page_mode, reuse_mode
from tests.kit.engine import Engine
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.connector.identity import loaded_model
from vllm_ssdkv.connector.identity.loaded_model import LoadedModel
from vllm_ssdkv.connector.scheduler.hit_verifier import FIRST_HITS

Devices = Callable[..., list[dict[str, Any]]]
Change = Callable[[torch.nn.Module], Callable[[], None]]
"""Has a model compute something else; what it returns puts it right again."""

CHUNK = 256
BLOCK = 32
MARGIN = 1 / 5
"""Of the tolerance: rounding may not come nearer to an alarm."""
CHOOSES = {"selector": "bounds", "sparse": {"exact_below": 1 << 20}}
"""The store is one to choose from, and requests are too short to: their answers are exact."""
PROMPTS = prompts((1400, 700, 333, 650), seed=21)
DEVIATIONS = "tests.e2e.deviations.NotedDeviations"
"""Of each comparison, asked for by ``LLM.collective_rpc("take_deviations")``."""
HITS = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
SHORT = [hit - BLOCK for hit in HITS]
"""Of hits that are verified."""


# ---- five kinds of changes ----


def overwritten(tensor: torch.Tensor, values: torch.Tensor) -> Callable[[], None]:
    before = tensor.clone()
    tensor.copy_(values)

    def undo() -> None:
        tensor.copy_(before)

    return undo


def norm(model: Any, factor: float = 1.02) -> Callable[[], None]:  # noqa: ANN401 - vLLM's model
    """Weights of one layer."""
    weight = model.model.layers[1].input_layernorm.weight.data
    return overwritten(weight, weight * factor)


def rotary(model: Any) -> Callable[[], None]:  # noqa: ANN401
    """A buffer: positions turn at three quarters of the speed."""
    table = model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
    return overwritten(table, table[torch.arange(len(table)) * 3 // 4])


def scale(model: Any, factor: float = 1.05) -> Callable[[], None]:  # noqa: ANN401
    """A setting of one layer's attention."""
    implementation = model.model.layers[1].self_attn.attn.impl
    before = implementation.scale
    implementation.scale = before * factor

    def undo() -> None:
        implementation.scale = before

    return undo


def kernel(model: Any, factor: float = 1.05) -> Callable[[], None]:  # noqa: ANN401
    """A kernel that computes one projection wrongly."""
    projection = model.model.layers[1].mlp.down_proj

    def wrong(module: torch.nn.Module, given: object, output: Any) -> Any:  # noqa: ANN401
        return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

    handle = projection.register_forward_hook(wrong)
    return handle.remove  # type: ignore[no-any-return]  # the model is Any


CHANGES: dict[str, Change] = {
    "kernel": kernel,
    "norm": norm,
    "rotary": rotary,
    "scale": scale,
    "slight": functools.partial(kernel, factor=1.004),
}
"""Four of the five kinds, and one that is hardly larger than the tolerance. The fifth kind is an
adapter with other weights."""


@contextmanager
def changed(engine: Engine, change: Change) -> Iterator[None]:
    (undo,) = engine.llm.apply_model(change)
    try:
        yield
    finally:
        undo()


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells that the model, or an adapter, is another one."""
    digest = LoadedModel.digest
    known: list[Any] = []

    def first(model: LoadedModel) -> Any:  # noqa: ANN401 - a ModelDigest
        known.append(digest(model))
        return known[0]

    monkeypatch.setattr(LoadedModel, "digest", first)
    monkeypatch.setattr(LoadedModel, "changed", lambda model: False)
    monkeypatch.setattr(LoadedModel, "touched", lambda model: False)
    monkeypatch.setattr(loaded_model, "digest_of_adapter", lambda adapter: b"the same adapter")


# ---- a store, engines on it, and the command ----


@dataclass
class Rig:
    """A store and the engines that open it, one after the other."""

    model: Path
    mode: str
    place: list[dict[str, Any]]
    log: list[str]
    options: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def engine(self, lora: LoRARequest | None = None) -> Iterator[Engine]:
        """One that holds an adapter from the start: its first request finds something, too."""
        make = reuse_mode if self.mode == "reuse" else page_mode
        chosen = CHOOSES if self.mode == "sparse" else {}
        size = 16384 if self.mode == "reuse" else 2 * kv_tokens(128, CHUNK)
        with Engine(
            self.model,
            ssdkv={**make(self.place), **chosen, "verify_hits": 256},
            kv_tokens=size,
            max_num_batched_tokens=CHUNK,
            worker_extension_cls=DEVIATIONS,
            **self.options,
        ) as engine:
            if lora is not None:
                assert engine.llm.llm_engine.add_lora(lora)
            yield engine

    def ask(
        self,
        engine: Engine,
        wanted: list[tuple[int, ...]],
        cached: list[int],
        lora: LoRARequest | None = None,
    ) -> None:
        """Each prompt alone, with nothing in HBM."""
        for prompt, tokens, hit in zip(PROMPTS, wanted, cached, strict=True):
            (answer,) = engine.answers([prompt], lora=lora)
            assert (answer.tokens, answer.cached) == (tokens, hit)
            engine.settle()
            assert engine.llm.reset_prefix_cache()

    def fill(self, wanted: list[tuple[int, ...]], lora: LoRARequest | None = None) -> None:
        with self.engine(lora) as engine:
            self.ask(engine, wanted, [0] * len(PROMPTS), lora)

    def check_found(
        self, engine: Engine, wanted: list[tuple[int, ...]], lora: LoRARequest | None = None
    ) -> None:
        """The engine that the store is of finds all of it; its first hits are verified, and so is
        each hit after a reset of the cache."""
        assert len(PROMPTS) == FIRST_HITS
        for times in (1, 2):
            self.ask(engine, wanted, SHORT, lora)
            assert engine.ssdkv("verified_hits", result="same") == times * FIRST_HITS
        assert engine.ssdkv("store_suspended") == 0

    def check_one_block(self, engine: Engine) -> None:
        """A hit of one block is computed, and compared when the stored one has come: where the
        request has ended before, the next one is to be."""
        before = engine.ssdkv("verified_hits", result="same")
        end = time.monotonic() + HANG_S
        while engine.ssdkv("verified_hits", result="same") == before:
            assert time.monotonic() < end
            (answer,) = engine.answers([PROMPTS[0][: BLOCK + 5]])
            assert answer.cached == 0
            engine.settle()
            assert engine.llm.reset_prefix_cache()
        assert engine.ssdkv("store_suspended") == 0

    def check_suspended(
        self,
        engine: Engine,
        wanted: list[tuple[int, ...]],
        lora: LoRARequest | None = None,
    ) -> None:
        """Answers of the changed engine are its own, from the first verified hit on."""
        del self.log[:]
        answers = engine.answers(PROMPTS, lora=lora)
        assert [answer.tokens for answer in answers] == wanted
        assert engine.ssdkv("verified_hits", result="differs") >= 1
        assert engine.ssdkv("store_suspended") == 1
        (line,) = (line for line in self.log if "THE STORE IS SUSPENDED" in line)
        assert "`ssdkv resume" in line
        engine.settle()
        self.ask(engine, wanted, [0] * len(PROMPTS), lora)

    def resume(self) -> None:
        result = CliRunner().invoke(app, ["resume", *(one["path"] for one in self.place)])
        assert result.exit_code == 0, result.output
        assert "is in use again; it was suspended because" in result.output


def stock(
    model: Path, changes: list[Change]
) -> tuple[list[tuple[int, ...]], list[list[tuple[int, ...]]]]:
    """Answers of stock vLLM, and of stock vLLM with each change."""
    with Engine(
        model,
        kv_tokens=16384,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
    ) as engine:
        right = [answer.tokens for answer in engine.answers(PROMPTS)]
        found = []
        for change in changes:
            with changed(engine, change):
                found.append([answer.tokens for answer in engine.answers(PROMPTS)])
    return right, found


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize(
    ("mode", "names"),
    [("page", ["kernel"]), ("sparse", ["kernel"])]
    if not SOAK_ROUNDS
    else [
        pytest.param(mode, list(CHANGES), marks=pytest.mark.soak)
        for mode in ("reuse", "page", "sparse")
    ],
)
def test_changes_that_no_digest_sees_suspend_the_store(
    mode: str, names: list[str], models: dict[str, Path], devices: Devices, log: list[str]
) -> None:
    changes = [CHANGES[name] for name in names]
    right, others = stock(models["llama"], changes)
    assert all(a != b for tokens in others[:4] for a, b in zip(tokens, right, strict=True))
    rig = Rig(models["llama"], mode, devices(1), log)
    rig.fill(right)
    for change, wanted in zip(changes, others, strict=True):
        with rig.engine() as engine, changed(engine, change):
            rig.check_suspended(engine, wanted)
        with rig.engine() as engine:  # later runs know
            rig.ask(engine, right, [0] * len(PROMPTS))
            assert engine.ssdkv("store_suspended") == 1
        rig.resume()
    with rig.engine() as engine:
        rig.check_found(engine, right)
        rig.check_one_block(engine)


@pytest.mark.soak
@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("mode", ["reuse", "page"])
def test_another_adapter_suspends_the_store(
    mode: str, models: dict[str, Path], devices: Devices, log: list[str], tmp_path: Path
) -> None:
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    one, two = (
        LoRARequest("helpful", seed, str(make_adapter(models["llama"], tmp_path / f"{seed}", seed)))
        for seed in (1, 2)
    )
    with Engine(
        models["llama"], kv_tokens=16384, max_num_batched_tokens=CHUNK, **options
    ) as engine:
        right, others = (
            [answer.tokens for answer in engine.answers(PROMPTS, lora=lora)] for lora in (one, two)
        )
    rig = Rig(models["llama"], mode, devices(1), log, options)
    rig.fill(right, one)
    with rig.engine(two) as engine:
        rig.check_suspended(engine, others, two)
    rig.resume()
    with rig.engine(one) as engine:
        rig.check_found(engine, right, one)


# ---- rounding ----


@dataclass(frozen=True)
class Kind:
    """An engine whose hits are all verified."""

    model: str
    dtype: str
    mode: str
    chunk: int
    ranks: int = 1
    lora: bool = False
    drafts: bool = False
    selects: bool = False

    def __str__(self) -> str:
        more = " lora" * self.lora + " eagle" * self.drafts + f" tp{self.ranks}" * (self.ranks > 1)
        more += " bounds" * self.selects
        return f"{self.model} {self.dtype} {self.mode} {self.chunk}{more}"


KINDS = (
    Kind("llama", "bfloat16", "page", 128),
    Kind("llama", "bfloat16", "page", 128, selects=True),
    Kind("llama", "bfloat16", "reuse", 512),
    Kind("llama", "float32", "page", 512),
    Kind("llama", "float32", "reuse", 96),
    Kind("llama", "bfloat16", "reuse", 256, ranks=2),
    Kind("llama", "float32", "page", 256, ranks=2),
    Kind("llama", "bfloat16", "reuse", 256, lora=True),
    Kind("llama", "bfloat16", "reuse", 256, drafts=True),
    Kind("mixtral", "bfloat16", "reuse", 256),
    Kind("gemma3", "bfloat16", "reuse", 256),
    Kind("qwen3_next", "bfloat16", "reuse", 1024),
)
VERIFIED = 1000
BATCH = 6


def verify_many(engine: Engine, kind: Kind, wanted: int, lora: LoRARequest | None) -> list[float]:
    """Deviations of so many hits, in units of the tolerance. All of them are the same block."""
    source = random.Random(3)
    heads = prompts((4000 if kind.model == "qwen3_next" else 1500,) * 4, seed=3)

    def ask(batch: list[list[int]]) -> None:
        answers = engine.answers(batch, 40, lora=lora)
        assert engine.llm.reset_prefix_cache()
        # Later ones go on after an answer, as turns of a conversation do.
        heads[4:] = [[*p, *a.tokens] for p, a in zip(batch[:4], answers, strict=False)]

    engine.llm.collective_rpc("take_deviations")
    ask(heads[:])
    for turn in range(wanted):
        if engine.ssdkv("verified_hits", result="same") >= wanted * kind.ranks:
            break
        tails = prompts([source.randrange(1, 300) for _ in range(BATCH)], seed=10 + turn)
        starts = [one[: source.randrange(200, 4000)] for one in source.choices(heads, k=BATCH)]
        ask([start + tail for start, tail in zip(starts, tails, strict=True)])
    assert engine.ssdkv("verified_hits", result="same") >= wanted * kind.ranks
    assert engine.ssdkv("verified_hits", result="differs") == 0
    assert engine.ssdkv("store_suspended") == 0
    return [one for rank in engine.llm.collective_rpc("take_deviations") for one in rank]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS] if SOAK_ROUNDS else KINDS[:2],
    ids=str,
)
def test_rounding_is_no_difference(
    kind: Kind,
    models: dict[str, Path],
    devices: Devices,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    options: dict[str, Any] = {}
    lora = None
    if kind.lora:
        adapter = make_adapter(models[kind.model], tmp_path / "adapter", 1)
        lora = LoRARequest("helpful", 1, str(adapter))
        options = {"enable_lora": True, "max_lora_rank": RANK}
    if kind.drafts:
        options["speculative_config"] = eagle(models[kind.model], tmp_path / "eagle")
    place = devices(1, "1GiB")
    store = reuse_mode(place) if kind.mode == "reuse" else page_mode(place)
    store |= {"dram_gib": "32MiB"} if kind.ranks > 1 else {}
    store |= {"selector": "bounds", "sparse": {"exact_below": 0}} if kind.selects else {}
    size = 32768 if kind.mode == "reuse" else BATCH * kv_tokens(128, kind.chunk)
    # Workers look for the extension, too: behind the package that is installed.
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
    with Engine(
        models[kind.model],
        ssdkv={**store, "verify_hits": 1},
        kv_tokens=size,
        dtype=kind.dtype,
        max_num_batched_tokens=kind.chunk,
        tensor_parallel_size=kind.ranks,
        in_process=kind.ranks == 1,
        worker_extension_cls=DEVIATIONS,
        **options,
    ) as engine:
        wanted = -(-VERIFIED // len(KINDS)) if SOAK_ROUNDS else BATCH
        found = verify_many(engine, kind, wanted, lora)
    record_property(str(kind), f"{len(found)} comparisons, the largest {max(found):.3g}")
    assert max(found) < MARGIN
