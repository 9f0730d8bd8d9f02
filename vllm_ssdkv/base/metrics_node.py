"""Metrics of nodes: of an engine that uses one (option ``nodes``)."""

from __future__ import annotations

from typing import Final

from vllm_ssdkv.base.metric import Label, Metric, counter, gauge

NODE_METRICS: Final[tuple[Metric, ...]] = (
    gauge(
        "node_connected",
        "share",
        "Share of the engine's nodes that answer it; of one node 0 or 1. In one that does not "
        "nothing is found or stored, and requests are computed (nodes).",
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
        "pool_loads",
        "loads",
        "Parts of loads that a second node was asked for: `failed_over`, where the first one had "
        "not brought them, or `hedged`, where it was late; of these `overtaken`, where the second "
        "was first (nodes, replicas).",
        Label("kind", ("failed_over", "hedged", "overtaken")),
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
