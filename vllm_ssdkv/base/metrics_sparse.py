"""Metrics of sparse decode: what was chosen, and where it was."""

from __future__ import annotations

from typing import Final

from vllm_ssdkv.base.metric import Label, Metric, counter, gauge

SPARSE_METRICS: Final[tuple[Metric, ...]] = (
    counter(
        "sparse_selections",
        "lists",
        "Lists of pages that were attended to: one per decoded token, layer and KV head (page, "
        "sparse).",
    ),
    counter(
        "sparse_selections_reused",
        "lists",
        "Of sparse_selections, those that the query of a token before had chosen.",
    ),
    counter("sparse_pages_selected", "pages", "Context pages chosen, all of these lists together."),
    counter("sparse_pages_in_context", "pages", "Context pages that there were to choose from."),
    counter(
        "sparse_pages_fetched",
        "pages",
        "Chosen pages by where they were: in the memory of the GPU, in a frame, in the page cache, "
        "or read from a device. A page that several requests chose at once counts once.",
        Label("tier", ("hbm", "dram", "page_cache", "ssd")),
    ),
    counter(
        "sparse_bytes_fetched",
        "bytes",
        "The same in bytes of whole pages, those by which they were chosen included: `token` pages "
        "were chosen, `channel` pages hold a channel that they were chosen by, `summary` pages are "
        "read when a request's decode begins. Channels in memory count as `dram`.",
        Label("pages", ("token", "channel", "summary")),
        Label("tier", ("hbm", "dram", "page_cache", "ssd")),
    ),
    counter(
        "sparse_bytes_kept",
        "bytes",
        "Bytes of tokens that were attended to, and of channels that they were chosen by; the "
        "filter dropped the rest of what was fetched.",
        Label("pages", ("token", "channel")),
    ),
    counter(
        "sparse_pages_read_ahead",
        "pages",
        "Pages read before a query chose them, because the query of the token before had, or "
        "nearly had.",
    ),
    counter(
        "sparse_read_ahead_hits",
        "pages",
        "Pages that were read ahead, at the first time that a query chose them; the others were "
        "read in vain.",
    ),
    counter(
        "sparse_missing_mass",
        "shares",
        "Share of attention that by the selector's estimate was not attended to, added up over "
        "sparse_selections.",
    ),
    counter(
        "sparse_selections_short",
        "lists",
        "Of sparse_selections, those of `adaptive` that the budget ended before they had the mass "
        "that `sparse.mass` asks for.",
    ),
    gauge(
        "sparse_clusters",
        "clusters",
        "Clusters of pages of the requests that choose by `swarm`, those of a single page "
        "included, all layers, KV heads and ranks.",
    ),
    gauge(
        "sparse_cluster_members",
        "pages",
        "Pages in these clusters; a page counts in each one that it is in.",
    ),
    gauge(
        "sparse_clustered_pages",
        "pages",
        "The same, each page once: `1 - sparse_clustered_pages / sparse_cluster_members` are "
        "copies.",
    ),
    counter(
        "sparse_rows_exact",
        "rows",
        "Decoded tokens that attended to everything, because DRAM has no room for what the "
        "selector must know of their pages.",
        combine="max",
    ),
    counter(
        "sparse_requests_refused",
        "requests",
        "Requests that chose what this engine cannot serve, and got exact attention instead.",
    ),
)
