"""Decoding without vLLM, with contexts attended to by the host: as without a device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.kit.waiting import PATIENCE_S
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.offload import OffloadConfig, OffloadFault, OffloadThrottle
from vllm_ssdkv.config.selectors import SelectorName
from vllm_ssdkv.offload.host import HostDevice
from vllm_ssdkv.offload.offloader import Offloader
from vllm_ssdkv.offload.protocol import ContextPages, ContextWork
from vllm_ssdkv.offload.testing.faulty import FaultyDevice
from vllm_ssdkv.offload.tickets import LocalTicket
from vllm_ssdkv.profiling.decode_harness.decoder import PagedDecoder, Room
from vllm_ssdkv.profiling.decode_harness.models import make_model, small_config
from vllm_ssdkv.profiling.decode_harness.tokens import (
    CHOOSING,
    COUNT,
    FAMILIES,
    ROOM,
    config_of,
    own_tokens,
    paged_logits,
    prompts,
)

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_SIZE = 2, 4, 2, 16
"""Of the model."""

CPU = torch.device("cpu")
EXAMPLES = Path(__file__).parents[2] / "examples" / "guests"
HOST = OffloadConfig(threads=1, share=1.0)
"""A device that attends to everything."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class PunctualHost(HostDevice):
    """A host whose work is done when it is handed in: only faults make it late."""

    def submit(self, work: ContextWork) -> LocalTicket:
        ticket = super().submit(work)
        assert ticket.wait(PATIENCE_S)
        return ticket


@dataclass
class Decoded:
    """Tokens by request, logits [steps, requests, vocabulary], and counters."""

    tokens: list[list[int]]
    logits: torch.Tensor
    counters: Counters
    in_use: bool
    """True if the device is in use at the end."""


def decoded(
    directory: Path,
    selector: SelectorName,
    offload: OffloadConfig | None,
    *,
    fault: OffloadFault | None = None,
    deadline_s: float = 30.0,
) -> Decoded:
    """Decode both prompts together, of which most comes from the drive."""
    model: Any = make_model(small_config("llama", head_size=HEAD_SIZE), CPU, torch.float32)
    config = config_of(selector, budget=0.25).model_copy(update={"offload": offload})
    if selector == "exact":
        config = config.model_copy(update={"dram_gib": 5 / 1024})
    names, tokens, seen = ["a", "b"], [], []
    with PagedDecoder(model, config, ROOM, directory) as decoder:
        worker = decoder.worker
        if fault is not None:
            assert offload is not None
            share = offload.share
            assert worker.page_mode.offloader is not None
            assert worker.page_mode.offloader.close(10.0)
            worker.page_mode.offloader = Offloader(
                FaultyDevice(PunctualHost(1), fault), deadline_s, worker.counters, share
            )
        asked = prompts(model.config.vocab_size)
        logits = torch.stack([decoder.prefill(*pair) for pair in zip(names, asked, strict=True)])
        for _ in range(COUNT):
            seen.append(logits)
            ids = logits.argmax(-1)
            tokens.append(ids.tolist())
            logits = decoder.step(names, ids)
        for name in names:
            decoder.forget(name)
        in_use = worker.page_mode.offloader is not None and worker.page_mode.offloader.in_use
    by_request = [list(row) for row in zip(*tokens, strict=True)]
    return Decoded(by_request, torch.stack(seen), worker.counters, in_use)


Without = Callable[[SelectorName], Decoded]


@pytest.fixture(scope="module")
def without_device(tmp_path_factory: pytest.TempPathFactory) -> Without:
    """Outcomes without a device."""

    @functools.cache
    def decode(selector: SelectorName) -> Decoded:
        return decoded(tmp_path_factory.mktemp("without") / "store", selector, None)

    return decode


@pytest.mark.parametrize("selector", ["exact", *CHOOSING])
def test_the_same_comes_out(
    selector: SelectorName, without_device: Without, tmp_path: Path
) -> None:
    without = without_device(selector)
    assert without.counters.total("offload_tickets") == 0
    got = decoded(tmp_path / "store", selector, HOST)
    assert got.in_use
    assert got.tokens == without.tokens
    assert torch.allclose(got.logits, without.logits, atol=2e-5)
    assert got.counters.total("offload_tickets") == LAYERS * (COUNT + 1)
    # The rest of a prompt behind its last whole chunk is short enough, too.
    assert got.counters.total("offload_steps", by="device") == COUNT + 1
    assert got.counters.total("offload_steps", by="step") > 0
    if selector == "exact":
        model: Any = make_model(small_config("llama", head_size=HEAD_SIZE), CPU, torch.float32)
        asked = prompts(model.config.vocab_size)
        assert got.tokens == [own_tokens(model, ids, COUNT) for ids in asked]
        assert got.counters.total("context_pages_streamed", tier="ssd") > 0


@pytest.mark.parametrize("share", [0.0, 0.03, 0.4, 0.9, "auto"])
@pytest.mark.parametrize("selector", ["exact", "bounds", "sparf"])
def test_no_share_changes_anything(
    selector: SelectorName,
    share: float | Literal["auto"],
    without_device: Without,
    tmp_path: Path,
) -> None:
    """Contexts are in DRAM and on the drive, and come in pieces."""
    without = without_device(selector)
    offload = HOST.model_copy(update={"share": share})
    got = decoded(tmp_path / "store", selector, offload)
    assert got.tokens == without.tokens
    assert torch.allclose(got.logits, without.logits, atol=2e-5)
    count = got.counters.total
    by = {way: count("offload_steps", by=way) for way in ("device", "step", "both")}
    if share == 0.0:
        assert (by["device"], by["both"], count("offload_tickets")) == (0, 0, 0)
    elif share == "auto":
        assert 0 < count("offload_tickets") < LAYERS * (COUNT + 1)
        assert count("offload_trials", of="contexts" if selector == "exact" else "pages") > 4
    elif selector == "exact":
        assert by["both"] == COUNT + 1
    else:  # chosen pages go one way as a whole, and the end of the prompt is exact
        assert by["device"] == (COUNT if share > 0.5 else 0)
        assert by["both"] == 1


@pytest.mark.parametrize("selector", ["exact", "bounds"])
def test_the_same_comes_out_of_several_drives(
    selector: SelectorName, without_device: Without, tmp_path: Path
) -> None:
    """Each attends to its part of the pages, into a state of its own."""
    without = without_device(selector)
    throttle = OffloadThrottle(profile="instinfer", drives=3)
    got = decoded(tmp_path / "store", selector, OffloadConfig(threads=1, throttle=throttle))
    assert got.in_use
    assert got.tokens == without.tokens
    assert torch.allclose(got.logits, without.logits, atol=2e-5)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "llama"])
def test_tokens_are_those_of_transformers_own_cache(family: str, tmp_path: Path) -> None:
    """Of other families: with norms of queries and keys, and with as many KV heads as heads."""
    model: Any = make_model(small_config(family, head_size=HEAD_SIZE), CPU, torch.float32)
    config = config_of("exact").model_copy(update={"offload": HOST, "dram_gib": 5 / 1024})
    asked = prompts(model.config.vocab_size)
    got, _ = paged_logits(model, config, asked, tmp_path / "store")
    assert got == [own_tokens(model, ids, COUNT) for ids in asked]


@pytest.mark.parametrize("selector", ["exact", "sparf"])
def test_a_guest_attends_as_the_host_does(
    selector: SelectorName,
    without_device: Without,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    without = without_device(selector)
    guest = OffloadConfig(kind="torch_device:TorchDevice", share=1.0)
    got = decoded(tmp_path / "store", selector, guest)
    assert got.tokens == without.tokens
    assert torch.allclose(got.logits, without.logits, atol=2e-5)
    assert got.counters.total("offload_tickets") == LAYERS * (COUNT + 1)


@pytest.mark.parametrize("share", [0.03, 0.9])
@pytest.mark.parametrize(
    ("kind", "cause", "after"),
    [("error", "error", 4), ("rows", "answer", 4), ("stall", "deadline", 4)],
)
def test_a_part_that_is_taken_back_changes_nothing(
    share: float,
    kind: Literal["error", "rows", "stall"],
    cause: str,
    after: int,
    without_device: Without,
    tmp_path: Path,
) -> None:
    without = without_device("exact")
    fault = OffloadFault(kind=kind, after=after)
    offload = HOST.model_copy(update={"share": share})
    deadline_s = 0.05 if kind == "stall" else 30.0
    got = decoded(tmp_path / "store", "exact", offload, fault=fault, deadline_s=deadline_s)
    assert got.tokens == without.tokens
    assert torch.allclose(got.logits, without.logits, atol=2e-5)
    assert got.counters.total("offload_failures", cause=cause) == 1
    assert not got.in_use


@pytest.mark.parametrize("selector", ["exact", "sparf"])
@pytest.mark.parametrize(
    ("kind", "cause", "after"),
    [("error", "error", 5), ("rows", "answer", 5), ("stall", "deadline", 0)],
)
def test_a_device_that_fails_changes_nothing(
    selector: SelectorName,
    kind: Literal["error", "rows", "stall"],
    cause: str,
    after: int,
    without_device: Without,
    tmp_path: Path,
) -> None:
    without = without_device(selector)
    fault = OffloadFault(kind=kind, after=after)
    deadline_s = 0.05 if kind == "stall" else 30.0
    got = decoded(tmp_path / "store", selector, HOST, fault=fault, deadline_s=deadline_s)
    assert got.tokens == without.tokens
    assert torch.allclose(got.logits, without.logits, atol=2e-5)
    assert got.counters.total("offload_tickets") == after + 1
    assert got.counters.total("offload_failures", cause=cause) == 1
    assert not got.in_use


@pytest.mark.parametrize("selector", ["exact", "sparf"])
def test_rows_whose_pages_are_held_are_lost(selector: SelectorName, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"requests \['a'"):
        decoded(
            tmp_path / "store",
            selector,
            HOST,
            fault=OffloadFault(kind="hold", after=4),
            deadline_s=0.05,
        )


@pytest.mark.parametrize("selector", ["exact", "bounds"])
def test_work_names_its_pages(selector: SelectorName, tmp_path: Path) -> None:
    """A device elsewhere has nothing else to go by."""
    model: Any = make_model(small_config("llama", head_size=HEAD_SIZE), CPU, torch.float32)
    config = config_of(selector, budget=0.25).model_copy(update={"offload": HOST})
    seen: list[ContextPages] = []

    class Seeing(HostDevice):
        def submit(self, work: ContextWork) -> LocalTicket:
            seen.append(work.pages)
            return super().submit(work)

    with PagedDecoder(model, config, ROOM, tmp_path / "store") as decoder:
        worker = decoder.worker
        own = worker.page_mode.offloader
        assert own is not None
        decoder.prefill("a", prompts(model.config.vocab_size)[0][:320])
        worker.page_mode.offloader = Offloader(Seeing(1), 30.0, worker.counters)
        decoder.step(["a"], torch.tensor([1]))
        blocks = decoder.context_tokens("a") // ROOM.block_tokens
        slots = set(worker.store.context_from("a", 0)[:blocks].tolist())
        assert own.close(10.0)
    assert len(seen) == LAYERS
    for pages in seen:
        found = set(pages.slots.tolist())
        block_bytes = ROOM.block_tokens * KV_HEADS * HEAD_SIZE * 2 * 4
        if selector == "exact":
            assert found == slots
            assert pages.nbytes == blocks * block_bytes
            assert pages.selection_bytes == 0
        else:
            assert set() < found < slots
            assert 0 < pages.nbytes < blocks * block_bytes / 2
            assert pages.selection_bytes == -(-blocks * KV_HEADS // 8)


def test_bytes_over_the_link(tmp_path: Path) -> None:
    """Per row, token and layer n (2 Hq d + Hq (4 d + 8)) + 4 n_kv d with 16-bit queries and n = 1,
    whatever the context."""
    model: Any = make_model(small_config("llama", head_size=HEAD_SIZE), CPU, torch.bfloat16)
    config = config_of("exact").model_copy(update={"offload": HOST})
    room = Room(requests=1, longest=1024, chunk=64)
    payloads = ("query", "partials", "selection", "kv")
    per_token = []
    with PagedDecoder(model, config, room, tmp_path / "store") as decoder:
        counters = decoder.worker.counters

        def counted() -> float:
            return sum(counters.total("offload_bytes", payload=payload) for payload in payloads)

        for prompt in (320, 640):
            logits = decoder.prefill("a", [i % 250 for i in range(prompt)])
            before = counted()
            for _ in range(160):
                logits = decoder.step(["a"], logits.reshape(-1, 256).argmax(-1))
            per_token.append((counted() - before) / 160 / LAYERS)
            decoder.forget("a")
    q, d = QUERY_HEADS, HEAD_SIZE
    formula = (2 * q * d + q * (4 * d + 8)) + 4 * KV_HEADS * d
    assert per_token == [pytest.approx(formula, rel=0.02)] * 2
