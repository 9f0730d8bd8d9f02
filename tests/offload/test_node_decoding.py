"""Decoding without vLLM, with contexts on nodes that attend to them: as without nodes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.kit.node import NodeProcess
from tests.kit.server import free_port
from tests.kit.waiting import until
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.offload import OffloadConfig
from vllm_ssdkv.config.selectors import SelectorName
from vllm_ssdkv.kernels.operands.block_layout import MAX_HEAD_SIZE
from vllm_ssdkv.node.client.attention import AttentionWire
from vllm_ssdkv.node.client.session import Session
from vllm_ssdkv.node.protocol.credentials import make_keys
from vllm_ssdkv.node.protocol.messages import AttendRoom, AttendShape
from vllm_ssdkv.profiling.decode_harness.decoder import PagedDecoder
from vllm_ssdkv.profiling.decode_harness.models import make_model, small_config
from vllm_ssdkv.profiling.decode_harness.tokens import (
    CHOOSING,
    COUNT,
    ROOM,
    config_of,
    prompts,
)

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

HEAD_SIZE = 16
LITTLE_DRAM = 5 / 1024
"""GiB: most of the contexts have no frame."""

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NodeProcess]]:
    """Three nodes."""
    with ExitStack() as stack:
        found = []
        for number in range(3):
            root = tmp_path_factory.mktemp(f"n{number}")
            ssd = {"path": str(root / "ssd"), "capacity": "1GiB"}
            node = NodeProcess(root, devices=[ssd], store_share=0.06, attend_threads=1)
            found.append(stack.enter_context(node))
        yield found


@dataclass
class Decoded:
    """Tokens by request, logits [steps, requests, vocabulary], and counters."""

    tokens: list[list[int]]
    logits: torch.Tensor
    counters: Counters


Between = Callable[[int, PagedDecoder], None]


def decoded(
    directory: Path,
    selector: SelectorName,
    nodes: Sequence[NodeProcess] = (),
    between: Between | None = None,
    head_size: int = HEAD_SIZE,
    **options: object,
) -> Decoded:
    """Decode both prompts together; ``between`` is called before each step."""
    model: Any = make_model(small_config("llama", head_size=head_size), CPU, torch.float32)
    update: dict[str, object] = {"dram_gib": LITTLE_DRAM, **options}
    if nodes:
        update["nodes"] = tuple(node.address for node in nodes)
        update["offload"] = OffloadConfig(kind="node")
    config = config_of(selector, budget=0.25).model_copy(update=update)
    names, tokens, seen = ["a", "b"], [], []
    with PagedDecoder(model, config, ROOM, directory) as decoder:
        asked = prompts(model.config.vocab_size)
        logits = torch.stack([decoder.prefill(*pair) for pair in zip(names, asked, strict=True)])
        for step in range(COUNT):
            seen.append(logits)
            ids = logits.argmax(-1)
            tokens.append(ids.tolist())
            if between is not None:
                between(step, decoder)
            logits = decoder.step(names, ids)
        for name in names:
            decoder.forget(name)
        counters = decoder.worker.counters
    by_request = [list(row) for row in zip(*tokens, strict=True)]
    return Decoded(by_request, torch.stack(seen), counters)


@pytest.fixture(scope="module")
def without_nodes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[SelectorName], Decoded]:
    """Outcomes without nodes."""

    @functools.cache
    def decode(selector: SelectorName) -> Decoded:
        return decoded(tmp_path_factory.mktemp("without") / "store", selector)

    return decode


@pytest.mark.parametrize("selector", ["exact", *CHOOSING])
def test_the_same_comes_out(
    selector: SelectorName,
    without_nodes: Callable[[SelectorName], Decoded],
    nodes: list[NodeProcess],
    tmp_path: Path,
) -> None:
    without = without_nodes(selector)
    there = decoded(tmp_path / "state", selector, nodes)
    assert there.tokens == without.tokens
    torch.testing.assert_close(there.logits, without.logits, atol=2e-4, rtol=2e-4)
    assert there.counters.total("offload_tickets") > 0
    for cause in ("error", "answer", "deadline", "room"):
        assert there.counters.total("offload_failures", cause=cause) == 0


def test_heads_may_be_as_large_as_kernels_have_them(
    nodes: list[NodeProcess], tmp_path: Path
) -> None:
    dram = 4 * LITTLE_DRAM  # of 32 blocks, half have a frame
    there = decoded(tmp_path, "exact", nodes, head_size=MAX_HEAD_SIZE, dram_gib=dram)
    assert there.counters.total("offload_tickets") > 0
    for cause in ("error", "answer", "deadline"):
        assert there.counters.total("offload_failures", cause=cause) == 0


def test_keys_of_both_sides_change_no_token(
    without_nodes: Callable[[SelectorName], Decoded],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Pages go to the node, queries and states go through TLS."""
    keys = tmp_path / "keys"
    make_keys(keys, 1)
    root = tmp_path / "node"
    root.mkdir()
    address = f"tcp://127.0.0.1:{free_port()}"
    ssd = {"path": str(root / "ssd"), "capacity": "1GiB"}
    options = {"devices": [ssd], "store_share": 0.06, "attend_threads": 1}
    with NodeProcess(root, keys, listen=[address], **options) as node:
        there = decoded(tmp_path / "state", "bounds", [node], node_keys=keys)
        with pytest.raises(StoreError, match="keys"):
            decoded(tmp_path / "other", "bounds", [node])
    assert there.tokens == without_nodes("bounds").tokens
    assert there.counters.total("offload_tickets") > 0
    for cause in ("error", "answer", "deadline"):
        assert there.counters.total("offload_failures", cause=cause) == 0
    errors = [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]
    assert errors == [], "an engine that ends has lost no node"


@pytest.mark.parametrize("selector", ["exact", "bounds"])
def test_a_node_that_dies_costs_nothing_where_there_are_copies(
    selector: SelectorName,
    without_nodes: Callable[[SelectorName], Decoded],
    nodes: list[NodeProcess],
    tmp_path: Path,
) -> None:
    def between(step: int, decoder: PagedDecoder) -> None:
        if step == 4:
            nodes[1].kill()
        elif step == 12:
            nodes[1].start()
        elif step == 13:  # it is back, and attends again
            offloader = decoder.worker.page_mode.offloader
            assert offloader is not None
            until(lambda: offloader.device.in_use == len(nodes))

    there = decoded(tmp_path / "state", selector, nodes, between, replicas=2)
    assert there.tokens == without_nodes(selector).tokens
    assert there.counters.total("offload_failures", cause="error") > 0


def test_wrong_pages_are_read_from_the_other_copy(
    without_nodes: Callable[[SelectorName], Decoded], nodes: list[NodeProcess], tmp_path: Path
) -> None:
    def between(step: int, decoder: PagedDecoder) -> None:
        if step == 0:
            for path in (nodes[0].root / "ssd" / "volumes").rglob("*"):
                if path.is_file() and path.stat().st_size > 1 << 20:
                    garble(path)

    there = decoded(tmp_path / "state", "exact", nodes, between, replicas=2)
    assert there.tokens == without_nodes("exact").tokens
    assert there.counters.total("offload_failures", cause="answer") > 0


def garble(path: Path) -> None:
    """Flip a byte of every page that has been written."""
    with path.open("r+b") as file:
        for at in range(0, min(path.stat().st_size, 4 << 20), 4096):
            file.seek(at)
            page = file.read(16)
            if any(page):
                file.seek(at)
                file.write(bytes([page[0] ^ 0xFF]))


@pytest.mark.parametrize(
    ("selector", "room"),
    [
        pytest.param("exact", AttendRoom(1, 100), id="blocks"),
        pytest.param("exact", AttendRoom(100, 1), id="rows"),
        pytest.param("bounds", AttendRoom(3, 5), id="both"),
    ],
)
def test_nodes_with_little_room_attend_to_what_fits(
    selector: SelectorName,
    room: AttendRoom,
    without_nodes: Callable[[SelectorName], Decoded],
    nodes: list[NodeProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest is read. No node is told of more than it has room for."""
    told: dict[AttentionWire, tuple[set[int], dict[int, int]]] = {}
    peaks = [0, 0]
    real = AttentionWire.open, AttentionWire.tell_blocks, AttentionWire.tell_row

    def opened(session: Session, shape: AttendShape, timeout: float) -> AttentionWire:
        wire = real[0](session, shape, timeout)
        wire.room = room
        told[wire] = set(), {}
        return wire

    def tell_blocks(
        wire: AttentionWire, slots: I64, places: I64, digests: U64, timeout: float
    ) -> None:
        told[wire][0].update(slots.tolist())
        peaks[0] = max(peaks[0], len(told[wire][0]))
        real[1](wire, slots, places, digests, timeout)

    def tell_row(wire: AttentionWire, row: int, keep: int, slots: I64, timeout: float) -> None:
        told[wire][1][row] = keep + len(slots)
        peaks[1] = max(peaks[1], sum(told[wire][1].values()))
        real[2](wire, row, keep, slots, timeout)

    forget = AttentionWire.forget

    def forgets(wire: AttentionWire, slots: I64, rows: Sequence[int], timeout: float) -> None:
        told[wire][0].difference_update(slots.tolist())
        for row in rows:
            told[wire][1].pop(row, None)
        forget(wire, slots, rows, timeout)

    monkeypatch.setattr(AttentionWire, "open", opened)
    monkeypatch.setattr(AttentionWire, "tell_blocks", tell_blocks)
    monkeypatch.setattr(AttentionWire, "tell_row", tell_row)
    monkeypatch.setattr(AttentionWire, "forget", forgets)
    there = decoded(tmp_path / "state", selector, nodes)
    assert there.tokens == without_nodes(selector).tokens
    assert there.counters.total("offload_tickets") > 0
    assert 0 < peaks[0] <= room.blocks
    assert 0 < peaks[1] <= room.listed
    # Each node is told of once, however many steps it has no room in.
    assert 1 <= there.counters.total("offload_failures", cause="room") <= len(nodes)
    assert there.counters.total("offload_failures", cause="error") == 0
