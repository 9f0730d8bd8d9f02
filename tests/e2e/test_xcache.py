"""Contexts that are stored as X, with the real vLLM: the tokens of stock vLLM, from half the bytes.

Models without grouped queries, one with rotary positions and one with learned ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from vllm.model_executor.layers.linear import RowParallelLinear

from tests.e2e.models import make_llama, prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import SMALL_DRAM
from tests.e2e.xcache import BLOCK, CHUNK, PROMPTS, WINDOW, comparing, start
from tests.kit.engine import Engine
from vllm_ssdkv.connector import active_worker
from vllm_ssdkv.connector.worker.worker import SSDKVWorker

MODELS = {"llama-mha": SMALL_DRAM, "opt": "5.5MiB"}
"""DRAM that holds a part of the contexts, of which a frame holds two blocks as X."""


def shape_of(worker: SSDKVWorker) -> tuple[int, int]:
    """Layers of the model, and bytes of X of a token in one of them."""
    layout = worker.layout
    return layout.geometry.layers, layout.kv_heads * layout.head_size * layout.dtype.itemsize


@dataclass
class Case:
    engine: Engine
    wanted: list[tuple[int, ...]]

    @property
    def worker(self) -> SSDKVWorker:
        worker = active_worker.worker()
        assert worker is not None
        return worker

    def share(self, share: float) -> None:
        """Have so much of the contexts be X from now on."""
        self.engine.scheduler.connector.scheduler.policy.x_admission.share = share

    def run(self, after_step: Callable[[int], None] | None = None) -> list[tuple[int, ...]]:
        for number, prompt in enumerate(PROMPTS):
            self.engine.add(str(number), prompt)
        found = self.engine.run(after_step)
        return [found[str(number)] for number in range(len(PROMPTS))]

    def assert_clean(self) -> None:
        self.engine.settle()
        self.engine.assert_nothing_held()
        assert self.engine.scheduler.connector.scheduler.remembers() == {}
        assert self.worker.page_mode.x_cache is not None
        assert self.worker.page_mode.x_cache.open_blocks == 0


@pytest.fixture(scope="module")
def mha(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mha")
    llama = make_llama(root / "llama", layers=3, heads=4, kv_heads=4)
    return {"llama-mha": llama, "opt": models["opt"]}


@pytest.fixture(scope="module")
def stock_mha(mha: dict[str, Path]) -> Stock:
    return Stock(mha)


@pytest.fixture(scope="module", params=MODELS)
def case(
    request: pytest.FixtureRequest,
    mha: dict[str, Path],
    stock_mha: Stock,
    devices: Callable[..., list[dict[str, str]]],
) -> Iterator[Case]:
    wanted = [answer.tokens for answer in stock_mha.answers(request.param, PROMPTS)]
    with start(mha[request.param], devices(2), dram=MODELS[request.param]) as engine:
        yield Case(engine, wanted)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_tokens_are_those_of_stock_vllm(case: Case, share: float) -> None:
    case.share(share)
    engine = case.engine
    before = engine.ssdkv("x_cache_requests"), engine.ssdkv("offload_tickets")
    assert case.run() == case.wanted
    case.assert_clean()
    as_x = engine.ssdkv("x_cache_requests") - before[0]
    assert as_x == (len(PROMPTS) if share == 1 else 2)
    assert (engine.ssdkv("offload_tickets") > before[1]) == (share < 1)
    assert engine.ssdkv("context_pages_streamed", tier="ssd") > 0


def test_nobody_finds_x(case: Case) -> None:
    prompt = prompts((300,), 9)[0]
    cached = []
    for share in (1.0, 0.0, 1.0):
        case.share(share)
        cached.append(case.engine.answers([prompt], 4)[0].cached)
        case.engine.settle()
    # The third finds the K and V of the second, and goes on as such.
    assert cached == [0, 0, (len(prompt) - 1) // BLOCK * BLOCK]


def test_bytes_are_those_of_the_formula(case: Case) -> None:
    """X of a token is half of its K and V; a step reads what is behind the window, once."""
    case.share(1.0)
    before = case.engine.ssdkv("x_cache_bytes"), case.engine.ssdkv("bytes_used")
    pages = {t: case.engine.ssdkv("context_pages_streamed", tier=t) for t in ("dram", "ssd")}
    length, answer = 500, 24
    case.engine.answers(prompts((length,), 11), answer)
    case.engine.settle()
    starts = [*range(0, length, CHUNK), *range(length, length + answer - 1)]
    contexts = [max(0, computed - WINDOW + 1) // BLOCK for computed in starts]
    blocks, slots = sum(contexts), sum(-(-blocks // 2) for blocks in contexts)
    layers, x_bytes = shape_of(case.worker)
    assert case.engine.ssdkv("x_cache_bytes") - before[0] == blocks * BLOCK * layers * x_bytes
    # Two blocks are read as one of K and V is.
    read = sum(case.engine.ssdkv("context_pages_streamed", tier=t) - n for t, n in pages.items())
    assert read == slots * case.worker.layout.geometry.kv_pages


def test_slots_bytes_written_and_wear_are_half(case: Case) -> None:
    names = ("slots_stored", "bytes_written", "wear_bytes")
    most, allocated, found = dict[float, int](), dict[float, int](), dict[float, list[float]]()
    x_cache, open_blocks = case.worker.page_mode.x_cache, 0
    assert x_cache is not None
    ours = case.engine.scheduler.connector.scheduler
    case.engine.answers(prompts((200,), 13), 4)  # what nobody has counted has no sample
    case.engine.settle()
    for share in (1.0, 0.0):  # X is not found by who is stored as K and V
        case.share(share)
        before = [case.engine.ssdkv(name) for name in names]
        first = ours.index.counters["allocated"]
        case.engine.add("one", prompts((500,), 12)[0], 24)
        most[share] = 0

        def look(number: int, share: float = share) -> None:
            held = [one.reserved + len(set(one.slots)) for one in ours.requests.values()]
            most[share] = max(most[share], *held, 0)
            nonlocal open_blocks
            open_blocks = max(open_blocks, x_cache.open_blocks)

        case.engine.run(look)
        case.engine.settle()
        allocated[share] = ours.index.counters["allocated"] - first
        after = [case.engine.ssdkv(name) for name in names]
        found[share] = [new - old for new, old in zip(after, before, strict=True)]
    slot_bytes = case.worker.layout.geometry.slot_bytes
    assert most == {0.0: 17, 1.0: 9}  # of 524 tokens at most
    assert open_blocks == 2  # the step that completes a slot lets go of its X
    assert allocated == {0.0: 16, 1.0: 8}
    assert found[0.0] == [16, 16 * slot_bytes, 16 * slot_bytes]
    assert found[1.0] == [8, 8 * slot_bytes, 8 * slot_bytes]


def test_given_up_and_preempted(case: Case) -> None:
    case.share(0.5)
    preempted = case.engine.metric("vllm:num_preemptions")
    again = case.engine.llm.llm_engine

    def disturb(number: int) -> None:
        if number == 20:
            case.engine.abort("2")
        elif number == 26:
            assert again.reset_prefix_cache(reset_running_requests=True)

    for number, prompt in enumerate(PROMPTS):
        case.engine.add(str(number), prompt)
    found = case.engine.run(disturb)
    kept = [0, 1, 3]
    assert [found[str(n)] for n in kept] == [case.wanted[n] for n in kept]
    assert case.engine.metric("vllm:num_preemptions") > preempted
    case.assert_clean()


def test_projected_k_and_v_are_those_of_the_model(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.share(1.0)
    projector = case.worker.page_mode.projector
    assert projector is not None
    forward = RowParallelLinear.forward

    def outputs(linear: RowParallelLinear, inputs: torch.Tensor) -> object:
        assert not projector.projecting, "an output is projected for nothing"
        return forward(linear, inputs)

    monkeypatch.setattr(RowParallelLinear, "forward", outputs)
    with comparing() as compared:
        case.engine.answers(prompts((200,), 3), 40)
    assert compared.blocks > 50
    assert compared.worst <= 1e-5
    case.assert_clean()
