"""The interface to the kernels: the native provider behind it, and what it refuses."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.kernels.dense import CpuKernels, TritonKernels, select_kernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, BlockSource, PartialState, Rows
from vllm_ssdkv.profiling.attention_problem import RowShape, attention_problem

CPU = torch.device("cpu")
LAYOUT = BlockLayout.unpadded(8, 4, 2, 16, torch.float32)

row_shapes = st.builds(
    lambda queries, context: RowShape(queries, context, 0, context + queries),
    st.integers(0, 5),
    st.integers(0, 40),
)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.integers(1, 3),
    st.lists(row_shapes, min_size=1, max_size=4),
    st.sampled_from([0, 64, 4096]),
    st.booleans(),
    st.none() | st.integers(1, 30),
    st.integers(0, 2**31),
)
def test_attend_and_finish_follow_the_definition(
    dtype: torch.dtype,
    group: int,
    shapes: list[RowShape],
    padding: int,
    absolute: bool,
    sliding_window: int | None,
    seed: int,
) -> None:
    layout = BlockLayout.unpadded(8, 4, 2, 16, dtype)
    layout = layout.with_page_stride(layout.page_stride_bytes + padding)
    problem = attention_problem(
        layout, group, shapes, seed, idle_tokens=1, sliding_window=sliding_window
    )
    source = problem.source()
    if absolute:
        address = problem.cache.data_ptr() + problem.block_ids.numpy() * layout.block_bytes
        source = BlockSource(None, address.astype(np.uint64), problem.position.numpy())
    kernels = CpuKernels(2)
    state = problem.state()
    kernels.attend(
        problem.query, state, problem.rows, source, layout, problem.scale, sliding_window
    )
    wide = torch.full((len(problem.query), group * 2 + 1, 16), torch.nan, dtype=dtype)
    lse = torch.empty(problem.query.shape[:2])
    kernels.finish(state, wide[:, 1:], lse)
    out, want = problem.expected()
    torch.testing.assert_close(lse.double(), want, atol=1e-5, rtol=1e-5)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(wide[:, 1:].double(), out, atol=tolerance, rtol=tolerance)
    assert wide[:, 0].isnan().all()


@pytest.mark.parametrize("layers", [1, 3])
def test_pack_zeroes_padding_and_unpack_restores(layers: int) -> None:
    random = torch.Generator().manual_seed(layers)
    slot_layout = LAYOUT.with_page_stride(4096)
    size = LAYOUT.block_bytes // 4
    caches = [torch.randn((5, size), generator=random) for _ in range(layers)]
    slots = np.full((2, layers, LAYOUT.kv_heads * LAYOUT.groups, 4096), 0xFF, np.uint8)
    address = slots.ctypes.data + np.arange(2) * slots[0].nbytes
    ids = np.array([4, 1])
    kernels = CpuKernels(1)
    kernels.pack(caches, ids, address, slot_layout.block_bytes, LAYOUT, slot_layout)
    payload = LAYOUT.page_payload_bytes
    assert not slots[..., payload:].any()
    back = [torch.zeros_like(cache) for cache in caches]
    kernels.unpack(back, ids, address, slot_layout.block_bytes, LAYOUT, slot_layout)
    for slot, block in enumerate(ids.tolist()):
        for layer, (old, new) in enumerate(zip(caches, back, strict=True)):
            pages = old[block].view(torch.uint8).numpy().reshape(-1, payload)
            np.testing.assert_array_equal(slots[slot, layer, :, :payload], pages)
            assert torch.equal(old[block], new[block])
            assert not new[[0, 2, 3]].any()


def test_store_kv_skips_negative_slots() -> None:
    cache = torch.zeros(3, LAYOUT.kv_heads, LAYOUT.groups, 2, LAYOUT.page_tokens, 16)
    key, value = torch.randn(2, 3, 2, 16)
    CpuKernels(1).store_kv(key, value, cache, torch.tensor([13, -1, 0]), LAYOUT)
    # Slot 13 is token 5 of block 1: the second page, token 1 of it.
    assert torch.equal(cache[1, :, 1, :, 1], torch.stack([key[0], value[0]], dim=1))
    assert torch.equal(cache[0, :, 0, :, 0], torch.stack([key[2], value[2]], dim=1))
    assert int((cache != 0).sum()) == 2 * 2 * 2 * 16


def call(kernels: CpuKernels, name: str, **change: object) -> None:
    """Call a method with arguments that fit each other, but for `change`."""
    state = PartialState.empty(3, 4, 16, CPU)
    cache = torch.zeros(2, LAYOUT.block_bytes // 4)
    zero = np.zeros(2, np.int64)
    copy = {
        "caches": [cache, cache],
        "block_ids": zero,
        "slot_address": zero,
        "slot_layer_bytes": LAYOUT.block_bytes,
        "layout": LAYOUT,
        "slot_layout": LAYOUT,
    }
    arguments: dict[str, dict[str, object]] = {
        "attend": {
            "query": torch.zeros(3, 4, 16),
            "state": state,
            "rows": Rows.build([0], [3], [0], [0], [2]),
            "source": BlockSource(cache, zero, zero),
            "layout": LAYOUT,
            "scale": 1.0,
        },
        "finish": {"state": state, "out": torch.zeros(3, 4, 16), "lse": None},
        "store_kv": {
            "key": torch.zeros(3, 2, 16),
            "value": torch.zeros(3, 2, 16),
            "cache": cache,
            "slot_mapping": torch.arange(3),
            "layout": LAYOUT,
        },
        "pack": copy,
        "unpack": copy,
    }
    getattr(kernels, name)(**(arguments[name] | change))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("attend", {"query": torch.zeros(3, 4, 15)}),
        ("attend", {"query": torch.zeros(3, 3, 16)}),
        ("attend", {"query": torch.zeros(3, 16, 4).transpose(1, 2)}),
        ("attend", {"query": torch.zeros(3, 4, 16, dtype=torch.int32)}),
        ("attend", {"state": PartialState.empty(2, 4, 16, CPU)}),
        ("attend", {"rows": Rows.build([1], [3], [0], [0], [2])}),
        ("attend", {"rows": Rows.build([0], [3], [0], [0], [3])}),
        ("attend", {"source": BlockSource(torch.zeros(9).half(), np.zeros(2), np.zeros(2))}),
        ("finish", {"out": torch.zeros(3, 4, 15)}),
        ("finish", {"out": torch.zeros(4, 4, 16)}),
        ("finish", {"lse": torch.zeros(3, 5)}),
        ("store_kv", {"key": torch.zeros(2, 2, 16)}),
        ("store_kv", {"value": torch.zeros(3, 2, 16).half()}),
        ("store_kv", {"slot_mapping": torch.tensor([0, 1, 16])}),
        ("store_kv", {"cache": torch.zeros(2, 8)}),
        ("pack", {"block_ids": np.array([0, 2])}),
        ("pack", {"block_ids": np.array([0, -1])}),
        ("pack", {"slot_address": np.zeros(3, np.int64)}),
        ("pack", {"slot_layer_bytes": LAYOUT.block_bytes - 1}),
        ("unpack", {"slot_layout": BlockLayout.unpadded(8, 4, 1, 32, torch.float32)}),
        ("unpack", {"caches": [torch.zeros(2, 8)]}),
    ],
)
def test_wrong_arguments_are_refused(name: str, change: dict[str, object]) -> None:
    """None of these addresses may be followed."""
    with pytest.raises(ValueError, match=r"."):
        call(CpuKernels(1), name, **change)


@pytest.mark.parametrize("name", ["attend", "finish", "store_kv"])
def test_right_arguments_are_taken(name: str) -> None:
    """The arguments that the test above changes are refused for the change alone."""
    call(CpuKernels(1), name)


def test_kernels_are_selected_by_device() -> None:
    assert isinstance(select_kernels(CPU), CpuKernels)
    assert isinstance(select_kernels(torch.device("cuda:0")), TritonKernels)
    assert select_kernels(CPU) is select_kernels(CPU)
    with pytest.raises(UnsupportedError, match="meta"):
        select_kernels(torch.device("meta"))


@pytest.mark.parametrize(
    ("module", "provider"),
    [
        ("vllm_ssdkv._kernels", CpuKernels),
        ("vllm_ssdkv.triton_kernels.attend", lambda: TritonKernels(torch.device("cuda:0"))),
    ],
)
def test_a_missing_module_is_explained(
    monkeypatch: pytest.MonkeyPatch, module: str, provider: type[CpuKernels]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsupportedError, match=r"not load"):
        provider()


def test_triton_kernels_refuse_memory_they_cannot_reach() -> None:
    kernels = TritonKernels(torch.device("cuda:0"))
    state = PartialState.empty(1, 2, 4, CPU)
    with pytest.raises(ValueError, match="needs a CUDA tensor"):
        kernels.finish(state, torch.zeros(1, 2, 4))
