"""Attention over contexts that are X, in parts that are projected at once, by a plain softmax."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from vllm_ssdkv.attention.exact import NO_CONTEXT, RowBatch
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.kernels.dense import CpuKernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, PartialState
from vllm_ssdkv.kernels.step_clock import AttentionClock
from vllm_ssdkv.offload.xcache.input_layout import InputLayout
from vllm_ssdkv.offload.xcache.projected_context import (
    PROJECTED_TOKENS,
    InputProjector,
    ProjectedContext,
)
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.read.context_stream import ContextStream, Piece

BLOCK, HEADS, SIZE, LAYER = 16, 2, 8, 1
HIDDEN = HEADS * SIZE
CPU = torch.device("cpu")
GEOMETRY = SlotGeometry("paged", 2, HEADS, 1, 2 * BLOCK * SIZE * 4)
LAYOUT = BlockLayout.unpadded(BLOCK, BLOCK, HEADS, SIZE, torch.float32)


class Linear:
    """In place of the model's layers: K knows the position, V does not."""

    def __init__(self) -> None:
        self.weight = torch.randn(HIDDEN, 2 * HIDDEN) / HIDDEN**0.5
        self.most = 0

    def project(
        self, layer: int, inputs: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert layer == LAYER
        self.most = max(self.most, len(inputs))
        key, value = (inputs @ self.weight).chunk(2, dim=-1)
        key = key + torch.sin(positions / 7.0)[:, None]
        return key.reshape(-1, HEADS, SIZE), value.reshape(-1, HEADS, SIZE)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(256 * GEOMETRY.frame_bytes)
    yield made
    made.close()


@pytest.mark.parametrize("per_slot", [1, 2])
def test_rows_attend_to_all_of_their_blocks_and_to_no_others(arena: Arena, per_slot: int) -> None:
    """Rows of 0, 40, 1 and 70 blocks: parts of 64 begin and end amid rows, and the third row amid a
    slot; rows in another order in the batch."""
    torch.manual_seed(0)
    inputs = InputLayout(GEOMETRY, BLOCK, HIDDEN, torch.float32, per_slot)
    blocks = [0, 40, 1, 70]
    x = torch.randn(sum(blocks), 2, BLOCK, HIDDEN)
    slots = iter(np.random.default_rng(0).permutation(256).tolist())
    found = []
    for own in torch.split(x, blocks):
        for slot in torch.split(own, per_slot):
            place = next(slots)
            found += [place] * len(slot)
            more = torch.randn(per_slot - len(slot), 2, BLOCK, HIDDEN)
            whole = torch.cat([slot, more]).transpose(0, 1).reshape(2, -1, HIDDEN)
            inputs.put(whole, arena.view(place * GEOMETRY.frame_bytes, GEOMETRY.frame_bytes))
    places = np.array(found)
    base = np.uint64(arena.address + GEOMETRY.layer_offset(LAYER)) + places.astype(
        np.uint64
    ) * np.uint64(GEOMETRY.frame_bytes)
    ends = np.cumsum(blocks).astype(np.int32)
    index = np.concatenate([np.arange(n, dtype=np.int64) for n in blocks])
    piece = Piece(base, index, (ends - blocks).astype(np.int32), ends)
    stream = cast(ContextStream, SimpleNamespace(pieces=lambda layer: iter([piece])))
    order = [3, 0, 2, 1]
    lengths = np.array([blocks[row] * BLOCK + 1 for row in order], dtype=np.int64)
    batch = RowBatch.build(
        np.arange(5, dtype=np.int64),
        lengths,
        np.zeros((4, 128), dtype=np.int32),
        lengths // BLOCK,
        np.array(order, dtype=np.int64),
        BLOCK,
    )
    linear, query, kernels = Linear(), torch.randn(4, HEADS, SIZE), CpuKernels(1)
    projector = InputProjector(inputs, LAYOUT, arena, linear)
    context = ProjectedContext(NO_CONTEXT, stream, LAYER, batch, projector)
    state = PartialState.empty(4, HEADS, SIZE, CPU)
    clock = AttentionClock()
    clock.start()
    context.begin(query, 0.5)
    context.fold(kernels, query, state, 0.5, clock)
    out = torch.empty(4, HEADS, SIZE)
    kernels.finish(state, out)
    assert linear.most == PROJECTED_TOKENS
    for place, row in enumerate(order):
        own = x[ends[row] - blocks[row] : ends[row], LAYER].reshape(-1, HIDDEN)
        if not len(own):
            assert not state.acc[place].any()
            continue
        key, value = linear.project(LAYER, own, torch.arange(len(own)))
        weights = torch.softmax(0.5 * torch.einsum("hd,thd->th", query[place], key), dim=0)
        wanted = torch.einsum("th,thd->hd", weights, value)
        torch.testing.assert_close(out[place], wanted, rtol=1e-5, atol=1e-5)
    counters = Counters()
    projector.count(counters)
    assert counters.total("x_cache_bytes") == sum(blocks) * inputs.nbytes
    assert counters.total("x_cache_projection_seconds") > 0


def test_rates_are_measured_once_for_a_while(arena: Arena) -> None:
    inputs = InputLayout(GEOMETRY, BLOCK, HIDDEN, torch.float32)
    calls: list[int] = []

    class Counting(Linear):
        def project(self, *work: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
            calls.append(len(work[1]))
            return super().project(*work)

    projector = InputProjector(inputs, LAYOUT, arena, Counting())
    assert projector.copying == projector.projecting == 0
    for _ in range(5):
        projector.measure(CPU, LAYER)
    assert set(calls) == {PROJECTED_TOKENS}
    assert len(calls) < 10
    assert projector.copying > 0
    assert projector.projecting > 0
