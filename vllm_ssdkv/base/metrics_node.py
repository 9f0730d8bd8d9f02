"""Metrics of nodes: of an engine that uses one (option ``nodes``), and of a node itself.

A node shows its own on the port of its option ``metrics``, beside those of its stores, under the
names that engines have for them.
"""

from __future__ import annotations

from typing import Final

from vllm_ssdkv.base.metric import Label, Metric, counter, gauge

NODE_METRICS: Final[tuple[Metric, ...]] = (
    gauge(
        "node_connected",
        "share",
        "Share of the engine's nodes that answer it; with one node 0 or 1. Nothing is found or "
        "stored in a node that does not answer, and requests are computed (nodes).",
        combine="min",
    ),
    counter(
        "node_sessions_lost",
        "sessions",
        "Sessions with the node that ended unexpectedly; each of an engine's processes has one.",
    ),
    counter(
        "node_call_failures",
        "calls",
        "Calls that the node refused or did not answer in time.",
    ),
    counter(
        "pool_loads",
        "loads",
        "Loads, in part or whole, that went to a second node: `failed_over`, after the first one "
        "failed, or `hedged`, because it was late; `overtaken` counts those in which the second "
        "was first (nodes, replicas).",
        Label("kind", ("failed_over", "hedged", "overtaken")),
    ),
    counter(
        "prefix_waits",
        "requests",
        "Requests that waited for blocks which others were computing: `served`, or `taken_over` "
        "because the others were too slow (nodes).",
        Label("end", ("served", "taken_over")),
    ),
)
"""Metrics of nodes, in the order of the document."""


CALLS: Final = (
    *("Bind", "Lookup", "Find", "Last", "Claim", "Touch", "Pin", "Unpin", "Drop", "ForgetAll"),
    *("Grant", "Publish"),
    *("AskGauges", "TellWeights", "Save", "Load", "Discard", "AskStatus"),
    *("AskDrives", "AskVolumes", "OpenVolumes", "MoveBytes", "RemoveVolume", "Attend"),
)
"""Names of calls, for a label."""

REFUSALS: Final = (
    *("magic", "flags", "sequence", "size", "files", "kind", "version", "body", "credit"),
    *("order", "memory", "keys", "store", "limit", "closing"),
)
"""Causes for which a connection is refused, for a label."""

NODE_SERVER_METRICS: Final[tuple[Metric, ...]] = (
    gauge(
        "node_sessions",
        "sessions",
        "Sessions connected to the node: those of engines' processes and of status clients.",
        Label("role", ("scheduler", "worker", "status", "volume")),
    ),
    gauge("node_stores", "stores", "Stores that the node has open."),
    gauge("node_pins", "pins", "Pins of slots that sessions hold, as leases."),
    gauge("node_claims", "slots", "Slots that engines have claimed but not yet written."),
    counter("node_calls", "calls", "Calls that the node has executed.", Label("call", CALLS)),
    counter(
        "node_bytes",
        "bytes",
        "Bytes of blocks that engines have saved in the node and loaded from it, and of K and V "
        "that the node has attended to for them.",
        Label("direction", ("saved", "loaded", "attended")),
    ),
    counter(
        "node_refusals",
        "connections",
        "Connections that the node has refused, at their beginning or for a frame, by cause.",
        Label("cause", REFUSALS),
    ),
    counter(
        "node_sessions_ended",
        "sessions",
        "Sessions that have ended: the engine's connection was lost or silent for the lease, the "
        "node refused a frame, or the node ended.",
        Label("cause", ("gone", "refused", "closing")),
    ),
    counter(
        "node_stores_removed",
        "stores",
        "Closed stores that were removed because another store needed their space on a drive.",
    ),
    counter(
        "node_pins_released",
        "pins",
        "Pins that were released because their session ended.",
    ),
)
"""Metrics of the node's process, not of an engine's."""
