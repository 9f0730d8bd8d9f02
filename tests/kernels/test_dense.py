"""The native CPU kernels against the oracle, on every instruction set of this machine.

Memory that holds no token is filled with NaN: a kernel that reads what it may not poisons its
output.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.store.tails import addresses
from vllm_ssdkv import _kernels
from vllm_ssdkv.kernels.operands.block_layout import (
    DTYPES,
    FLOAT8,
    PLAIN,
    BlockLayout,
    Softmax,
)
from vllm_ssdkv.profiling.dense_oracle import paged_attention, read_block, write_block

ISAS = _kernels.isas()
TOLERANCE = 2e-6  # of the largest magnitude; fp32 rounding over a few thousand terms

Span = tuple[int, int]


Expected = tuple[torch.Tensor, torch.Tensor]


@contextmanager
def using(isa: str) -> Iterator[None]:
    """Kernels of one instruction set, for a while."""
    before = _kernels.isa()
    _kernels.set_isa(isa)
    try:
        yield
    finally:
        _kernels.set_isa(before)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    """The oracle's operators are tiny: on a busy machine their threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Row:
    """Queries of one request: ``count`` of them, the first at ``first``; keys 0..first+count-1."""

    first: int
    count: int


class Paged:
    """Random ragged rows over blocks that lie scattered in one buffer."""

    def __init__(
        self,
        layout: BlockLayout,
        group: int,
        rows: Sequence[Row],
        q_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        spread: float = 1.0,
        sliding_window: int | None = None,
        softmax: Softmax = PLAIN,
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.layout = layout
        self.sliding_window = sliding_window
        self.softmax = softmax
        self.rows = list(rows)
        self.q_heads = group * layout.kv_heads
        self.tokens = sum(row.count for row in rows)
        self.scale = layout.head_size**-0.5
        self.tolerance = TOLERANCE * max(1.0, spread)  # logits grow, and with them their rounding
        # A wider token stride than the heads need, as in a fused QKV projection.
        heads = torch.randn(
            (self.tokens, self.q_heads + 1, layout.head_size), generator=draw, dtype=torch.float32
        )
        self.query = (heads * spread).to(q_dtype)[:, : self.q_heads]
        lengths = [-(-(row.first + row.count) // layout.block_tokens) for row in rows]
        self.blocks = torch.full((sum(lengths), layout.block_bytes), 0xFF, dtype=torch.uint8)
        places = torch.randperm(sum(lengths), generator=draw).tolist()
        self.row_blocks: list[list[int]] = []
        for row, length in zip(rows, lengths, strict=True):
            mine = [places.pop() for _ in range(length)]
            self.row_blocks.append(mine)
            for index, place in enumerate(mine):
                shape = (2, layout.block_tokens, layout.kv_heads, layout.head_size)
                kv = torch.randn(shape, generator=draw, dtype=torch.float32)
                kv[:, max(0, row.first + row.count - index * layout.block_tokens) :] = torch.nan
                write_block(layout, self.blocks[place], kv[0], kv[1])
        self.reset()

    def reset(self) -> None:
        """Empty softmax state."""
        self.m = np.full((self.tokens, self.q_heads), -np.inf, np.float32)
        self.l = np.zeros((self.tokens, self.q_heads), np.float32)
        self.acc = np.zeros((self.tokens, self.q_heads, self.layout.head_size), np.float32)

    def addresses(self, row: int) -> NDArray[np.uint64]:
        """Address of each block of a row."""
        base = self.blocks.data_ptr()
        return np.array(
            [base + place * self.layout.block_bytes for place in self.row_blocks[row]], np.uint64
        )

    def attend(self, spans: Sequence[Span] | None = None, threads: int = 2) -> None:
        """One call over the blocks ``spans[row] = (begin, end)`` of each row; all by default.

        They are listed newest first: nothing may rest on their order.
        """
        layout = self.layout
        if spans is None:
            spans = [(0, len(blocks)) for blocks in self.row_blocks]
        counts = np.array([row.count for row in self.rows], np.int32)
        base = [self.addresses(row)[begin:end][::-1] for row, (begin, end) in enumerate(spans)]
        sizes = np.array([len(part) for part in base], np.int32)
        ends = np.cumsum(sizes, dtype=np.int32)
        position = [np.arange(begin, end)[::-1] * layout.block_tokens for begin, end in spans]
        _kernels.attend(
            _kernels.vectors("query", self.query, self.q_heads, layout.head_size),
            self.scale,
            self.state(),
            _kernels.Rows(
                np.cumsum(counts, dtype=np.int32) - counts,
                counts,
                np.array([row.first for row in self.rows], np.int64),
                ends - sizes,
                ends,
            ),
            _kernels.Pages(
                np.concatenate([np.empty(0, np.uint64), *base]),
                np.concatenate([np.empty(0, np.int64), *position]),
            ),
            layout.shape,
            threads,
            self.sliding_window,
        )

    def state(self) -> _kernels.State:
        """The softmax state as kernels take it."""
        of = self.softmax
        return _kernels.State(self.m, self.l, self.acc, of.soft_cap, of.host_slopes, of.value_scale)

    def finish(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """Output ``[tokens, q_heads, head_size]`` and log-sum-exp ``[tokens, q_heads]``."""
        out = torch.full(self.acc.shape, torch.nan, dtype=dtype)
        lse = np.full_like(self.m, np.nan)
        _kernels.finish(self.state(), _kernels.vectors("out", out, *out.shape[1:]), lse, 2)
        return out, torch.from_numpy(lse)

    def oracle(self, spans: Sequence[Span] | None = None) -> Expected:
        """What :meth:`finish` should return, in fp64."""
        if spans is None:
            spans = [(0, len(blocks)) for blocks in self.row_blocks]
        outs, lses, done = [], [], 0
        for row, blocks, (begin, end) in zip(self.rows, self.row_blocks, spans, strict=True):
            out, lse = paged_attention(
                self.query[done : done + row.count],
                [self.blocks[place] for place in blocks[begin:end]],
                [index * self.layout.block_tokens for index in range(begin, end)],
                self.layout,
                scale=self.scale,
                first_position=row.first,
                sliding_window=self.sliding_window,
                softmax=self.softmax,
            )
            outs.append(out)
            lses.append(lse)
            done += row.count
        return torch.cat(outs), torch.cat(lses)

    def check(self, want: Expected | None = None) -> None:
        """Compare with the oracle, or with what it said before."""
        out, lse = self.finish()
        want_out, want_lse = want or self.oracle()
        assert_near(out, want_out, self.tolerance)
        assert_near(lse, want_lse, self.tolerance)


def assert_near(got: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert not got.isnan().any()
    assert torch.equal(got.isneginf(), want.isneginf())
    error = torch.where(want.isneginf(), 0.0, got.double() - want.double()).abs()
    finite = torch.where(want.isneginf(), 0.0, want).abs()
    limit = tolerance * max([1.0, *finite.flatten(start_dim=0).tolist()])
    assert bool((error <= limit).all())


def layout_of(
    dtype: torch.dtype = torch.float32,
    head_size: int = 64,
    kv_heads: int = 2,
    block_tokens: int = 16,
    page_tokens: int = 16,
    padding: int = 0,
) -> BlockLayout:
    plain = BlockLayout.unpadded(block_tokens, page_tokens, kv_heads, head_size, dtype)
    return plain.with_page_stride(plain.page_stride_bytes + padding)


@pytest.mark.parametrize("head_size", [8, 32, 40, 64, 80, 96, 128, 256, 264, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 4, 7])
def test_decode_and_prefill_match_the_oracle(
    dtype: torch.dtype, head_size: int, group: int
) -> None:
    rows = [Row(150, 1), Row(0, 70), Row(33, 3), Row(200, 41), Row(0, 1)]
    layout = layout_of(dtype, head_size, block_tokens=32, padding=64)
    case = Paged(layout, group, rows, q_dtype=dtype, seed=head_size)
    want = case.oracle()
    for isa in ISAS:
        with using(isa):
            case.reset()
            case.attend()
            case.check(want)


@pytest.mark.parametrize("q_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_dtype", [*DTYPES, *FLOAT8], ids=str)
def test_query_and_cache_dtypes_mix(isa: str, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    case = Paged(layout_of(kv_dtype), 3, [Row(100, 2), Row(10, 50)], q_dtype=q_dtype)
    case.attend()
    case.check()


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("head_size", [256, 264])
def test_numbers_of_8_bits_are_those_of_torch(isa: str, dtype: torch.dtype, head_size: int) -> None:
    """All of them, as the value of the only key."""
    case = Paged(layout_of(dtype, head_size, 1, 1, 1), 1, [Row(0, 1)])
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    key, value = torch.zeros(1, 1, head_size), torch.zeros(1, 1, head_size)
    value[0, 0, :256] = numbers
    write_block(case.layout, case.blocks[0], key, value)
    case.attend()
    torch.testing.assert_close(
        case.finish()[0][0, 0, :256], numbers, rtol=0, atol=0, equal_nan=True
    )


def softmaxes(query_heads: int) -> st.SearchStrategy[Softmax]:
    """Plain ones, and logits with caps and slopes."""
    slopes = st.lists(
        st.floats(2.0**-9, 2.0, width=32), min_size=query_heads, max_size=query_heads
    ).map(lambda of: torch.tensor(of, dtype=torch.float32))
    return st.builds(
        Softmax,
        sinks=st.none(),
        soft_cap=st.sampled_from([0.0, 0.5, 5.0, 50.0]),
        slopes=st.none() | slopes,
        value_scale=st.sampled_from([1.0, 0.3]),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Paged, list[list[Span]]]:
    """A problem, and a partition of every row's blocks over several calls."""
    page_tokens = draw(st.sampled_from([1, 4, 8, 16, 24, 32]))
    layout = layout_of(
        draw(st.sampled_from([*DTYPES, *FLOAT8])),
        8 * draw(st.integers(1, 32) | st.integers(33, 64)),
        draw(st.integers(1, 3)),
        page_tokens * draw(st.integers(1, 5)),
        page_tokens,
        16 * draw(st.integers(0, 3)),
    )
    row = st.builds(Row, st.integers(0, 400), st.integers(0, 9) | st.integers(10, 90))
    rows = draw(st.lists(row, min_size=1, max_size=4))
    group = draw(st.integers(1, 9))
    case = Paged(
        layout,
        group,
        rows,
        q_dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 2**20)),
        spread=draw(st.sampled_from([0.1, 1.0, 8.0])),
        sliding_window=draw(st.none() | st.integers(1, 20) | st.integers(1, 600)),
        softmax=draw(softmaxes(group * layout.kv_heads)),
    )
    calls = draw(st.integers(1, 4))
    partition: list[list[Span]] = [[] for _ in range(calls)]
    for blocks in case.row_blocks:
        length = len(blocks)
        cuts = sorted(draw(st.integers(0, length)) for _ in range(calls - 1))
        for call, span in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
            partition[call].append(span)
    return case, partition


@given(case=cases(), threads=st.sampled_from([1, 2, 5]), backwards=st.booleans())
def test_any_partition_of_blocks_gives_the_oracle(
    case: tuple[Paged, list[list[Span]]], threads: int, backwards: bool
) -> None:
    problem, partition = case
    want = problem.oracle()
    for isa in ISAS:
        with using(isa):
            problem.reset()
            for spans in reversed(partition) if backwards else partition:
                problem.attend(spans, threads)
            problem.check(want)


@pytest.mark.parametrize("sliding_window", [None, 1500])
@pytest.mark.parametrize("block_tokens", [16, 32, 128])
@pytest.mark.parametrize("rows", [[Row(3000, 1)], [Row(2500, 6)], [Row(2000, 130)]])
def test_long_context_split_over_threads(
    block_tokens: int, rows: list[Row], sliding_window: int | None
) -> None:
    layout = layout_of(torch.bfloat16, 128, 1, block_tokens)
    case = Paged(layout, 4, rows, torch.bfloat16, sliding_window=sliding_window)
    want = case.oracle()
    for isa in ISAS:
        with using(isa):
            case.reset()
            case.attend(threads=4)
            case.check(want)
            split = case.acc.copy(), case.m.copy(), case.l.copy()
            case.reset()
            case.attend(threads=4)
            # Same call, same bits: neither the cut nor the order of folding depends on timing.
            again = case.acc, case.m, case.l
            assert all(np.array_equal(a, b) for a, b in zip(split, again, strict=True))
            case.reset()
            case.attend(threads=1)
            case.check(want)


def test_split_continues_an_earlier_state(isa: str) -> None:
    case = Paged(layout_of(torch.float16, 64, 1), 2, [Row(4000, 2), Row(90, 1)], torch.float16)
    total = [len(blocks) for blocks in case.row_blocks]
    case.attend([(total[0] - 5, total[0]), (0, 0)], threads=3)
    case.attend([(0, total[0] - 5), (0, total[1])], threads=3)
    case.check()


def test_rows_that_see_no_key_are_left_alone(isa: str) -> None:
    case = Paged(layout_of(), 2, [Row(40, 3), Row(5, 12)])
    spans = [(0, 0), (1, 2)]  # nothing; keys 16.. while queries 5..15 come before them
    case.attend(spans)
    hidden = np.r_[0:3, 3:14]
    assert np.isneginf(case.m[hidden]).all()
    assert (case.l[hidden] == 0).all()
    assert (case.acc[hidden] == 0).all()
    case.check(case.oracle(spans))
    # The same with a state that is not empty: kept to the bit.
    case.m[:], case.l[:], case.acc[:] = 1.5, 2.0, 3.0
    before = case.acc[hidden].copy()
    case.attend(spans)
    assert np.array_equal(case.acc[hidden], before)
    assert (case.m[hidden] == 1.5).all()
    assert (case.l[hidden] == 2.0).all()


@pytest.mark.parametrize("rows", [[Row(130, 1)], [Row(100, 40)], [Row(4000, 1)]])
def test_nan_is_not_hidden(isa: str, rows: list[Row]) -> None:
    """Data that is broken must show, not turn into zeros."""
    case = Paged(layout_of(torch.bfloat16, 64, 1), 4, rows, torch.bfloat16)
    case.query[0, 1] = torch.nan
    case.attend(threads=3)
    out, lse = case.finish()
    assert out[0, 1].isnan().all()
    assert lse[0, 1].isnan()
    assert not out[0, [0, 2, 3]].isnan().any()
    assert not out[1:].isnan().any()


def test_no_rows_and_no_blocks(isa: str) -> None:
    case = Paged(layout_of(), 1, [Row(20, 1)])
    case.attend([(0, 0)])
    assert np.isneginf(case.m).all()
    nothing = Paged(layout_of(), 1, [])
    nothing.attend()


def test_large_logits_neither_overflow_nor_vanish(isa: str) -> None:
    case = Paged(layout_of(), 2, [Row(100, 1), Row(0, 64)], spread=300.0)
    case.attend()
    out, lse = case.finish()
    want_out, want_lse = case.oracle()
    assert not out.isnan().any()
    # Logits of several hundreds have rounding errors of about 1e-4, and so have their weights.
    torch.testing.assert_close(out.double(), want_out, rtol=0, atol=2e-3)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-6, atol=0)


def test_weights_are_accurate_exponentials(isa: str) -> None:
    """The accumulator shows exp(logit - m) of each key by itself where values are one-hot."""
    layout = layout_of(head_size=256, kv_heads=1, block_tokens=256)
    case = Paged(layout, 1, [Row(255, 1)])
    logits = torch.linspace(-86.0, 0.0, 256)
    key = torch.zeros((256, 1, 256))
    key[:, 0, 0] = logits
    write_block(layout, case.blocks[case.row_blocks[0][0]], key, torch.eye(256)[:, None])
    case.query[:] = 0.0
    case.query[:, :, 0] = 1.0
    case.scale = 1.0
    case.attend()
    want = torch.exp(logits.double())
    error = ((torch.from_numpy(case.acc[0, 0]).double() - want) / want).abs().max()
    assert float(error) < 3e-7


@pytest.mark.parametrize("cap", [0.25, 3.0, 50.0])
def test_capped_logits_are_accurate(isa: str, cap: float) -> None:
    """The accumulator shows each key's logit where values are one-hot and a maximum is far."""
    layout = layout_of(head_size=256, kv_heads=1, block_tokens=256)
    case = Paged(layout, 1, [Row(255, 1)], softmax=Softmax(soft_cap=cap))
    reach = min(4 * cap, 40.0)  # the least weight is a normal number
    products = torch.linspace(-reach, reach, 256)
    key = torch.zeros((256, 1, 256))
    key[:, 0, 0] = products
    write_block(layout, case.blocks[case.row_blocks[0][0]], key, torch.eye(256)[:, None])
    case.query[:] = 0.0
    case.query[:, :, 0] = 1.0
    case.scale = 1.0
    case.attend()
    want = cap * torch.tanh(products.double() / cap)
    got = torch.from_numpy(case.acc[0, 0]).double().log() + float(case.m[0, 0])
    assert float((got - want).abs().max()) < 2e-6 * max(1.0, cap / 4)


def test_a_slope_of_one_key_is_its_distance(isa: str) -> None:
    case = Paged(layout_of(), 2, [Row(40, 1), Row(9, 30)], softmax=Softmax(slopes=torch.ones(4)))
    case.query[:] = 0.0
    case.attend([(0, 1), (0, 1)])
    distance = (
        torch.arange(16)[None] - torch.cat([torch.tensor([40]), torch.arange(9, 39)])[:, None]
    )
    want = torch.where(distance > 0, -torch.inf, distance.double()).logsumexp(1)
    assert_near(case.finish()[1], want[:, None].repeat(1, 4))


@pytest.mark.parametrize(
    ("cap", "slopes", "says"),
    [(-1.0, None, "soft_cap must"), (np.inf, None, "soft_cap must"), (0.0, 3, "slopes must be")],
)
def test_logits_of_other_shapes_are_refused(cap: float, slopes: int | None, says: str) -> None:
    m, acc = np.zeros((1, 4), np.float32), np.zeros((1, 4, 8), np.float32)
    with pytest.raises(ValueError, match=says):
        _kernels.State(m, m, acc, cap, None if slopes is None else np.ones(slopes, np.float32))


def test_slopes_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        Softmax(slopes=torch.ones(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [8, 80, 128])
def test_finish_rounds_as_torch_does(isa: str, dtype: torch.dtype, head_size: int) -> None:
    case = Paged(layout_of(head_size=head_size), 3, [Row(60, 9)])
    case.attend()
    case.l[2] = 0.0  # as if nothing had been seen
    case.acc[4] *= 1e-9  # subnormal in half precision
    exact, lse = case.finish()
    assert (exact[2] == 0).all()
    assert lse[2].isneginf().all()
    assert torch.equal(case.finish(dtype)[0], exact.to(dtype))


def test_finish_without_lse_and_with_a_wide_stride(isa: str) -> None:
    case = Paged(layout_of(), 2, [Row(30, 4)])
    case.attend()
    wide = torch.full((case.tokens, case.q_heads + 2, 64), 7.0)
    out = _kernels.vectors("out", wide[:, : case.q_heads], case.q_heads, 64)
    _kernels.finish(case.state(), out, None, 1)
    assert torch.equal(wide[:, : case.q_heads], case.finish()[0])
    assert (wide[:, case.q_heads :] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", [0, 256])
def test_store_kv_writes_the_block_layout(dtype: torch.dtype, padding: int) -> None:
    layout = layout_of(dtype, 40, 3, 32, 8, padding)
    fused = torch.randn((70, 2, 3, 40)).to(dtype)  # K and V side by side: strides wider than heads
    key, value = fused[:, 0], fused[:, 1]
    slots = torch.randperm(4 * 32)[:70].numpy()
    slots[::9] = -1
    block_stride = layout.block_bytes + 512
    cache = torch.full((4, block_stride), 0xAB, dtype=torch.uint8)
    want = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, 32)
        group, at = divmod(offset, 8)
        for head in range(3):
            start = (head * layout.groups + group) * layout.page_stride_bytes
            page = want[block, start : start + layout.page_payload_bytes].view(dtype)
            page.view(2, 8, 40)[:, at] = fused[token, :, head]
    _kernels.store_kv(key, value, slots, cache.view(dtype), layout.shape, 2)
    assert torch.equal(cache, want)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_numbers_of_8_bits_lie_where_others_do(isa: str, dtype: torch.dtype) -> None:
    """Each by the scale of its kind; some tokens have no place."""
    layout = layout_of(dtype, 40, 3, 32, 8, 256)
    fused = torch.randint(-7, 8, (70, 2, 3, 40)).to(torch.bfloat16)
    slots = torch.randperm(4 * 32)[:70].numpy()
    slots[::9] = -1
    cache = torch.zeros((4, layout.block_bytes), dtype=torch.uint8)
    _kernels.store_kv(fused[:, 0], fused[:, 1], slots, cache.view(dtype), layout.shape, 2, 0.5, 4.0)
    read = [read_block(layout, block) for block in cache]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key, value = (part[slot % 32].float() for part in read[slot // 32])
            assert torch.equal(key, fused[token, 0].float() * 2)
            assert torch.equal(value, fused[token, 1].float() / 4)
    assert sum(int(part.float().count_nonzero()) for pair in read for part in pair) == int(
        fused[slots >= 0].count_nonzero()
    )


def test_vectors_of_8_bits_are_refused() -> None:
    wrong = torch.zeros(1, 2, 8, dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match="query must be"):
        _kernels.vectors("query", wrong, 2, 8)
    with pytest.raises(ValueError, match="16 or 32 bits"):
        _kernels.Vectors(0, _kernels.FLOAT8_E4M3, 64, 1, 2, 8)


@given(
    items=st.integers(0, 9),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 5), st.sampled_from([8, 40])),
    dtype=st.sampled_from(DTYPES),
    padding=st.tuples(st.integers(0, 22), st.integers(0, 22)),
)
@settings(max_examples=40, deadline=None)
def test_copied_blocks_come_back(
    items: int, shape: tuple[int, int, int], dtype: torch.dtype, padding: tuple[int, int]
) -> None:
    groups, heads, head_size = shape
    here = BlockLayout.unpadded(3 * groups, 3, heads, head_size, dtype)
    payload, pages = here.page_payload_bytes, groups * heads
    here, there = (here.with_page_stride(payload + 4 * more) for more in padding)
    source = torch.randint(0, 256, (items, pages, here.page_stride_bytes), dtype=torch.uint8)
    packed = torch.full((items + 1, pages, there.page_stride_bytes), 0xCD, dtype=torch.uint8)
    back = torch.full_like(source, 0xEF)
    order = torch.randperm(items + 1)[:items]
    at_source, at_packed, at_back = (addresses(memory.numpy()) for memory in (source, packed, back))
    at_packed = at_packed[order.numpy()]
    _kernels.copy_blocks(at_source, here.shape, at_packed, there.shape, True, 2)
    assert torch.equal(packed[order, :, :payload], source[:, :, :payload])
    assert (packed[order, :, payload:] == 0).all()
    untouched = sorted(set(range(items + 1)) - set(order.tolist()))
    assert (packed[untouched] == 0xCD).all()
    _kernels.copy_blocks(at_packed, there.shape, at_back, here.shape, False, 2)
    assert torch.equal(back[:, :, :payload], source[:, :, :payload])
    assert (back[:, :, payload:] == 0xEF).all()


def test_bad_arguments_are_refused() -> None:
    case = Paged(layout_of(), 2, [Row(30, 4)])
    with pytest.raises(ValueError, match="threads"):
        case.attend(threads=0)
    case.l = np.zeros((3, 4), np.float32)
    with pytest.raises(ValueError, match="m and l"):
        case.attend()
    case.reset()
    case.m = case.m.astype(np.float64)
    with pytest.raises(TypeError):
        case.attend()
    case.reset()
    case.rows = [Row(30, 5)]
    with pytest.raises(ValueError, match="queries lie outside"):
        case.attend()
    with pytest.raises(ValueError, match="portable"):
        _kernels.set_isa("vax")
    empty, layout = np.empty(0, np.uint64), layout_of()
    with pytest.raises(ValueError, match="page_stride is smaller"):
        _kernels.BlockShape(16, 16, 8191, 1, 64, _kernels.FLOAT32)
    with pytest.raises(ValueError, match="more than the page stride"):
        _kernels.copy_blocks(empty, layout.shape, empty, layout_of(head_size=8).shape, True, 1)


def big_case() -> Paged:
    return Paged(layout_of(torch.bfloat16, 64, 2), 2, [Row(1000, 1), Row(700, 40)])


def test_concurrent_calls() -> None:
    want = big_case()
    want.attend(threads=1)
    states = [big_case() for _ in range(4)]

    def work(case: Paged) -> None:
        for _ in range(10):
            case.reset()
            case.attend(threads=3)

    threads = [threading.Thread(target=work, args=(case,)) for case in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for case in states:
        case.check()


def test_a_forked_child_attends_alone() -> None:
    case, busy = big_case(), big_case()
    case.attend(threads=3)
    want = case.acc.copy()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            busy.attend(threads=3)

    thread = threading.Thread(target=work)  # forks then happen while a team is at work
    thread.start()
    try:
        for _ in range(5):
            assert attends_in_child(case, want) == 0
    finally:
        stop.set()
        thread.join(60)
    case.reset()
    case.attend(threads=3)
    case.check()


def attends_in_child(case: Paged, want: NDArray[np.float32]) -> int:
    """Exit status of a forked child that attends: 0 if right."""
    child = os.fork()
    if child == 0:
        # Nothing of pytest may run in the child, nor torch: its OpenMP pool does not survive.
        status = 1
        try:
            case.reset()
            case.attend(threads=3)
            status = 0 if np.array_equal(case.acc, want) else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs in the kernels")
    return os.waitstatus_to_exitcode(ended[1])


def test_calls_run_on_the_team_of_torch() -> None:
    assert _kernels.team_available()
    torch.set_num_threads(3)
    torch.ones(1 << 20).add_(1)  # starts the team
    before = set(os.listdir("/proc/self/task"))
    case = Paged(layout_of(), 2, [Row(700, 40)] * 12)
    case.attend(threads=3)
    case.check()
    assert set(os.listdir("/proc/self/task")) <= before
