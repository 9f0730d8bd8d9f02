"""A node and engines that use it, as Prometheus sees them."""

from __future__ import annotations

from typing import Any

QWEN, LLAMA = ("Qwen/Qwen3-8B", "0123456789abcdef"), ("some/llama", "fedcba9876543210")

NODE: dict[str, Any] = {
    "node_sessions": {("scheduler",): 2, ("worker",): 2},
    "node_stores": {(): 2},
    "node_pins": {(): 7},
    "node_claims": {(): 5},
    "node_calls": {("Lookup",): 1000},
    "node_bytes": {("saved",): 1 << 20},
}
ENGINE: dict[str, Any] = {
    "info": {("reuse", "node", "exact"): 1},
    "node_connected": {(): 1},
    "node_sessions_lost": {(): 0},
    "node_call_failures": {(): 1},
    "pool_loads": {("hedged",): 2, ("overtaken",): 1},
    "prefix_waits": {("served",): 3, ("taken_over",): 1},
    "slots_stored": {(): 40},
}
"""An engine of a node shows what it did, not how full the node is."""


def store(path: str) -> dict[str, Any]:
    """Series that a store of a node shows, with one drive."""
    return {
        **{name: {(): 100} for name in ("slots", "slots_ready", "slots_free", "slots_pinned")},
        **{name: {(): 8} for name in ("dram_frames", "dram_frames_used", "dram_frames_dirty")},
        **{name: {(): 1} for name in ("slots_stored", "slots_evicted", "checksum_failures")},
        **{name: {(): 1} for name in ("header_mismatches", "scrub_bad_pages")},
        "slots_dropped": {("engine",): 1},
        "stores_skipped": {("write_buffer",): 1},
        "device_state": {(path,): 1},
        "wear_used": {(path,): 0.25},
        "bytes_read": {(path,): 1 << 20},
        "bytes_written": {(path,): 1 << 20},
        "io_latency_seconds": {(path, "read"): [0.002] * 10},
        "io_errors": {(path, "eio"): 1},
    }


PATH = "/a/0123456789abcdef"
STORES = {QWEN: store(PATH), LLAMA: store("/a/fedcba9876543210")}
