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
        "Lists in sparse_selections that the query of an earlier token had chosen.",
    ),
    counter(
        "sparse_pages_selected",
        "pages",
        "Context pages chosen, all lists of sparse_selections together.",
    ),
    counter("sparse_pages_in_context", "pages", "Context pages available to choose from."),
    counter(
        "sparse_pages_fetched",
        "pages",
        "Chosen pages by source: the memory of the GPU, a frame, the page cache, or a device. A "
        "page that several requests chose at once counts once.",
        Label("tier", ("hbm", "dram", "page_cache", "ssd")),
    ),
    counter(
        "sparse_bytes_fetched",
        "bytes",
        "Bytes of whole pages fetched, by source, including the data that pages were chosen by. "
        "`token` pages were chosen, `channel` pages hold a channel used for the choice, `summary` "
        "pages are read when a request's decode begins. Channels in memory count as `dram`.",
        Label("pages", ("token", "channel", "summary")),
        Label("tier", ("hbm", "dram", "page_cache", "ssd")),
    ),
    counter(
        "sparse_bytes_kept",
        "bytes",
        "Bytes of tokens that were attended to, and of channels that they were chosen by; the "
        "filter dropped the rest of the fetched bytes.",
        Label("pages", ("token", "channel")),
    ),
    counter(
        "sparse_pages_read_ahead",
        "pages",
        "Pages prefetched because the query of the token before had chosen them, or nearly had.",
    ),
    counter(
        "sparse_read_ahead_hits",
        "pages",
        "Prefetched pages that a query chose; the rest were read in vain.",
    ),
    counter(
        "sparse_missing_mass",
        "shares",
        "Estimated share of attention that was not attended to, summed over sparse_selections.",
    ),
    counter(
        "sparse_selections_short",
        "lists",
        "Lists in sparse_selections of `adaptive` that reached the budget before the mass of "
        "`sparse.mass`.",
    ),
    gauge(
        "sparse_clusters",
        "clusters",
        "Clusters of pages of the requests that choose by `swarm`, including those of a single "
        "page; all layers, KV heads and ranks.",
    ),
    gauge(
        "sparse_cluster_members",
        "pages",
        "Pages in sparse_clusters; a page counts in each of its clusters.",
    ),
    gauge(
        "sparse_clustered_pages",
        "pages",
        "Pages in sparse_clusters, each page once: `1 - sparse_clustered_pages / "
        "sparse_cluster_members` are copies.",
    ),
    counter(
        "sparse_rows_exact",
        "rows",
        "Decoded tokens that attended to everything, because DRAM has no room for the selector's "
        "data about their pages.",
        combine="max",
    ),
    counter(
        "sparse_requests_refused",
        "requests",
        "Requests with options that this engine cannot serve: they got exact attention instead, "
        "and retained nothing.",
    ),
)
