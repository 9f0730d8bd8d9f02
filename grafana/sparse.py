"""The dashboard ``sparse``: what sparse attention chooses, where it was, what it costs."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.models.common import BigValueTextMode

from vllm_ssdkv.grafana.panels import (
    graph,
    new_dashboard,
    number,
    ours,
    parts,
    quantile,
    rate,
    row,
    share,
    theirs,
    total,
    with_engine_choice,
)

_LISTS: Final = rate(ours("sparse_selections_total"))
_CHOSEN: Final = rate(ours("sparse_pages_selected_total"))
_IN_CONTEXT: Final = rate(ours("sparse_pages_in_context_total"))
_FETCHED: Final = rate(ours("sparse_pages_fetched_total"))
_SELECTED_SHARE: Final = share(_CHOSEN, _IN_CONTEXT)
_MISSING_MASS: Final = share(rate(ours("sparse_missing_mass_total")), _LISTS)
_IN_MEMORY: Final = share(
    rate(ours("sparse_pages_fetched_total", 'tier=~"dram|page_cache"')), _FETCHED
)
_WAITING: Final = share(
    rate(ours("attention_seconds_total", 'part="wait"')), rate(ours("attention_seconds_total"))
)
_FROM_SSD: Final = " + ".join(
    rate(ours(f"{pages}_total", 'tier="ssd"'))
    for pages in ("sparse_pages_fetched", "context_pages_streamed")
)
_BYTES_PER_PAGE: Final = share(rate(ours("bytes_read_total")), f"({_FROM_SSD})")


def sparse() -> Dashboard:
    """The whole dashboard."""
    board = with_engine_choice(
        new_dashboard(
            "SSDKV sparse attention",
            "ssdkv-sparse",
            "Sparse decode: pages that are chosen, where they were, and the time of attention.",
        )
    )
    _numbers(board)
    _choice(board)
    _tiers(board)
    _memory(board)
    _time(board)
    return board


def _numbers(board: Dashboard) -> None:
    for panel in (
        number(
            "In force",
            "Selector and mode of each engine. `exact` chooses nothing: all else here is empty.",
            "none",
            (total(ours("info"), "selector", "mode"), "{{selector}}, {{mode}}"),
            BigValueTextMode.NAME,
        ),
        number(
            "Context attended to",
            "Share of the context's pages that decoded tokens choose. The window is not counted.",
            "percentunit",
            (_SELECTED_SHARE, "chosen"),
        ),
        number(
            "Attention missed",
            "By the selector's estimate. Where it takes upper bounds, much of it is not missing.",
            "percentunit",
            (_MISSING_MASS, "missed"),
        ),
        number(
            "Chosen pages in memory",
            "Share of them that was in a frame or in the page cache, so that nothing was read.",
            "percentunit",
            (_IN_MEMORY, "in memory"),
        ),
        number(
            "Attention that waits",
            "Share of the time in attention that is spent waiting for bytes.",
            "percentunit",
            (_WAITING, "waits"),
        ),
        number(
            "Read per page",
            "Bytes read from SSDs for each context page that came from one.",
            "decbytes",
            (_BYTES_PER_PAGE, "per page"),
        ),
    ):
        board.with_panel(panel)


def _choice(board: Dashboard) -> None:
    board.with_row(row("What is chosen"))
    for panel in (
        graph(
            "Context attended to",
            "Share of the context's pages that decoded tokens choose: at most `sparse.budget`, of "
            "which the window takes a part.",
            "percentunit",
            (_SELECTED_SHARE, "chosen"),
        ),
        graph(
            "Attention missed",
            "Mean over lists, by the selector's estimate. What counts is its change: a rise says "
            "that the budget leaves out more of what these requests look at.",
            "percentunit",
            (_MISSING_MASS, "missed"),
        ),
        graph(
            "Pages of a list",
            "Mean over lists: one for each decoded token, layer and KV head.",
            "none",
            (share(_CHOSEN, _LISTS), "chosen"),
            (share(_IN_CONTEXT, _LISTS), "in context"),
        ),
        graph(
            "Pages chosen and passed over",
            "Pages per second; together they are what exact attention would bring in.",
            "ops",
            (_CHOSEN, "chosen"),
            (f"{_IN_CONTEXT} - {_CHOSEN}", "passed over"),
            stacked=True,
        ),
        graph(
            "Lists",
            "Choices per second.",
            "ops",
            (_LISTS, "lists"),
        ),
        graph(
            "Tokens that attended to everything",
            "Because DRAM has no room for the bounds of their pages: raise `sparse.summaries`.",
            "ops",
            (rate(ours("sparse_rows_exact_total")), "tokens"),
        ),
    ):
        board.with_panel(panel)


def _tiers(board: Dashboard) -> None:
    board.with_row(row("Where pages were"))
    cached = ours("sparse_pages_fetched_total", 'tier="page_cache"')
    outside = ours("sparse_pages_fetched_total", 'tier=~"page_cache|ssd"')
    for panel in (
        graph(
            "Chosen pages by tier",
            "`dram`: in a frame of a whole slot; `page_cache`: read lately; `ssd`: read now.",
            "ops",
            (rate(ours("sparse_pages_fetched_total"), "tier"), "{{tier}}"),
            stacked=True,
        ),
        graph(
            "Hits of the page cache",
            "Of the chosen pages that are in no frame. Low: raise `sparse.page_cache`.",
            "percentunit",
            (share(rate(cached), rate(outside)), "hits"),
        ),
        graph(
            "Choices per page",
            "Pages chosen for each page brought in. Above 1 where requests that run together chose "
            "the same one.",
            "none",
            (share(_CHOSEN, _FETCHED), "choices"),
        ),
        graph(
            "Read from SSDs",
            "All reads: chosen pages, exact attention, hits, bounds, scrub.",
            "Bps",
            (rate(ours("bytes_read_total"), "device"), "{{device}}"),
        ),
        graph(
            "Read per page",
            "Bytes read from SSDs for each context page that came from one. The size of a page is "
            "the least; what is above it is read amplification, or was read for hits and scrub.",
            "decbytes",
            (_BYTES_PER_PAGE, "per page"),
        ),
        graph(
            "Pages of exact attention",
            "Context brought in whole: for prompts, short requests and `sparse.dense_layers`.",
            "ops",
            (rate(ours("context_pages_streamed_total"), "tier"), "{{tier}}"),
            stacked=True,
        ),
    ):
        board.with_panel(panel)


def _memory(board: Dashboard) -> None:
    board.with_row(row("Memory"))
    frames = total(ours("dram_frames"))
    for panel in (
        graph(
            "Page cache",
            "Single pages that DRAM holds. It fills up and stays full.",
            "short",
            (total(ours("page_cache_pages")), "pages"),
        ),
        graph(
            "Summaries",
            "Blocks whose page bounds DRAM holds. Those of running requests must be.",
            "short",
            (total(ours("summaries_held")), "blocks"),
        ),
        graph(
            "Frames in use",
            "Frames of whole slots that hold data.",
            "percentunit",
            (share(total(ours("dram_frames_used")), frames), "in use"),
        ),
    ):
        board.with_panel(panel)


def _time(board: Dashboard) -> None:
    board.with_row(row("Time"))
    by_part = rate(ours("attention_seconds_total"), "part")
    next_token = theirs("inter_token_latency_seconds_bucket")
    for panel in (
        graph(
            "Time in attention",
            "Seconds per second, all layers and ranks: choosing, waiting for bytes, attending, "
            "merging. Prompts are in it.",
            "s",
            (by_part, "{{part}}"),
            stacked=True,
        ),
        graph(
            "Time in attention per token",
            "The same for each token that was generated, all requests together.",
            "s",
            (parts(by_part, rate(theirs("generation_tokens_total"))), "{{part}}"),
            stacked=True,
        ),
        graph(
            "Time between tokens",
            "As users see it.",
            "s",
            (quantile(0.5, next_token), "median"),
            (quantile(0.95, next_token), "95 %"),
        ),
    ):
        board.with_panel(panel)
