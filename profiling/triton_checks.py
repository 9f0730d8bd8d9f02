"""Checks of the compiled Triton kernels against their oracles, on a GPU (or in the interpreter)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_ssdkv.kernels.dense import CpuKernels, TritonKernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, PartialState
from vllm_ssdkv.kernels.paged import CpuPageKernels, PageKernels, TritonPageKernels
from vllm_ssdkv.kernels.scoring import CpuScoringKernels, TritonScoringKernels
from vllm_ssdkv.profiling.attention_problem import RowShape, attention_problem
from vllm_ssdkv.profiling.dense_oracle import merge as merge_finished
from vllm_ssdkv.profiling.sparse_problem import SparseProblem
from vllm_ssdkv.sparse.protocol import Selection
from vllm_ssdkv.sparse.scores import Scores, ScoringKernels

PAGE_ALIGN = 4096
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Absolute, on values of about 1: inputs are exact, weights and outputs are rounded."""


class CheckError(Exception):
    """A compiled kernel does not compute what its oracle does; nothing is timed then."""


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of one attention layer."""

    heads: int
    group: int
    head_size: int
    block_tokens: int
    dtype: torch.dtype

    def layout(self) -> BlockLayout:
        """Blocks as vLLM's cache holds them."""
        return BlockLayout.unpadded(
            self.block_tokens, min(16, self.block_tokens), self.heads, self.head_size, self.dtype
        )


def expect(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Raise ``CheckError`` if ``got`` is not close to ``want`` (any devices and dtypes)."""
    got, want = got.double().cpu(), want.double().cpu()
    if not torch.allclose(got, want, atol=tolerance, rtol=tolerance):
        worst = float((got - want).nan_to_num(torch.inf, torch.inf, -torch.inf).abs().max())
        raise CheckError(f"{name}: differs from its oracle by up to {worst:.3g}")


SHAPES = (RowShape(1, 500, 0, 501), RowShape(40, 30, 0, 70), RowShape(3, 50, 0, 0))
"""Decode with a long context, prefill, and queries without keys."""


def check_attention(
    device: torch.device, model: Model, shapes: Sequence[RowShape] = SHAPES
) -> None:
    """``attend`` (split and not), ``finish`` and ``merge`` against the definition."""
    from vllm_ssdkv.triton_kernels.attend import attend
    from vllm_ssdkv.triton_kernels.finish import finish
    from vllm_ssdkv.triton_kernels.merge import merge

    dtypes = dict.fromkeys((model.dtype, torch.float32))
    for dtype in dtypes:
        tolerance = TOLERANCE[dtype]
        layout = Model(
            model.heads, model.group, model.head_size, model.block_tokens, dtype
        ).layout()
        padded = layout.with_page_stride(layout.page_stride_bytes + PAGE_ALIGN)
        for pages in (layout, padded):
            problem = attention_problem(pages, model.group, shapes, seed=1, idle_tokens=1)
            want, want_lse = problem.expected()
            there = problem.to(device)
            source = there.source().to(device)
            for splits in (1, 3):
                state = there.state()
                attend(
                    there.query,
                    state,
                    there.rows,
                    cache=there.cache,
                    block_offset=torch.as_tensor(source.base),
                    block_position=torch.as_tensor(source.position),
                    layout=pages,
                    scale=there.scale,
                    splits=splits,
                )
                out = torch.empty_like(there.query)
                lse = torch.empty(out.shape[:2], device=device)
                finish(state, out, lse)
                name = f"attend and finish, {dtype}, {splits} splits"
                expect(name, out, want, tolerance)
                seen = ~torch.isinf(want_lse)
                expect(f"{name}, lse", lse.cpu()[seen], want_lse[seen], 1e-3)

    outs = torch.randn((20, 3, model.heads, model.head_size), device=device)
    lses = torch.randn((20, 3, model.heads), device=device)
    state = PartialState.empty(3, model.heads, model.head_size, device)
    merge(state, lses, None, outs)
    want, want_lse = merge_finished(outs, lses)
    expect("merge", state.acc / state.l[..., None], want, 1e-4)
    expect("merge, lse", state.m + state.l.log(), want_lse, 1e-4)


def check_copies(device: torch.device, model: Model) -> None:
    """``store_kv``, ``pack`` and ``unpack`` give the bytes that the native kernels give."""
    layout = model.layout()
    slots = layout.with_page_stride(layout.page_stride_bytes + PAGE_ALIGN)
    key, value = torch.randn((2, 50, model.heads, model.head_size)).to(model.dtype)
    mapping = torch.randperm(8 * model.block_tokens)[:50]
    mapping[min(3, len(mapping) - 1)] = -1
    results = []
    for kernels in (CpuKernels(), TritonKernels(device)):
        here = kernels.device
        caches = [
            torch.zeros((8, layout.block_bytes // model.dtype.itemsize), dtype=model.dtype).to(here)
            for _ in range(2)
        ]
        for cache in caches:
            count = len(mapping)
            kernels.store_kv(key[:count].to(here), value[:count].to(here), cache, mapping, layout)
        held = torch.full((5, 2 * slots.block_bytes), 255, dtype=torch.uint8, device=here)
        address = held.data_ptr() + np.arange(5) * held.shape[1]
        ids = np.array([7, 0, 3, 2, 5])
        kernels.pack(caches, ids, address, slots.block_bytes, layout, slots)
        back = [torch.zeros_like(cache) for cache in caches]
        kernels.unpack(back, ids, address, slots.block_bytes, layout, slots)
        results.append([*caches, held, *back])
    for name, want, got in zip(
        ("store_kv", "store_kv", "pack", "unpack", "unpack"), *results, strict=True
    ):
        expect(name, got, want, 0.0)


def check_sparse(device: torch.device, model: Model) -> None:
    """All of sparse decode against the native kernels, which are tested against the oracles.

    Pages are attended to in the device's memory and in pinned host memory, as they are fetched.
    """
    layout = model.layout()
    shape = (3, model.heads * model.group, model.head_size)
    query = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(model.dtype)
    blocks = (12, layout.block_bytes // model.dtype.itemsize)
    cache = torch.randn(blocks, generator=torch.Generator().manual_seed(2)).to(model.dtype)
    native = SparseProblem.of(layout, query, cache, CpuPageKernels())
    there = SparseProblem.of(layout, query.to(device), cache.to(device), TritonPageKernels(device))
    for name in ("bounds", "channels", "value_sum"):
        expect(f"summarize, {name}", getattr(there, name), getattr(native, name), 0.0)
    want, got = CpuScoringKernels(), TritonScoringKernels(device)
    for page_tokens in (1, layout.page_tokens):
        wanted, found = (
            _scores(kernels, problem, page_tokens)
            for kernels, problem in ((want, native), (got, there))
        )
        for name, one, other in zip(("logits", "scores", "masses"), found, wanted, strict=True):
            expect(f"{name} by tokens of {page_tokens}", one, other, 1e-3)
    selection = native.random_selection(0.4, seed=3)
    mask = np.random.default_rng(4).integers(0, 2, (len(selection.pages), layout.page_tokens))
    masked = replace(selection, token_mask=mask.astype(np.uint8))
    for chosen in (selection, masked):
        _check_chosen(chosen, native, there, cache)
    _check_choice(want, got, native, there)


def _scores(
    kernels: ScoringKernels, problem: SparseProblem, page_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, scores and masses as ``[R, heads, columns]``: all rows have one length."""
    heads, context = problem.query.shape[1], problem.summaries
    logits, first = kernels.channel_logits(problem.query, context, problem.scale, 5)
    scores = kernels.score_tokens(logits, first, heads, context, page_tokens)
    rows = len(context)
    return (
        torch.as_tensor(logits).reshape(rows, heads, -1),
        torch.as_tensor(scores.score).reshape(rows, problem.layout.kv_heads, -1),
        torch.as_tensor(scores.mass).reshape(rows, problem.layout.kv_heads, -1),
    )


def _check_chosen(
    selection: Selection, native: SparseProblem, there: SparseProblem, cache: torch.Tensor
) -> None:
    """``cover`` and ``attend_pages`` of a selection."""
    device, layout = there.query.device, native.layout
    alphas = []
    kernels: tuple[ScoringKernels, ...] = (CpuScoringKernels(), TritonScoringKernels(device))
    for scoring, problem in zip(kernels, (native, there), strict=True):
        heads, context = problem.query.shape[1], problem.summaries
        logits, first = scoring.channel_logits(problem.query, context, problem.scale, 5)
        tokens = scoring.score_tokens(logits, first, heads, context, 1).tokens
        if tokens is not None:
            alphas.append(torch.from_numpy(scoring.cover(selection, tokens, context)))
    expect("cover", alphas[1], alphas[0], 1e-3)
    pinned = cache.pin_memory() if device.type == "cuda" else cache
    outs = []
    providers: tuple[tuple[PageKernels, SparseProblem, torch.Tensor], ...] = (
        (CpuPageKernels(), native, native.cache),
        (TritonPageKernels(device), there, there.cache),
        (TritonPageKernels(device), there, pinned),
    )
    for pages, problem, memory in providers:
        rows, heads, size = problem.query.shape
        state = PartialState.empty(rows, heads, size, problem.query.device)
        listed = problem.page_list(selection, memory)
        pages.attend_pages(problem.query, state, listed, layout, problem.scale)
        outs.append((state.acc / state.l[..., None]).nan_to_num(0.0))
    for name, out in zip(("its own", "pinned"), outs[1:], strict=True):
        expect(f"attend_pages in {name} memory", out, outs[0], TOLERANCE[layout.dtype])


def _check_choice(
    want: CpuScoringKernels, got: TritonScoringKernels, native: SparseProblem, there: SparseProblem
) -> None:
    """``bound_logits``, ``weigh``, and ``choose`` from the same scores, top-k and top-p."""
    rows, kv_heads = len(native.summaries), native.layout.kv_heads
    scores = []
    for kernels, problem in ((want, native), (got, there)):
        context = problem.summaries
        logits, first = kernels.bound_logits(problem.query, context, problem.scale)
        scores.append(kernels.weigh(logits, first, None, problem.query.shape[1], context))
    table = torch.as_tensor(scores[0].score).reshape(rows, kv_heads, -1)
    expect("bounds and weights", torch.as_tensor(scores[1].score), table, 1e-4)
    device = there.query.device
    window = torch.as_tensor(scores[0].window_mass).to(device)
    same = Scores(table.to(device), table.to(device), window, scores[0].first)
    most = np.full(rows, table.shape[2] // 2, np.int32)
    for p in (0.3, 1.0):
        wanted, chosen = (
            kernels.choose(part, np.zeros_like(most) if p < 1 else most, most, 1, p)
            for kernels, part in ((want, scores[0]), (got, same))
        )
        for name in ("begin", "pages"):
            one, other = (torch.from_numpy(getattr(part, name)) for part in (chosen, wanted))
            if one.shape != other.shape:
                raise CheckError(f"choose, p {p}: {len(one)} {name} in place of {len(other)}")
            expect(f"choose, p {p}, {name}", one, other, 0.0)
