"""Page copies between cache and slots, byte by byte."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.test_packing import Problem, problems
from tests.store.tails import addresses, rows_of, tails_of
from tests.triton_kernels.recorded import Recorded
from vllm_ssdkv.kernels.dense import TritonKernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.paged import CpuPageKernels, Packing, TritonPageKernels
from vllm_ssdkv.triton_kernels.pack import copy_pages

CPU = torch.device("cpu")
FILL = 0xA5


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 4),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 3, 4, 64]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from([0, 4, 24, 4096]),
    st.integers(0, 2**31),
)
def test_pack_and_unpack(
    blocks: int,
    layers: int,
    heads: int,
    head_size: int,
    dtype: torch.dtype,
    padding: int,
    seed: int,
) -> None:
    layout = BlockLayout.unpadded(8, 4, heads, head_size, dtype)
    slot_layout = layout.with_page_stride(layout.page_stride_bytes + padding)
    random = np.random.default_rng(seed)
    held = layout.block_bytes // dtype.itemsize
    caches = [
        torch.from_numpy(random.integers(0, 256, (6, layout.block_bytes), np.uint8)).view(dtype)
        for _ in range(layers)
    ]
    assert caches[0].shape == (6, held)
    ids = random.permutation(6)[:blocks]
    layer_bytes = slot_layout.block_bytes + 8
    slot_bytes = layers * layer_bytes + 16
    slots = np.full((blocks + 1, slot_bytes), FILL, np.uint8)
    order = random.permutation(blocks + 1)[:blocks]
    address = (slots.ctypes.data + order * slot_bytes).astype(np.uint64)

    kernels = TritonKernels(CPU)
    sizes = {"layout": layout, "slot_layout": slot_layout}
    kernels.pack(caches, ids, address, layer_bytes, **sizes)

    expected = np.full_like(slots, FILL)
    for index, slot in zip(ids, order, strict=True):
        for layer, cache in enumerate(caches):
            pages = cache[index].view(torch.uint8).numpy().reshape(heads * 2, -1)
            padded = np.pad(pages, ((0, 0), (0, padding))).ravel()
            begin = layer * layer_bytes
            expected[slot, begin : begin + padded.size] = padded
    np.testing.assert_array_equal(slots, expected)

    back = [torch.zeros_like(cache) for cache in caches]
    kernels.unpack(back, ids, address, layer_bytes, **sizes)
    for old, new in zip(caches, back, strict=True):
        for index in range(6):
            want = old[index] if index in ids else torch.zeros_like(old[index])
            assert torch.equal(new[index].view(torch.uint8), want.view(torch.uint8))


@settings(max_examples=15, deadline=None)
@given(problems(most_blocks=2))
def test_slots_are_the_native_ones(problem: Problem) -> None:
    """With summaries and channels, padding included; a variance may be rounded the other way."""
    wanted = problem.packed(CpuPageKernels(1))
    problem.check(problem.packed(TritonPageKernels(CPU)), wanted, native=False)


@pytest.mark.parametrize("kind", ["bounds", "spread_with_values", "codes_2", "channels"])
def test_layers_are_packed_where_they_stay(kind: str) -> None:
    """A layer takes two launches. Nothing is sent to the device, or read from it, after the
    addresses, which go with the first layer. A slot without a row gets its pages."""
    problem = Problem.of(BlockLayout.unpadded(32, 16, 2, 16, torch.float16), kind, 3, blocks=3)
    _, caches, ids = problem.draw()
    layout, geometry, held = problem.layout, problem.geometry, []
    for kernels in (CpuPageKernels(1), TritonPageKernels(CPU)):
        frames = np.full((3, geometry.frame_bytes), FILL, np.uint8)
        memory, rows = rows_of(geometry, layout.page_tokens, 3, FILL)
        rows.address[1] = 0
        packing = Packing(caches, ids, addresses(frames), rows, layout, geometry)
        kernels.pack_summarized(packing, range(1))
        recorded = isinstance(kernels, TritonPageKernels)
        with Recorded() if recorded else nullcontext() as graph:
            for layer in (2, 1):
                kernels.pack_summarized(packing, range(layer, layer + 1))
        if graph is not None:
            made = "_encode_kernel" if "codes" in kind else "_summarize_kernel"
            assert graph.launches == ["_copy_kernel", made] * 2
            sums = ["aten.add.Tensor"] if kind == "spread_with_values" else []
            assert graph.operations == ["aten.index_select.default", *sums] * 2
        assert (memory[1] == FILL).all()
        tails = tails_of(memory[[0, 2]], geometry, layout.page_tokens, FILL)
        held.append((np.concatenate([frames[[0, 2]], tails], axis=1), frames[1]))
    (wanted, alone), (found, without) = held
    problem.check(found, wanted, native=False)
    np.testing.assert_array_equal(without, alone)


def test_unpacking_leaves_a_cache_with_padded_pages_alone() -> None:
    """Without ``zero_padding`` the target's padding keeps its bytes."""
    source = np.arange(64, dtype=np.uint8)
    target = np.full(100, FILL, np.uint8)
    copy_pages(
        torch.tensor([source.ctypes.data]),
        torch.tensor([target.ctypes.data]),
        aligned=2,
        pages=2,
        payload_bytes=30,
        source_stride_bytes=32,
        target_stride_bytes=48,
        zero_padding=False,
    )
    expected = np.full(100, FILL, np.uint8)
    expected[:30], expected[48:78] = source[:30], source[32:62]
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.zeros(3, dtype=torch.int64)}, "must be int64"),
        ({"target": torch.zeros(2)}, "must be int64"),
        ({"payload_bytes": 0}, "must fit"),
        ({"payload_bytes": 64}, "must fit"),
        ({"payload_bytes": 31}, "must be even"),
        ({"aligned": 17}, "must be even"),
        ({"pages": 0}, "pages per block"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], message: str) -> None:
    """None of these addresses may be followed: they lead nowhere."""
    arguments = {
        "source": torch.tensor([16, 32]),
        "target": torch.tensor([64, 80]),
        "aligned": 16,
        "pages": 1,
        "payload_bytes": 32,
        "source_stride_bytes": 32,
        "target_stride_bytes": 32,
        "zero_padding": True,
    } | change
    with pytest.raises(ValueError, match=message):
        copy_pages(**arguments)
