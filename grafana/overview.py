"""The dashboard ``overview``: what the store spares, where KV is, what goes wrong."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.models.common import BigValueTextMode

from vllm_ssdkv.grafana.panels import (
    BAD,
    EACH_DEVICE,
    SECONDS_PER_S,
    TOKENS_PER_S,
    WARN,
    graph,
    new_dashboard,
    number,
    ours,
    quantile,
    rate,
    row,
    share,
    stored,
    theirs,
    total,
    with_engine_choice,
)

_ASKED = rate(theirs("external_prefix_cache_queries_total"))
_LOADED = rate(theirs("external_prefix_cache_hits_total"))
_COMPUTED = rate(ours("hit_tokens_computed_total"))
_HIT_RATE = share(f"({_LOADED} + {_COMPUTED})", _ASKED)
_FULL = share(
    f"({total(stored('slots'))} - {total(stored('slots_free'))})",
    total(stored("slots")),
)


def overview() -> Dashboard:
    """The whole dashboard."""
    board = with_engine_choice(
        new_dashboard(
            "SSDKV overview",
            "ssdkv-overview",
            "KV cache of vLLM on HBM, DRAM and SSDs: what it spares, where KV is, what goes wrong.",
        )
    )
    _numbers(board)
    _worth(board)
    _requests(board)
    _tiers(board)
    _trouble(board)
    return board


def _numbers(board: Dashboard) -> None:
    for panel in (
        number(
            "Devices out of service",
            "SSDs that have failed and were taken out; the dashboard of devices says which.",
            "none",
            (f"sum(1 - {ours('device_state')})", "devices"),
            limits=[(1, BAD)],
        ),
        number(
            "Hit rate",
            "Share of the prompt tokens asked of the store that it had.",
            "percentunit",
            (_HIT_RATE, "found"),
        ),
        number(
            "Store in use",
            "Share of the blocks that the store has room for, with what it may still grow by, that "
            "is in use. A cache is full most of its life.",
            "percentunit",
            (_FULL, "in use"),
        ),
        number(
            "In force",
            "Mode, I/O engine and selector of each engine.",
            "none",
            (
                total(ours("info"), "mode", "io_engine", "selector"),
                "{{mode}}, {{io_engine}}, {{selector}}",
            ),
            BigValueTextMode.NAME,
        ),
    ):
        board.with_panel(panel)


def _worth(board: Dashboard) -> None:
    """Gains of the store, and their price in writes."""
    board.with_row(row("Worth it?"))
    written = total(stored("wear_bytes"), *EACH_DEVICE)
    used = total(stored("wear_used"), *EACH_DEVICE)
    daily = total(f"increase({stored('bytes_written_total')}[1d])", *EACH_DEVICE)
    for panel in (
        number(
            "Time saved",
            "Estimated time to first token that requests were spared, less what was lost.",
            "s",
            (f"{total(ours('seconds_saved_total'))} - {total(ours('seconds_lost_total'))}", "s"),
        ),
        number(
            "Prompt tokens not computed",
            "Prompt tokens that were read from the store, since the start.",
            "short",
            (total(ours("hit_tokens_total")), "tokens"),
        ),
        number(
            "Written a day",
            "Bytes written to all drives in the last 24 hours.",
            "decbytes",
            (total(f"increase({stored('bytes_written_total')}[1d])"), "bytes"),
        ),
        number(
            "Drive life left",
            "Time until the first drive has used up its endurance at the rate of the last 24 "
            "hours. Empty without the option `tbw`.",
            "s",
            (f"min(({written} / ({used} > 0) - {written}) / ({daily} > 0)) * 86400", "left"),
        ),
    ):
        board.with_panel(panel)


def _requests(board: Dashboard) -> None:
    board.with_row(row("Requests"))
    first_token = theirs("time_to_first_token_seconds_bucket")
    next_token = theirs("inter_token_latency_seconds_bucket")
    for panel in (
        graph(
            "Prompt tokens restored",
            "By the tier that they came from, and those that the store had but that were "
            "computed because this was expected to be faster.",
            TOKENS_PER_S,
            (rate(ours("hit_tokens_total"), "tier"), "{{tier}}"),
            (_COMPUTED, "computed"),
            stacked=True,
        ),
        graph(
            "Hit rate",
            "Share of the prompt tokens asked of the store that it had, and of those that were "
            "loaded. What is between the lines was computed: this was expected to be faster.",
            "percentunit",
            (_HIT_RATE, "found"),
            (share(_LOADED, _ASKED), "loaded"),
        ),
        graph(
            "Time saved and lost",
            "Seconds of time to first token per second. Lost: loads that took longer than "
            "computing was estimated to.",
            SECONDS_PER_S,
            (rate(ours("seconds_saved_total"), "by"), "saved by {{by}}"),
            (rate(ours("seconds_lost_total")), "lost"),
        ),
        graph(
            "Time to first token",
            "Of all requests, hits or not.",
            "s",
            (quantile(0.5, first_token), "median"),
            (quantile(0.95, first_token), "95 %"),
        ),
        graph(
            "Time between tokens",
            "In page mode this contains the reads of context.",
            "s",
            (quantile(0.5, next_token), "median"),
            (quantile(0.95, next_token), "95 %"),
        ),
        graph(
            "Requests",
            "Those that run and those that wait.",
            "none",
            (total(theirs("num_requests_running")), "running"),
            (total(theirs("num_requests_waiting")), "waiting"),
        ),
    ):
        board.with_panel(panel)


def _tiers(board: Dashboard) -> None:
    board.with_row(row("Where KV is"))
    frames = total(stored("dram_frames"))
    for panel in (
        graph(
            "Memory tiers in use",
            "HBM as vLLM counts it; DRAM frames that hold data, and those not yet on an SSD.",
            "percentunit",
            (f"avg({theirs('kv_cache_usage_perc')})", "HBM"),
            (share(total(stored("dram_frames_used")), frames), "DRAM"),
            (share(total(stored("dram_frames_dirty")), frames), "DRAM, not yet written"),
        ),
        graph(
            "Slots",
            "Slots of the SSDs, of engines and of nodes. Pinned ones belong to requests that run.",
            "none",
            (total(stored("slots_ready")), "ready"),
            (total(stored("slots_free")), "free"),
            (total(stored("slots_pinned")), "pinned"),
        ),
        graph(
            "Slots stored and evicted",
            "As many evicted as stored: the store is full and works as a cache does.",
            "ops",
            (rate(ours("slots_stored_total")), "stored"),
            (rate(ours("slots_evicted_total")), "evicted"),
        ),
        graph(
            "Context pages brought in",
            "Page mode: pages of context that steps needed and HBM did not have.",
            "ops",
            (rate(ours("context_pages_streamed_total"), "tier"), "{{tier}}"),
            stacked=True,
        ),
        graph(
            "Not stored, not started",
            "Blocks that are not stored, by cause; all but `store_full` are what the options ask "
            "for. How often requests begin to wait, by reason (docs/messages.md), and how often "
            "they ask again for slots that they wait for (page mode).",
            "ops",
            (rate(ours("stores_skipped_total"), "cause"), "not stored: {{cause}}"),
            (rate(ours("waits_total"), "reason"), "waits: {{reason}}"),
            (rate(ours("slot_waits_total")), "asks for slots again"),
        ),
        graph(
            "Journal",
            "Its size. It is rewritten when half of it is outdated.",
            "bytes",
            (total(ours("journal_bytes")), "journal"),
        ),
    ):
        board.with_panel(panel)


def _trouble(board: Dashboard) -> None:
    board.with_row(row("What goes wrong"))
    for panel in (
        graph(
            "Back-pressure",
            "Share of the time in which steps waited for room in the write buffer: the SSDs write "
            "more slowly than KV is made.",
            "percentunit",
            (rate(ours("write_stall_seconds_total")), "stalled"),
            limits=[(0.1, WARN)],
        ),
        graph(
            "Loads that failed",
            "Loads that did not bring everything, and requests computed again, by what was "
            "missing. They are answered all the same.",
            "ops",
            (rate(ours("load_failures_total")), "failed loads"),
            (rate(ours("recomputed_requests_total"), "cause"), "computed again: {{cause}}"),
        ),
        graph(
            "Slots lost",
            "By cause.",
            "ops",
            (rate(ours("slots_dropped_total"), "cause"), "{{cause}}"),
        ),
        graph(
            "Bad data",
            "Found by checksums and tags, by headers, and by the scrub. None of it reaches a "
            "request.",
            "ops",
            (rate(ours("checksum_failures_total")), "checksums"),
            (rate(ours("header_mismatches_total")), "headers"),
            (rate(ours("scrub_bad_pages_total")), "scrub"),
        ),
        graph(
            "Errors of I/O",
            "Requests to SSDs that failed, by kind, and batches not complete at their deadline.",
            "ops",
            (rate(ours("io_errors_total"), "kind"), "{{kind}}"),
            (rate(ours("io_deadline_exceeded_total")), "batches too late"),
        ),
        graph(
            "Errors of the store's own files",
            "While they last, a restart forgets what is stored.",
            "ops",
            (rate(ours("journal_errors_total"), "call"), "journal: {{call}}"),
            (rate(ours("manifest_errors_total")), "manifest"),
            (rate(ours("wear_file_errors_total")), "wear.json"),
        ),
    ):
        board.with_panel(panel)
