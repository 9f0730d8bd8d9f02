"""Metrics of nodes: of an engine that uses one (option ``nodes``)."""

from __future__ import annotations

from typing import Final

from vllm_ssdkv.base.metric import Label, Metric, counter, gauge

NODE_METRICS: Final[tuple[Metric, ...]] = (
    gauge(
        "node_connected",
        "0 or 1",
        "1 while the node answers this engine; 0: nothing is found in it or stored, and requests "
        "are computed (nodes).",
        combine="min",
    ),
    counter(
        "node_sessions_lost",
        "sessions",
        "Sessions with the node that ended before this engine ended them; each of an engine's "
        "processes has one.",
    ),
    counter(
        "node_call_failures",
        "calls",
        "Calls that the node refused or did not answer in time.",
    ),
    counter(
        "prefix_waits",
        "requests",
        "Requests that waited for blocks which others were computing: `served`, or `taken_over`, "
        "where the others came too late (nodes).",
        Label("end", ("served", "taken_over")),
    ),
)
"""In the order of the document."""
