"""Blocks in HBM against stored ones: rounding is near, other weights are far."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_ssdkv.connector.kv_layout import KVLayout, joined_geometry
from vllm_ssdkv.connector.worker.block_comparison import (
    MOST_BYTES,
    TOLERANCE,
    BlockComparer,
    StoredBlocks,
    element_type,
    layers_of_tokens,
)
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
LAYERS, TOKENS, HEADS, SIZE = 3, 32, 2, 64


def geometry(kind: str, dtype: torch.dtype) -> SlotGeometry:
    if kind == "paged":
        return SlotGeometry("paged", LAYERS, HEADS, TOKENS // 16, 2 * 16 * SIZE * dtype.itemsize)
    return SlotGeometry("opaque", LAYERS, 1, 1, 2 * TOKENS * HEADS * SIZE * dtype.itemsize)


class Rig:
    """A cache of two blocks, and a frame that holds what the second one held."""

    def __init__(self, kind: str, dtype: torch.dtype, seed: int = 1):
        generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.values = torch.randn(LAYERS, 2, TOKENS * HEADS * SIZE * 2, generator=generator)
        self.caches = [layer.to(dtype) for layer in self.values]
        shape = geometry(kind, dtype)
        self.frame = np.full(shape.frame_bytes, 0xFF, np.uint8)
        pages = shape.heads * shape.groups
        for layer, cache in enumerate(self.caches):
            raw = cache[1].view(torch.uint8).numpy().reshape(pages, shape.payload_bytes)
            begin = shape.layer_offset(layer)
            held = self.frame[begin : begin + shape.layer_bytes].reshape(pages, shape.page_bytes)
            held[:, : shape.payload_bytes] = raw
        self.comparer = BlockComparer(self.caches, shape, dtype, TOKENS, {0})

    def becomes(self, layer: int, values: torch.Tensor) -> float:
        self.caches[layer][1] = values.to(self.dtype)
        return self.comparer.deviation(1, self.frame)


@pytest.mark.parametrize("kind", ["opaque", "paged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_near_and_others_are_far(kind: str, dtype: torch.dtype) -> None:
    rig = Rig(kind, dtype)
    assert rig.comparer.deviation(1, rig.frame) == 0
    noise = torch.randn(rig.values[1, 1].shape, generator=torch.Generator().manual_seed(2))
    tolerance = rig.comparer.tolerance
    assert rig.becomes(1, rig.values[1, 1] + 0.3 * tolerance * noise) < tolerance
    assert rig.becomes(1, rig.values[1, 1] + 2.5 * tolerance * noise) > tolerance
    assert rig.becomes(1, noise) > 1.5 * tolerance


class TestReordered:
    """Slots that have the tokens of a block in another order, for each head."""

    LAYOUT = BlockLayout.unpadded(TOKENS, 16, HEADS, SIZE, torch.float32)

    def comparer(self, rig: Rig) -> BlockComparer:
        shape = geometry("paged", torch.float32)
        return BlockComparer(rig.caches, shape, torch.float32, TOKENS, {0, 1, 2}, self.LAYOUT)

    @staticmethod
    def tokens(block: torch.Tensor) -> torch.Tensor:
        """A block in HBM as [heads, tokens, K and V]."""
        pages = block.view(HEADS, TOKENS // 16, 2, 16, SIZE).transpose(2, 3)
        return pages.reshape(HEADS, TOKENS, 2, SIZE)

    @staticmethod
    def block(tokens: torch.Tensor) -> torch.Tensor:
        return tokens.view(HEADS, TOKENS // 16, 16, 2, SIZE).transpose(2, 3).flatten()

    def shuffled(self, block: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        heads = self.tokens(block)
        mixed = [head[torch.randperm(TOKENS, generator=generator)] for head in heads]
        return self.block(torch.stack(mixed))

    def test_the_order_makes_no_difference(self) -> None:
        rig = Rig("paged", torch.float32)
        for layer in range(LAYERS):
            rig.caches[layer][1] = self.shuffled(rig.values[layer, 1])
        assert rig.comparer.deviation(1, rig.frame) > rig.comparer.tolerance
        assert self.comparer(rig).deviation(1, rig.frame) == 0

    def test_other_values_are_far_and_so_is_one_token(self) -> None:
        rig = Rig("paged", torch.float32)
        comparer = self.comparer(rig)
        noise = torch.randn(rig.values[1, 1].shape, generator=torch.Generator().manual_seed(2))
        rig.caches[1][1] = self.shuffled(rig.values[1, 1] + 0.3 * comparer.tolerance * noise)
        assert comparer.deviation(1, rig.frame) < comparer.tolerance
        rig.caches[1][1] = self.shuffled(rig.values[1, 1] + 2.5 * comparer.tolerance * noise)
        assert comparer.deviation(1, rig.frame) > comparer.tolerance
        rig.caches[1][1] = noise
        assert comparer.deviation(1, rig.frame) > 0.5
        other = self.tokens(rig.values[1, 1]).clone()
        other[:, 5] = self.tokens(noise)[:, 5]
        rig.caches[1][1] = self.shuffled(self.block(other))
        assert comparer.deviation(1, rig.frame) > comparer.tolerance

    def test_what_is_no_number_is_far(self) -> None:
        rig = Rig("paged", torch.float32)
        rig.caches[1][1] = torch.nan
        assert self.comparer(rig).deviation(1, rig.frame) == torch.inf


def test_the_worst_layer_counts_and_layers_behind_are_not_looked_at() -> None:
    rig = Rig("opaque", torch.float32)
    far = rig.becomes(2, -rig.values[2, 1])
    assert far > 1
    shape = geometry("opaque", torch.float32)
    fewer = BlockComparer(rig.caches[:2], shape, torch.float32, TOKENS, {0})
    assert fewer.deviation(1, rig.frame) == 0


def test_layers_of_several_sizes_are_compared_where_they_lie() -> None:
    """Other types of numbers than the largest layers have, such as an indexer's, are not."""
    generator, kind = torch.Generator().manual_seed(1), torch.float16
    wide, narrow = (torch.randn(2, size, generator=generator).to(kind) for size in (3000, 900))
    other = torch.zeros(2, 500, dtype=torch.uint8)
    caches = [other, narrow, wide]
    sizes = [cache[0].nbytes for cache in caches]
    shape = joined_geometry(sizes)
    stored = torch.cat([cache[1].view(torch.uint8) for cache in caches]).numpy()
    frame = np.zeros(shape.frame_bytes, np.uint8)
    frame[shape.header_bytes :][: len(stored)] = stored
    comparer = BlockComparer(caches, shape, kind, 10, {1}, None, sizes)
    other[1] = 255
    assert comparer.deviation(1, frame) == 0
    for cache in (narrow, wide):
        kept = cache[1].clone()
        cache[1] *= -1
        assert comparer.deviation(1, frame) > 1
        cache[1] = kept


def test_single_tokens_do_not_count_in_other_layers() -> None:
    """As where a mixture of experts sends a token another way."""
    rig = Rig("opaque", torch.bfloat16)
    values = rig.values[1, 1].clone()
    values[: len(values) // 3] = 100
    assert rig.becomes(1, values) < rig.comparer.tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_that_differs_is_seen(dtype: torch.dtype) -> None:
    rig = Rig("opaque", dtype)
    values = rig.values[0, 1].clone()
    size = len(values) // TOKENS
    values[5 * size : 6 * size] = torch.randn(size, generator=torch.Generator().manual_seed(3))
    assert rig.becomes(0, values) > rig.comparer.tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_of_tokens_is_near(dtype: torch.dtype) -> None:
    """Many numbers are the next one of their type, more than rounding makes in a first layer."""
    rig = Rig("opaque", dtype)
    other = rig.values[0, 1] * (1 + torch.finfo(dtype).eps / 2)
    assert rig.becomes(0, other) < rig.comparer.tolerance


def test_single_tokens_count_in_the_first_layers() -> None:
    names = [f"model.layers.{number}.self_attn.attn" for number in (5, 0, 40, 15, 16)]
    assert layers_of_tokens(names, routed=False) == {0, 1, 3}
    assert layers_of_tokens(names, routed=True) == {1}
    assert layers_of_tokens(["attn"], routed=False) == frozenset()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_none_are_far(value: float) -> None:
    rig = Rig("opaque", torch.float32)
    assert rig.becomes(0, torch.full_like(rig.values[0, 1], value)) > rig.comparer.tolerance


def test_zeros_equal_zeros() -> None:
    rig = Rig("opaque", torch.float32)
    rig.frame[:] = 0
    for cache in rig.caches:
        cache.zero_()
    assert rig.comparer.deviation(1, rig.frame) == 0
    assert rig.becomes(0, torch.ones_like(rig.values[0, 1])) == torch.inf


def found_type(dtype: torch.dtype, cache_dtype: str) -> torch.dtype | None:
    shape = SlotGeometry("opaque", 1, 1, 1, 4096)
    return element_type(KVLayout(("a",), 16, 1, 8, dtype, shape, 1, 8, cache_dtype=cache_dtype))


def test_which_numbers_can_be_compared() -> None:
    assert set(TOLERANCE) == set(DTYPES)
    for dtype in DTYPES:
        assert found_type(dtype, "auto") is dtype
    assert found_type(torch.uint8, "fp8") is torch.float8_e4m3fn
    assert found_type(torch.uint8, "fp8_e5m2") is torch.float8_e5m2
    assert found_type(torch.uint8, "nvfp4") is None
    assert found_type(torch.int8, "int8") is None


def test_stored_blocks_are_kept_until_they_are_taken() -> None:
    blocks = StoredBlocks()
    one, other = np.zeros(8, np.uint8), np.ones(8, np.uint8)
    blocks.keep("a", 1, 5, one)
    blocks.keep("a", 1, 6, other)
    blocks.keep("b", 1, 6, one)
    assert blocks.take("a", 1, 6) is other
    assert blocks.take("a", 1, 6) is None
    assert blocks.take("a", 1, 5) is one
    assert blocks.take("b", 1, 6) is one, "two requests may begin alike"


@pytest.mark.parametrize(("nbytes", "kept"), [(MOST_BYTES // 3, 3), (MOST_BYTES + 1, 1)])
def test_the_oldest_stored_blocks_make_room(nbytes: int, kept: int) -> None:
    """Nobody comes for those of requests that ended."""
    blocks = StoredBlocks()
    frame = np.zeros(nbytes, np.uint8)
    for slot in range(5):
        blocks.keep("a", slot, 1, frame)
    assert [blocks.take("a", slot, 1) is frame for slot in range(5)] == [
        *[False] * (5 - kept),
        *[True] * kept,
    ]
