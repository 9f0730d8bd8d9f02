"""The dashboard ``sparse``: what sparse attention chooses, where it was, what it costs."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.models.common import BigValueTextMode

from vllm_ssdkv.grafana.panels import (
    DEVICE_LEGEND,
    EACH_DEVICE,
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
_SHORT: Final = share(rate(ours("sparse_selections_short_total")), _LISTS)
_BYTES: Final = ours("sparse_bytes_fetched_total")
_KEPT: Final = ours("sparse_bytes_kept_total")
_IN_MEMORY: Final = share(
    rate(ours("sparse_pages_fetched_total", 'tier=~"hbm|dram|page_cache"')), _FETCHED
)
_WAITING: Final = share(
    rate(ours("attention_seconds_total", 'part="wait"')), rate(ours("attention_seconds_total"))
)
_CHOOSING_STEPS: Final = rate(ours("context_steps_total", 'attention="sparse"'))
_EXACT_STEPS: Final = rate(ours("context_steps_total", 'attention="exact"'))
_READ: Final = share(rate(ours("bytes_read_total")), rate(ours("bytes_used_total")))
# What is read ahead in one interval may be used in the next, which is no amplification below 1.
_AMPLIFICATION: Final = f"clamp_min({_READ}, 1)"


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
    _reads(board)
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
            "Read amplification",
            "Bytes read from SSDs for each byte of KV that requests got out of them.",
            "none",
            (_AMPLIFICATION, "read / used"),
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
            "that the budget leaves out more of what these requests look at. And the share of "
            "lists, of `adaptive`, that the budget ended before they had what `sparse.mass` asks.",
            "percentunit",
            (_MISSING_MASS, "missed"),
            (_SHORT, "lists with less than asked"),
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
            "Of pages to attend to, per second; what is reused was chosen for a token before "
            "(`sparse.reuse_steps`).",
            "ops",
            (_LISTS, "lists"),
            (rate(ours("sparse_selections_reused_total")), "reused"),
        ),
        graph(
            "Tokens that attended to everything",
            "Because DRAM has no room for what the selector must know: raise `sparse.summaries`.",
            "ops",
            (rate(ours("sparse_rows_exact_total")), "tokens"),
        ),
        graph(
            "Requests refused",
            "They asked for a selector or a budget that there is not, and attend to everything.",
            "ops",
            (rate(ours("sparse_requests_refused_total")), "requests"),
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
            "`hbm`: in memory of the GPU; `dram`: in a frame of a whole slot; `page_cache`: read "
            "lately; `ssd`: read now.",
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
            "Bytes fetched",
            "Chosen pages (`token`), channels and pages of them that they were chosen by, and what "
            "is read when decode begins (`summary`).",
            "Bps",
            (rate(_BYTES, "pages", "tier"), "{{pages}}, {{tier}}"),
            stacked=True,
        ),
        graph(
            "Kept after the filter",
            "Share of the fetched bytes that was attended to, or that pages were chosen by. Low: "
            "single tokens are chosen, or channels in large pages.",
            "percentunit",
            (
                share(rate(_KEPT), rate(ours("sparse_bytes_fetched_total", 'pages!="summary"'))),
                "kept",
            ),
        ),
        graph(
            "Guesses that were right",
            "Of the pages read ahead, for a layer whose query was not known yet. What is missing "
            "to all of them was read in vain.",
            "percentunit",
            (
                share(
                    rate(ours("sparse_read_ahead_hits_total")),
                    rate(ours("sparse_pages_read_ahead_total")),
                ),
                "hits",
            ),
        ),
    ):
        board.with_panel(panel)


def _reads(board: Dashboard) -> None:
    """The rest of the row "Where pages were"."""
    for panel in (
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
            (rate(ours("bytes_read_total"), *EACH_DEVICE), DEVICE_LEGEND),
        ),
        graph(
            "Read amplification",
            "Bytes read from SSDs for each byte of KV that requests got out of them: what is above "
            "1 are headers, padding, bounds of pages, and the scrub.",
            "none",
            (_AMPLIFICATION, "read / used"),
        ),
        graph(
            "Pages per step",
            "Context pages of all ranks that a step brought in: chosen ones, of the steps that "
            "choose, and those of exact attention, of the steps that have such.",
            "none",
            (share(_FETCHED, _CHOOSING_STEPS), "chosen"),
            (share(rate(ours("context_pages_streamed_total")), _EXACT_STEPS), "exact"),
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
            "Share of its room for single pages that is in use. It fills up and stays full. `hbm`: "
            "that of `sparse.hbm_pages`.",
            "percentunit",
            (share(total(ours("page_cache_pages")), total(ours("page_cache_places"))), "in use"),
            # 0 where sparse.hbm_pages is off.
            (
                f"{total(ours('hot_pages_held'))} / "
                f"clamp_min({total(ours('hot_pages_places'))}, 1)",
                "hbm",
            ),
        ),
        graph(
            "Summaries",
            "Share of the room for summaries that is in use. Those of running requests must be "
            "in memory.",
            "percentunit",
            (share(total(ours("summaries_held")), total(ours("summaries_places"))), "in use"),
        ),
        graph(
            "Frames in use",
            "Frames of whole slots that hold data.",
            "percentunit",
            (share(total(ours("dram_frames_used")), frames), "in use"),
        ),
        graph(
            "Clusters",
            "Of requests that choose by `swarm`. As many clusters as pages: none are together. "
            "More pages in clusters than pages: some are in several.",
            "short",
            (total(ours("sparse_clusters")), "clusters"),
            (total(ours("sparse_cluster_members")), "pages in clusters"),
            (total(ours("sparse_clustered_pages")), "pages"),
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
            "Share of the time, all layers, of the rank that takes longest: choosing, looking up "
            "and checking (fetch), waiting for bytes, attending, merging. Prompts are in it.",
            "percentunit",
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
