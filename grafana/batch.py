"""The dashboard ``batch``: batches, their requests, the prefill they share, users beside them."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from vllm_ssdkv.grafana.panels import (
    TOKENS_PER_S,
    WARN,
    graph,
    new_dashboard,
    number,
    on_server,
    quantile,
    rate,
    row,
    share,
    total,
    with_server_choice,
)

_REQUESTS: Final = on_server("ssdkv_batch_requests_total")
_PROMPT: Final = on_server("ssdkv_batch_prompt_tokens_total")
_SAVED: Final = on_server("ssdkv_batch_saved_tokens_total")
_STORED: Final = total(on_server("ssdkv_batch_bytes"))
_UNENDED: Final = total(on_server("ssdkv_batches_unended"))
_RUNNING: Final = total(on_server("ssdkv_batch_requests_running"))


def batch() -> Dashboard:
    """The whole dashboard."""
    board = with_server_choice(
        new_dashboard(
            "SSDKV batch jobs",
            "ssdkv-batch",
            "The Batch API: jobs, requests, saved prefill, and what users beside them see.",
        )
    )
    _numbers(board)
    _jobs(board)
    _prefill(board)
    _users(board)
    _trouble(board)
    return board


def _answered(outcome: str) -> str:
    return on_server("ssdkv_batch_requests_total", f'outcome="{outcome}"')


def _numbers(board: Dashboard) -> None:
    for panel in (
        number(
            "Batches not ended",
            "Those in validation, in progress and being cancelled.",
            "none",
            (_UNENDED, "batches"),
        ),
        number(
            "Requests running",
            "Of batches, now. `batch.concurrency` is the most there may be.",
            "none",
            (_RUNNING, "requests"),
        ),
        number(
            "Requests answered",
            "Since the start of the server.",
            "short",
            (total(_answered("completed")), "requests"),
        ),
        number(
            "Requests failed",
            "Since the start of the server; those of batches that were cancelled or expired, too.",
            "short",
            (total(_answered("failed")), "requests"),
            limits=[(1, WARN)],
        ),
        number(
            "Prefill saved",
            "Share of the prompt tokens of answered requests that was found in a cache, since the "
            "start of the server.",
            "percentunit",
            (share(total(_SAVED), total(_PROMPT)), "saved"),
        ),
        number(
            "Files and results",
            "Their size. At `batch.capacity` batches end and uploads are refused.",
            "bytes",
            (_STORED, "bytes"),
        ),
    ):
        board.with_panel(panel)


def _jobs(board: Dashboard) -> None:
    board.with_row(row("Jobs"))
    for panel in (
        graph(
            "Batches by state",
            "Those that have not ended now, and those that have since the start of the server.",
            "none",
            (_UNENDED, "not ended"),
            (total(on_server("ssdkv_batches_ended_total"), "outcome"), "{{outcome}}"),
        ),
        graph(
            "Requests by outcome",
            "Lines per second that output and error files got.",
            "ops",
            (rate(_REQUESTS, "outcome"), "{{outcome}}"),
            stacked=True,
        ),
        graph(
            "Queue",
            "Requests of batches that run, beside all that vLLM runs and lets wait, and batches "
            "that are held since users have, or wait for, the KV. While users' requests wait, "
            "batches take too much: lower `batch.concurrency` or `batch.kv_share`.",
            "none",
            (_RUNNING, "of batches"),
            (total(on_server("ssdkv_batches_held")), "batches held"),
            (total(on_server("num_requests_running")), "all running"),
            (total(on_server("num_requests_waiting")), "all waiting"),
        ),
    ):
        board.with_panel(panel)


def _prefill(board: Dashboard) -> None:
    board.with_row(row("Prefill"))
    for panel in (
        graph(
            "Prompt tokens",
            "Per second, of answered requests: found in a cache, and computed.",
            TOKENS_PER_S,
            (rate(_SAVED), "saved"),
            (f"{rate(_PROMPT)} - {rate(_SAVED)}", "computed"),
            stacked=True,
        ),
        graph(
            "Prefill saved",
            "Share of the prompt tokens that was found in a cache. Requests that begin alike run "
            "one after the other; a low share says that few do.",
            "percentunit",
            (share(rate(_SAVED), rate(_PROMPT)), "saved"),
        ),
        graph(
            "Tokens restored",
            "Per second, by the tier that they came from, users' requests included. What runs in "
            "a good order finds its prefix in DRAM.",
            TOKENS_PER_S,
            (rate(on_server("ssdkv_hit_tokens_total"), "tier"), "{{tier}}"),
            stacked=True,
        ),
    ):
        board.with_panel(panel)


def _users(board: Dashboard) -> None:
    board.with_row(row("All requests, those of users too"))
    first_token = on_server("time_to_first_token_seconds_bucket")
    next_token = on_server("inter_token_latency_seconds_bucket")
    for panel in (
        graph(
            "Time to first token",
            "Requests of batches are in it; their wait for a turn is not.",
            "s",
            (quantile(0.5, first_token), "median"),
            (quantile(0.95, first_token), "95 %"),
        ),
        graph(
            "Time between tokens",
            "More requests at a time make it longer.",
            "s",
            (quantile(0.5, next_token), "median"),
            (quantile(0.95, next_token), "95 %"),
        ),
        graph(
            "Throughput",
            "Tokens per second that vLLM took in and gave out.",
            TOKENS_PER_S,
            (rate(on_server("prompt_tokens_total")), "prompts"),
            (rate(on_server("generation_tokens_total")), "answers"),
        ),
    ):
        board.with_panel(panel)


def _trouble(board: Dashboard) -> None:
    board.with_row(row("What goes wrong"))
    for panel in (
        graph(
            "Requests that failed",
            "Share of the lines that went to error files: bad requests, cancelled and expired "
            "batches.",
            "percentunit",
            (share(rate(_answered("failed")), rate(_REQUESTS)), "failed"),
        ),
        graph(
            "Errors of files",
            "Times that the runner could not read or write its files. It tries again.",
            "ops",
            (rate(on_server("ssdkv_batch_errors_total")), "errors"),
        ),
        graph(
            "Files and results",
            "Their size. At `batch.capacity` batches end and uploads are refused.",
            "bytes",
            (_STORED, "bytes"),
        ),
    ):
        board.with_panel(panel)
