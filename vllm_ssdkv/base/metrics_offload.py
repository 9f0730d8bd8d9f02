"""Metrics of attention near storage (option ``offload``)."""

from __future__ import annotations

from typing import Final

from vllm_ssdkv.base.metric import Label, Metric, counter, gauge

OFFLOAD_METRICS: Final[tuple[Metric, ...]] = (
    gauge(
        "offload_in_use",
        "devices",
        "Devices that attend to contexts near storage; it falls to 0 when one fails, and then the "
        "accelerator attends to everything (offload).",
    ),
    counter(
        "offload_steps",
        "steps",
        "Steps with contexts by attending side: the `device`, the `step` (part of a prompt is "
        "computed, or the device is out of use), or `both`.",
        Label("by", ("device", "step", "both")),
        combine="max",
    ),
    gauge(
        "offload_share",
        "0 to 1",
        "Share of the device in the bytes of the latest steps, for contexts and for pages that "
        "rows chose (offload.share).",
        Label("of", ("contexts", "pages")),
        combine="max",
    ),
    gauge(
        "offload_rate",
        "bytes/s",
        "Bytes of K and V attended to per second of a step's attention, by path: the `step` "
        "alone, the `device` alone, and `both` at once. `offload.share: auto` takes the fastest.",
        Label("of", ("contexts", "pages")),
        Label("way", ("step", "device", "both")),
    ),
    counter(
        "offload_trials",
        "steps",
        "Steps that took another path than the best one known, to measure its current time.",
        Label("of", ("contexts", "pages")),
    ),
    counter(
        "offload_tickets",
        "tickets",
        "Jobs handed to the device: one per layer, and one more if rows choose.",
    ),
    counter(
        "offload_kernel_calls",
        "calls",
        "Calls of an FPGA's kernels: `attend` to all listed pages, `sparf` to choose tokens or "
        "pages (offload.kind).",
        Label("kernel", ("attend", "sparf")),
    ),
    counter(
        "offload_peer_pages",
        "pages",
        "Pages that drives wrote directly into an FPGA's memory, by the result of the checksums "
        "that the kernel computes. Wrong pages are read again through the host's memory "
        "(offload.peer).",
        Label("found", ("right", "wrong")),
    ),
    counter(
        "offload_failures",
        "failures",
        "Failures of the device: it raised an error, gave a wrong kind of answer, or made no "
        "progress until its deadline; or, once for a connection, a node had no room for blocks. "
        "The work was done without it.",
        Label("cause", ("error", "answer", "deadline", "room")),
    ),
    counter(
        "offload_bytes",
        "bytes",
        "Bytes between accelerator and device: queries and the pages that they chose there, "
        "partial results back, and K and V once, when blocks leave the memory of the accelerator.",
        Label("payload", ("query", "selection", "partials", "kv")),
    ),
    counter(
        "offload_seconds",
        "seconds",
        "Time that the device's threads waited for pages, and attended to them.",
        Label("part", ("wait", "attend")),
        combine="max",
    ),
    counter(
        "x_cache_requests",
        "requests",
        "Requests whose contexts are stored as X, the input of the QKV projection, in place of K "
        "and V (offload.x_share).",
    ),
    gauge(
        "x_cache_share",
        "0 to 1",
        "Share of the running contexts that may be stored as X (offload.x_share).",
        combine="max",
    ),
    counter(
        "x_cache_bytes",
        "bytes",
        "Bytes of X that were projected to K and V.",
    ),
    counter(
        "x_cache_projection_seconds",
        "seconds",
        "Time that the forward pass spent on copying X to the accelerator and projecting it.",
        combine="max",
    ),
    counter(
        "offload_step_seconds",
        "seconds",
        "Time that the forward pass spent on submitting work to the device and on merging "
        "answers, without the wait for them.",
        combine="max",
    ),
)
