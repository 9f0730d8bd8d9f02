"""Checks of Triton kernels on ragged rows, in pinned and in device memory, beside
:mod:`vllm_ssdkv.profiling.triton_checks`.

The native kernels, which are tested against the oracles, and the definition of attention say what
is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.kernels.dense import TritonKernels, wait_for
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, BlockSource
from vllm_ssdkv.kernels.operands.token_order import TokenOrder
from vllm_ssdkv.kernels.paged import CpuPageKernels, Packing, PageKernels, TritonPageKernels
from vllm_ssdkv.kernels.scoring import CpuScoringKernels, TritonScoringKernels
from vllm_ssdkv.kernels.tensor_digest import TensorProbe, digest_tensors
from vllm_ssdkv.profiling.attention_problem import RowShape, attention_problem
from vllm_ssdkv.profiling.ragged_problem import (
    CODE_BITS,
    BlockSummaries,
    RaggedProblem,
    RowSize,
    addresses,
)
from vllm_ssdkv.profiling.triton_checks import TOLERANCE, CheckError, Model, expect
from vllm_ssdkv.sparse.protocol import ContextSummaries
from vllm_ssdkv.sparse.scores import Scores, ScoringKernels
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.summary_rows import (
    SummaryRows,
    channels_offset,
    row_bytes,
    summary_bytes,
    with_summaries,
)

ROWS: Final = (RowSize(3, 5), RowSize(0, 1), RowSize(1, 70), RowSize(7, 16))
"""One has no context, and windows take less and more than a block."""

_NEAR: Final = 1e-3
"""Tolerance of logits, scores and masses, which are float32."""

_FILL: Final = 0xA5


def check_anywhere(device: torch.device, model: Model, *, pinned: bool) -> None:
    """``attend`` of blocks at absolute addresses, with and without a sliding window, of queries of
    KV's dtype and of float32; rows without keys and without queries among them."""
    layout = model.layout()
    shapes = [RowShape(1, 300, 0, 301), RowShape(0, 40, 0, 40), RowShape(2, 90, 0, 0)]
    shapes += [RowShape(17, 25, 0, 42), RowShape(1, 0, 0, 1)]
    kernels = TritonKernels(device)
    for window in (None, 33):
        for query_dtype in dict.fromkeys((model.dtype, torch.float32)):
            problem = attention_problem(
                layout,
                model.group,
                shapes,
                seed=7,
                query_dtype=query_dtype,
                idle_tokens=1,
                sliding_window=window,
            )
            want, want_lse = problem.expected()
            there = problem.to(device)
            memory = problem.cache.pin_memory() if pinned and there.query.is_cuda else there.cache
            base = addresses(memory)[problem.block_ids.numpy()]
            source = BlockSource(None, base, problem.position.numpy())
            state = there.state()
            kernels.attend(there.query, state, there.rows, source, layout, there.scale, window)
            out, lse = torch.empty_like(there.query), torch.empty(want_lse.shape, device=device)
            kernels.finish(state, out, lse)
            wait_for(device)
            name = f"attend, window {window}, query {query_dtype}"
            expect(name, out, want, TOLERANCE[model.dtype])
            if not torch.equal(lse.cpu().isinf(), want_lse.isinf()):
                raise CheckError(f"{name}: other queries have seen nothing")
            seen = ~want_lse.isinf()
            expect(f"{name}, lse", lse.cpu()[seen], want_lse[seen], _NEAR)


def check_ragged(
    device: torch.device, model: Model, *, pinned: bool, rows: Sequence[RowSize] = ROWS
) -> None:
    """All of sparse decode of ragged rows: summaries, scores, choice, attention to pages."""
    layout = model.layout()
    native = RaggedProblem.draw(layout, model.group, rows, seed=11)
    there = native.moved(device, pinned=pinned)
    host, here = CpuPageKernels(), TritonPageKernels(device)
    wanted, found = BlockSummaries.of(native, host), BlockSummaries.of(there, here)
    for name in ("bounds", "channels", "value_sum"):
        if not torch.equal(getattr(found, name).cpu(), getattr(wanted, name)):
            raise CheckError(f"summarize, {name}: other bytes than the native kernel's")
    _check_spread("summarize, spread", found.spread.cpu(), wanted.spread, layout.dtype)
    _check_scores(native, wanted, there, found)
    _check_choice(native, wanted, there, found)
    for share in (0.0, 0.4, 1.0):
        for masked in (False, True):
            selection = native.random_selection(share, masked=masked, seed=5)
            outs = []
            providers: tuple[tuple[PageKernels, RaggedProblem], ...] = (
                (host, native),
                (here, there),
            )
            for kernels, problem in providers:
                state = problem.state()
                kernels.attend_pages(
                    problem.query, state, problem.page_list(selection), layout, problem.scale
                )
                first = state.l.clone()
                kernels.attend_pages(
                    problem.query, state, problem.window_list(), layout, problem.scale
                )
                outs.append((first > 0, state.acc / state.l[..., None], state.m + state.l.log()))
            name = f"attend_pages, {share:.0%}{', masked' if masked else ''}"
            (seen, want, want_lse), (got_seen, got, got_lse) = outs
            if not torch.equal(got_seen.cpu(), seen):
                raise CheckError(f"{name}: other queries have seen a page")
            expect(name, got, want, TOLERANCE[layout.dtype])
            expect(f"{name}, lse", got_lse, want_lse, 1e-2)


def _check_spread(name: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Mean and variance, which may be rounded the other way."""
    expect(name, got.view(dtype).float(), want.view(dtype).float(), torch.finfo(dtype).eps + 1e-5)


def _check_scores(
    native: RaggedProblem, wanted: BlockSummaries, there: RaggedProblem, found: BlockSummaries
) -> None:
    """``channel_logits`` of channels as they are and asked for; scores and cover."""
    layout, heads = native.layout, native.query.shape[1]
    channels = max(1, layout.head_size // 8)
    host, here = CpuScoringKernels(), TritonScoringKernels(there.query.device)
    for kind in ("summaries", "asked"):
        contexts: list[ContextSummaries] = [
            getattr(native, kind)(wanted),
            getattr(there, kind)(found),
        ]
        for page_tokens in (1, layout.page_tokens):
            made = []
            providers: tuple[ScoringKernels, ...] = (host, here)
            for kernels, problem, context in zip(providers, (native, there), contexts, strict=True):
                logits, first = kernels.channel_logits(
                    problem.query, context, problem.scale, channels
                )
                scores = kernels.score_tokens(logits, first, heads, context, page_tokens)
                if scores.tokens is None:
                    raise CheckError("score_tokens keeps no logits")
                selection = native.random_selection(0.4, masked=page_tokens == 1, seed=3)
                alpha = kernels.cover(selection, scores.tokens, context)
                made.append((logits, first, scores, alpha))
            (want_logits, first, want, want_alpha), (logits, _, got, alpha) = made
            name = f"of channels ({kind}) by tokens of {page_tokens}"
            _same(f"logits {name}", logits, want_logits, first, heads)
            _same(f"scores {name}", got.score, want.score, want.first, layout.kv_heads)
            _same(f"masses {name}", got.mass, want.mass, want.first, layout.kv_heads)
            masses = _tensor(got.window_mass), _tensor(want.window_mass)
            expect(f"window's mass {name}", *masses, _NEAR)
            expect(f"cover {name}", _tensor(alpha), _tensor(want_alpha), _NEAR)


def _check_choice(
    native: RaggedProblem, wanted: BlockSummaries, there: RaggedProblem, found: BlockSummaries
) -> None:
    """``bound_logits``, ``spread_logits``, ``weigh``, and ``choose`` from the same scores."""
    heads, kv_heads = native.query.shape[1], native.layout.kv_heads
    state = native.state()
    CpuPageKernels().attend_pages(
        native.query, state, native.window_list(), native.layout, native.scale
    )
    lse = state.m + state.l.log()
    host, here = CpuScoringKernels(), TritonScoringKernels(there.query.device)
    for window in (None, lse):
        scores = []
        providers: tuple[ScoringKernels, ...] = (host, here)
        for kernels, problem, held in zip(providers, (native, there), (wanted, found), strict=True):
            context = problem.summaries(held)
            logits, first = kernels.bound_logits(problem.query, context, problem.scale)
            known = None if window is None else window.to(problem.query.device)
            scores.append(kernels.weigh(logits, first, known, heads, context))
        want, got = scores
        _same("bounds and weights", got.score, want.score, want.first, kv_heads)
        pages = [
            kernels.spread_logits(problem.query, problem.summaries(held), problem.scale)
            for kernels, problem, held in zip(
                providers, (native, there), (wanted, found), strict=True
            )
        ]
        _same("logits of mean and variance", pages[1][0], pages[0][0], want.first, heads, 0.02)
        # Of the same codes. Tables of 7 bits on the CPU are wrong by more than rounding is.
        codes = wanted.codes.to(there.query.device)
        same_codes = replace(there.summaries(found), codes_base=addresses(codes))
        coded = native.summaries(wanted), same_codes
        tables = [
            kernels.code_logits(problem.query, held, problem.scale, CODE_BITS)[0]
            for kernels, problem, held in zip(providers, (native, there), coded, strict=True)
        ]
        _same("logits of codes", tables[1], tables[0], want.first, heads, 0.1)
        expect("window's mass", _tensor(got.window_mass), _tensor(want.window_mass), _NEAR)
        same = _on_device(want, kv_heads, there.query.device)
        most = np.maximum(np.diff(want.first) // 2, 0).astype(np.int32)
        for least, p in ((np.zeros_like(most), 0.3), (np.zeros_like(most), 0.9), (most, 1.0)):
            chosen = [host.choose(want, least, most, 1, p), here.choose(same, least, most, 1, p)]
            for name in ("begin", "pages"):
                one, other = (getattr(selection, name) for selection in chosen)
                if not np.array_equal(one, other):
                    raise CheckError(f"choose, p {p}: other {name} than the native kernel's")


def check_packing(device: torch.device, model: Model) -> None:
    """``pack_summarized`` of bounds, spread and channels gives the native kernels' bytes, in pinned
    memory as in an arena."""
    layout, layers, blocks = model.layout(), 3, 4
    plain = SlotGeometry("paged", layers, layout.kv_heads, layout.groups, layout.page_payload_bytes)
    random = torch.Generator().manual_seed(21)
    shape = (layers, blocks + 2, layout.block_bytes // layout.dtype.itemsize)
    kv = torch.randn(shape, generator=random).to(layout.dtype)
    ids = np.array([4, 1, 5, 0])
    for kind in ("bounds", "spread", "channels"):
        geometry = with_summaries(
            plain,
            layout.page_tokens,
            channels=kind == "channels",
            record="spread" if kind == "spread" else "bounds",
        )
        results = []
        providers: tuple[tuple[PageKernels, torch.Tensor], ...] = (
            (CpuPageKernels(), kv),
            (TritonPageKernels(device), kv.to(device)),
        )
        for kernels, caches in providers:
            memory, packing = _packing(list(caches), ids, layout, geometry)
            kernels.pack_summarized(packing, range(layers))
            wait_for(kernels.device)
            results.append(memory)
        for name, want, got in zip(("frames", "rows"), *results, strict=True):
            if kind == "spread" and name == "rows":
                size = summary_bytes(geometry, layout.page_tokens)
                mine, theirs = (part[:, :size].contiguous() for part in (got, want))
                _check_spread("pack_summarized, spread", mine, theirs, layout.dtype)
                continue
            if not torch.equal(got, want):
                raise CheckError(f"pack_summarized, {kind}: other {name} than the native kernel's")


def _packing(
    caches: Sequence[torch.Tensor],
    ids: NDArray[np.int64],
    layout: BlockLayout,
    geometry: SlotGeometry,
) -> tuple[list[torch.Tensor], Packing]:
    """Blocks on their way to frames and rows that are full of one byte, and this memory."""
    channels = geometry.channel_pages > 0
    row = row_bytes(geometry, layout.page_tokens, channels=channels)
    memory = [
        torch.full((len(ids), nbytes), _FILL, dtype=torch.uint8)
        for nbytes in (geometry.frame_bytes, row)
    ]
    if caches[0].is_cuda:
        memory = [part.pin_memory() for part in memory]
    begin = channels_offset(geometry, layout.page_tokens) if channels else -1
    frames, rows = (addresses(part) for part in memory)
    packing = Packing(caches, ids, frames, SummaryRows(rows, begin), layout, geometry)
    return memory, packing


def check_ordered_packing(device: torch.device, model: Model) -> None:
    """``pack_summarized`` puts alike tokens together as well as the native kernels do, and makes
    the rest of the slot from what it has put there; by K and, in one layer, by other rows.

    Rounding differs, and with it which of two tokens near a border goes where: so pages have the
    same tokens nearly everywhere, and the same scatter.
    """
    layout, layers, blocks = model.layout(), 2, 3
    plain = SlotGeometry("paged", layers, layout.kv_heads, layout.groups, layout.page_payload_bytes)
    geometry = with_summaries(plain, layout.page_tokens, channels=True)
    random = torch.Generator().manual_seed(22)
    shape = (layers, blocks, layout.kv_heads, layout.groups, 2, layout.page_tokens)
    kv = torch.randn((*shape, layout.head_size), generator=random)
    kv = (kv + 3 * torch.randn((*shape, 1), generator=random)).to(layout.dtype)
    rows = torch.randn((layout.kv_heads, layout.block_tokens, 32), generator=random)
    ordered, kept = np.array([1, 0], np.uint8), np.array([0, 1, layout.groups], np.int32)
    scatter = []
    providers: tuple[PageKernels, ...] = (CpuPageKernels(), TritonPageKernels(device))
    for kernels in providers:
        order = TokenOrder(ordered, kept, {(0, 1): rows.to(kernels.device)})
        caches = [one.flatten(1).contiguous() for one in kv.to(kernels.device)]
        (frames, rows_made), packing = _packing(caches, np.arange(blocks), layout, geometry)
        kernels.pack_summarized(packing, range(layers), order)
        wait_for(kernels.device)
        found = _pages_of(frames, layout, geometry)
        source = kv.transpose(3, 4).reshape(*found.shape)
        if not torch.equal(found[1], source[1]) or not torch.equal(found[0, 2], source[0, 2]):
            raise CheckError("a layer or a block that keeps its order was ordered")
        if not torch.equal(found.sort(dim=4).values, source.sort(dim=4).values):
            raise CheckError("an ordered block has other tokens than before")
        pages = frames[:, geometry.header_bytes :].reshape(blocks, -1, geometry.page_bytes)
        packed = pages[:, : geometry.kv_pages, : geometry.payload_bytes].reshape(blocks, layers, -1)
        there = [packed[:, layer].contiguous().view(layout.dtype) for layer in range(layers)]
        (_, again), packing = _packing(there, np.arange(blocks), layout, geometry)
        CpuPageKernels().pack_summarized(packing, range(layers))
        if not torch.equal(again, rows_made):
            raise CheckError("the summaries are not those of the pages")
        scatter.append(_scatter(found[0, 0, :, 0], layout.page_tokens))
    if scatter[1] > 1.05 * scatter[0]:
        raise CheckError(f"pages scatter {scatter[1]:.4g}, those of the native kernel {scatter[0]}")


def _pages_of(frames: torch.Tensor, layout: BlockLayout, geometry: SlotGeometry) -> torch.Tensor:
    """Tokens of frames, [layers, blocks, kv_heads, 2, block_tokens, head_size]."""
    pages = frames[:, geometry.header_bytes :].reshape(len(frames), -1, geometry.page_bytes)
    numbers = pages[:, : geometry.kv_pages, : geometry.payload_bytes].contiguous()
    shape = (len(frames), geometry.layers, geometry.heads, layout.groups, 2, layout.page_tokens)
    tokens = numbers.view(layout.dtype).view(*shape, layout.head_size).permute(1, 0, 2, 4, 3, 5, 6)
    return tokens.reshape(*tokens.shape[:4], layout.block_tokens, layout.head_size)


def _scatter(key: torch.Tensor, page_tokens: int) -> float:
    """Squared distances of tokens, [heads, tokens, size], from their pages' means, added up."""
    pages = key.float().reshape(len(key), -1, page_tokens, key.shape[2])
    return float((pages - pages.mean(dim=2, keepdim=True)).square().sum())


def check_digest(device: torch.device) -> None:
    """Digests of tensors on the device are those of the host; a probe sees changes."""
    random = torch.Generator().manual_seed(31)
    sizes = (1, 7, 8, 9, 4095, 16 * 1024 - 3, 16 * 1024 + 8, 3 * 2**20 + 5)
    parts = [torch.randint(0, 256, (n,), generator=random, dtype=torch.uint8) for n in sizes]
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.float8_e4m3fn)
    parts += [torch.randn((33, 65), generator=random).to(dtype) for dtype in dtypes]
    parts += [parts[-4].t(), parts[-4][:, 3:21]]  # another order of memory; gaps
    from vllm_ssdkv.triton_kernels.digest import digest, read_words

    want = digest_tensors(parts)
    there = [_as_it_lies(part, device) for part in parts]
    found = digest_tensors(there)
    if not np.array_equal(found, want):
        raise CheckError(f"digest_tensors: {found.tolist()} in place of {want.tolist()}")
    kernel = digest([part.to(device) for part in parts[: len(sizes)]])
    if not np.array_equal(kernel.cpu().numpy().view(np.uint64), want[: len(sizes)]):
        raise CheckError("digest: the kernel gives another number than the native code")
    words = torch.randint(-(1 << 62), 1 << 62, (700,), generator=random)
    which = torch.randperm(700, generator=random)[:300]
    held = words.to(device)
    if not torch.equal(read_words((held.data_ptr() + 8 * which).to(device)).cpu(), words[which]):
        raise CheckError("read_words: other words than those at the addresses")
    probe = TensorProbe(there)
    if probe.changed():
        raise CheckError("a probe calls tensors changed that nobody has touched")
    there[7].zero_()
    if not probe.changed():
        raise CheckError("a probe does not see that a tensor has changed")


def _as_it_lies(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device with the same strides."""
    span = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = torch.zeros(span, dtype=tensor.dtype, device=device)
    return memory.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _tensor(values: torch.Tensor | NDArray[np.float32]) -> torch.Tensor:
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(values)


def _lines(values: object, first: NDArray[np.int64], heads: int) -> list[torch.Tensor]:
    """The rows of a native table as tensors ``[heads, columns]``."""
    flat = torch.as_tensor(values)
    edges = (first * heads).tolist()
    return [
        flat[low:high].view(heads, -1) if high > low else torch.zeros((heads, 0))
        for low, high in itertools.pairwise(edges)
    ]


def _same(
    name: str,
    got: object,
    want: object,
    first: NDArray[np.int64],
    heads: int,
    tolerance: float = _NEAR,
) -> None:
    """Compare a padded table of a device with a native one; raises ``CheckError``."""
    if not isinstance(got, torch.Tensor):
        raise CheckError(f"{name}: not a tensor")
    for row, lines in enumerate(_lines(want, first, heads)):
        expect(f"{name}, row {row}", got[row, :, : lines.shape[1]], lines, tolerance)


def _on_device(scores: Scores, heads: int, device: torch.device) -> Scores:
    """Native scores as a device's: both choose from the same numbers then."""
    shape = len(scores.first) - 1, heads, max(1, int(np.diff(scores.first).max()))
    tables = []
    for values in (scores.score, scores.mass):
        padded = torch.full(shape, torch.nan)
        for row, lines in enumerate(_lines(values, scores.first, heads)):
            padded[row, :, : lines.shape[1]] = lines
        tables.append(padded.to(device))
    window = _tensor(scores.window_mass).to(device)
    return Scores(tables[0], tables[1], window, scores.first)
