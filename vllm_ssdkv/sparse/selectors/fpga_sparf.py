"""SparF whose scores, choice and filter are computed by an FPGA's kernel. See ``sparf``.

The kernel reads channels of the contexts and keys of the windows in memory of the host, and answers
with a bit for each token. What it chooses is what ``SparfSelector`` chooses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import FpgaError
from vllm_ssdkv.fpga_offload.backend import Backend, SparfResult, SparfWork
from vllm_ssdkv.fpga_offload.description import ENTRY, PAGE_TOKENS, SPARF_JOB
from vllm_ssdkv.sparse.protocol import ContextSummaries, Selection, page_budget
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class FpgaChoice:
    """An FPGA that chooses, until it fails. Used by the thread of the forward pass.

    Attributes:
        backend: Runs the kernel.
        count: Called for each call of the kernel.
        in_use: Whether it is; once it has failed, it never is again.
    """

    backend: Backend
    count: Callable[[], None]
    in_use: bool = True
    _told: set[str] = field(default_factory=set)

    def give_up(self, error: FpgaError) -> None:
        """The host chooses from now on."""
        self.in_use = False
        logger.error(
            "ssdkv: offload: %s chooses no more until the engine starts again: %s; the host "
            "chooses in its place",
            self.backend.name,
            error,
        )

    def tell(self, reason: str) -> None:
        """Say, once, that the host chooses in some calls."""
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("ssdkv: offload: the host chooses: %s", reason)


class FpgaSparfSelector:
    """See ``protocol.Selector``. What the kernel cannot take, and all of it once the FPGA has
    failed, is chosen by the host's kernels, with the same result.

    Example:
        selector = FpgaSparfSelector(SparfSelector(...), FpgaChoice(backend, lambda: None))
    """

    def __init__(self, inner: SparfSelector, choice: FpgaChoice):
        """``inner`` has the options, and chooses where the FPGA does not."""
        self.name, self.needs, self.budget = inner.name, inner.needs, inner.budget
        self._inner = inner
        self._choice = choice

    def select(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        window_lse: torch.Tensor | None = None,
    ) -> Selection:
        """See ``protocol.Selector``."""
        choice = self._choice
        if choice.in_use and not (reason := self._problem(query, context)):
            try:
                return self._select(query, context, scale)
            except FpgaError as error:
                choice.give_up(error)
        elif choice.in_use:
            choice.tell(reason)
        return self._inner.select(query, context, scale, window_lse)

    def _problem(self, query: torch.Tensor, context: ContextSummaries) -> str:
        """Reason for the kernel not to take this call; empty if it does."""
        backend, layout = self._choice.backend, context.layout
        if context.channel_base is None:
            return "the kernel reads channels in memory of the host"
        if query.shape[1] != layout.kv_heads * backend.shape.group or not query.is_cpu:
            return f"the queries are not in groups of {backend.shape.group} on the host"
        longest = int((context.context_tokens + context.window_tokens).max(initial=0))
        if longest > backend.limits.sparf_tokens:
            return f"a context of {longest} tokens, the limit is {backend.limits.sparf_tokens}"
        return ""

    def _select(self, query: torch.Tensor, context: ContextSummaries, scale: float) -> Selection:
        inner, layout = self._inner, context.layout
        by_page = inner.granularity == "page"
        if by_page:
            keep = page_budget(inner.budget, context).astype(np.int64)
            sinks = -(-inner.sink_tokens // layout.page_tokens)
            most = context.pages
        else:
            held = context.window_tokens.astype(np.int64)
            keep = inner.budget.context_tokens(context.context_tokens, held, context.ahead)
            sinks, most = inner.sink_tokens, context.context_tokens
        lists = _Lists.of(context, keep)
        rows, heads, _ = query.shape
        group = heads // layout.kv_heads
        bits = query.contiguous().view(torch.int16).numpy().view(np.uint16)
        work = SparfWork(
            bits.reshape(rows * layout.kv_heads, group, layout.head_size),
            lists.entries,
            lists.jobs,
            lists.channels,
            scale,
            partials=len(lists.jobs),
            block_tokens=layout.block_tokens,
            page_tokens=layout.page_tokens,
            keep_channels=min(inner.channels, layout.head_size),
            sinks=sinks,
            by_page=by_page,
            v_offset=layout.page_tokens * layout.head_size * layout.dtype.itemsize,
        )
        result = self._choice.backend.sparf(work)
        self._choice.count()
        return self._selection(result, lists, context, keep >= most)

    def _selection(
        self,
        result: SparfResult,
        lists: _Lists,
        context: ContextSummaries,
        whole: NDArray[np.bool_],
    ) -> Selection:
        """The kernel's answer. ``whole`` [R]: rows that choose all of their contexts."""
        layout = context.layout
        rows = len(context)
        parts = layout.page_tokens // PAGE_TOKENS
        masks = result.masks[lists.context].reshape(-1, parts)
        chosen = np.flatnonzero(masks.any(axis=1))
        begin = np.searchsorted(chosen, lists.first_page).astype(np.int32)
        job = np.searchsorted(lists.first_page, chosen, side="right") - 1
        pages = (chosen - lists.first_page[job]).astype(np.int32)
        token_mask = None
        if self._inner.granularity == "token":
            bits = masks[chosen][:, :, None] >> np.arange(PAGE_TOKENS, dtype=np.uint32)
            token_mask = (bits & 1).astype(np.uint8).reshape(len(chosen), layout.page_tokens)
        alpha = result.alpha
        mass = alpha.mean(axis=1, dtype=np.float32).reshape(rows, layout.kv_heads)
        mass[whole] = 1
        rest = alpha.reshape(rows, -1) if self._inner.estimate_rest else None
        return Selection(pages, begin, mass, token_mask, rest)


@dataclass(frozen=True, slots=True)
class _Lists:
    """Lists of one call, a job for each row and KV head, in that order.

    Attributes:
        jobs, entries, channels: As of ``SparfWork``.
        context: Places in ``entries`` of all contexts' ones, job after job, int64.
        first_page: First page of each job among these, and the end, int64 [J + 1].
    """

    jobs: NDArray[np.void]
    entries: NDArray[np.void]
    channels: NDArray[np.uint64]
    context: NDArray[np.int64]
    first_page: NDArray[np.int64]

    @classmethod
    def of(cls, context: ContextSummaries, keep: NDArray[np.int64]) -> _Lists:
        """``keep`` [R]: tokens or pages that each row chooses for each of its heads.

        Raises:
            ValueError: the summaries lack channels or windows.
        """
        layout = context.layout
        base, window = context.channel_base, context.window_base
        begin, end = context.window_begin, context.window_end
        if base is None or window is None or begin is None or end is None:
            raise ValueError("channel-major K and the window's addresses are not in the summaries")
        rows, heads = len(context), layout.kv_heads
        parts = layout.block_tokens // PAGE_TOKENS
        blocks = (context.row_end - context.row_begin).astype(np.int64)
        of_window = -(-context.window_tokens.astype(np.int64) // PAGE_TOKENS)
        each = np.repeat(blocks * parts + of_window, heads)
        first = np.concatenate([[0], np.cumsum(each)])
        jobs = np.zeros(rows * heads, SPARF_JOB.dtype)
        jobs["query"] = jobs["out"] = np.arange(len(jobs))
        jobs["channel_blocks"] = np.repeat(blocks, heads)
        channel_edges = np.concatenate([[0], np.cumsum(np.repeat(blocks, heads))])
        jobs["first_channels"] = channel_edges[:-1]
        jobs["first_entry"] = first[:-1]
        jobs["first_window"] = first[:-1] + np.repeat(blocks * parts, heads)
        jobs["window_entries"] = np.repeat(of_window, heads)
        jobs["keep"] = np.repeat(keep, heads)
        entries = np.zeros(first[-1], ENTRY.dtype)
        channels = np.zeros(channel_edges[-1], np.uint64)
        here = np.zeros(len(entries), np.bool_)
        head_bytes = layout.head_size * layout.block_tokens * layout.dtype.itemsize
        for job in range(len(jobs)):
            row, head = divmod(job, heads)
            low, high = int(context.row_begin[row]), int(context.row_end[row])
            at = slice(int(channel_edges[job]), int(channel_edges[job + 1]))
            channels[at] = base[low:high] + np.uint64(head * head_bytes)
            edge = int(jobs["first_window"][job])
            here[int(first[job]) : edge] = True
            mine = window[int(begin[row]) : int(end[row])]
            count = int(context.window_tokens[row])
            address, tokens = _window(mine, count, head, context)
            entries["address"][edge : edge + len(address)] = address
            entries["tokens"][edge : edge + len(address)] = tokens
        pages = np.repeat(blocks * layout.groups, heads)
        edges = np.concatenate([[0], np.cumsum(pages)])
        return cls(jobs, entries, channels, np.flatnonzero(here), edges)


def _window(
    blocks: NDArray[np.uint64], count: int, head: int, context: ContextSummaries
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Address and tokens of the entries of a window of ``count`` tokens, for one KV head."""
    layout = context.layout
    pages = (head * layout.groups + np.arange(layout.groups)) * layout.page_stride_bytes
    part_bytes = PAGE_TOKENS * layout.head_size * layout.dtype.itemsize
    parts = np.arange(layout.page_tokens // PAGE_TOKENS) * part_bytes
    places = (pages[:, None] + parts[None, :]).ravel().astype(np.uint64)
    used = -(-count // PAGE_TOKENS)
    address = (blocks[:, None] + places[None, :]).ravel()[:used]
    tokens = np.minimum(count - np.arange(used) * PAGE_TOKENS, PAGE_TOKENS)
    return address, tokens
