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
        "Steps with contexts by who attended to these: the `device`, or the `step`, as where a "
        "part of a prompt is computed or the device is out of use.",
        Label("by", ("device", "step")),
        combine="max",
    ),
    counter(
        "offload_tickets",
        "tickets",
        "Pieces of work handed to the device: one per layer, and one more where rows choose.",
    ),
    counter(
        "offload_failures",
        "failures",
        "Times that the device raised an error, answered with something else than was asked for, "
        "or made no progress until its deadline. The work was done without it.",
        Label("cause", ("error", "answer", "deadline")),
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
        "offload_step_seconds",
        "seconds",
        "Time that the forward pass spent on handing work in and on folding answers, without the "
        "wait for these.",
        combine="max",
    ),
)
