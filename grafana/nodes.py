"""The dashboard ``nodes``: nodes, their stores and drives, and the engines that use them."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from vllm_ssdkv.grafana.panels import (
    BAD,
    WARN,
    graph,
    in_node,
    new_dashboard,
    number,
    on_node,
    ours,
    quantile,
    rate,
    row,
    share,
    total,
    with_engine_choice,
    with_node_choice,
)

_EACH_STORE: Final = ("instance", "model_name", "store")
_STORE_LEGEND: Final = "{{model_name}} {{store}} {{instance}}"
_EACH_DRIVE: Final = ("instance", "device")
"""Each store has a directory of its own below a device, so that its path names the store too."""
_DRIVE_LEGEND: Final = "{{device}} {{instance}}"
_EACH_ENGINE: Final = ("instance", "engine")
_ENGINE_LEGEND: Final = "{{instance}}/{{engine}}"


def nodes() -> Dashboard:
    """The whole dashboard."""
    empty = new_dashboard(
        "SSDKV nodes",
        "ssdkv-nodes",
        "Nodes, which keep the KV of several engines: sessions, calls, stores, drives, and the "
        "engines that use them.",
    )
    board = with_engine_choice(with_node_choice(empty))
    _numbers(board)
    _sessions(board)
    _work(board)
    _stores(board)
    _drives(board)
    _engines(board)
    return board


def _numbers(board: Dashboard) -> None:
    for panel in (
        number(
            "Nodes that answer",
            "Nodes whose metrics Prometheus reads.",
            "none",
            (f"count({on_node('node_stores')})", "nodes"),
        ),
        number(
            "Engines without a node",
            "Engines that name a node which does not answer them. They compute what they would "
            "find there. Where an engine names several nodes, it counts by the share that is "
            "missing.",
            "none",
            (f"sum(1 - {ours('node_connected')})", "engines"),
            limits=[(1, BAD)],
        ),
        number(
            "Engines connected",
            "Schedulers that have a session with a node: one for each engine.",
            "none",
            (total(on_node("node_sessions", 'role="scheduler"')), "engines"),
        ),
        number(
            "Stores open",
            "One for each kind of KV that engines ask for.",
            "none",
            (total(on_node("node_stores")), "stores"),
        ),
        number(
            "Drives of nodes out of service",
            "SSDs, of each store, that have failed and were taken out until the node restarts.",
            "none",
            (f"sum(1 - {in_node('device_state')})", "drives"),
            limits=[(1, BAD)],
        ),
        number(
            "Connections refused",
            "Since the start of the nodes.",
            "short",
            (total(on_node("node_refusals_total")), "connections"),
        ),
    ):
        board.with_panel(panel)


def _sessions(board: Dashboard) -> None:
    board.with_row(row("Sessions"))
    for panel in (
        graph(
            "Sessions",
            "Halves of engines, and askers, that are connected. `most_sessions` is the most there "
            "may be.",
            "none",
            (total(on_node("node_sessions"), "role"), "{{role}}"),
            stacked=True,
        ),
        graph(
            "Pins and claims",
            "Slots that sessions have pinned, and slots that engines have claimed and that are not "
            "written yet. Both fall to 0 when no request runs.",
            "none",
            (total(on_node("node_pins")), "pins"),
            (total(on_node("node_claims")), "claims"),
        ),
        graph(
            "Stores by node",
            "A node closes the store that nobody uses for longest where no share is left, and "
            "removes one where a drive's `capacity` has no room for another.",
            "none",
            (total(on_node("node_stores"), "instance"), "{{instance}} open"),
            (total(on_node("node_stores_removed_total"), "instance"), "{{instance}} removed"),
        ),
        graph(
            "Sessions ended",
            "By cause: the engine is gone or was silent for `lease`, the node refused a frame, or "
            "the node ended.",
            "ops",
            (rate(on_node("node_sessions_ended_total"), "cause"), "{{cause}}"),
        ),
        graph(
            "Pins released",
            "Pins that were undone because their session ended.",
            "ops",
            (rate(on_node("node_pins_released_total")), "released"),
        ),
        graph(
            "Refusals",
            "Connections that nodes have refused, by cause. All but `closing`, which is the end of "
            "a node, want a look at the node's log.",
            "ops",
            (rate(on_node("node_refusals_total"), "cause"), "{{cause}}"),
        ),
    ):
        board.with_panel(panel)


def _work(board: Dashboard) -> None:
    board.with_row(row("Work"))
    for panel in (
        graph(
            "Calls",
            "Calls per second that nodes have carried out.",
            "ops",
            (rate(on_node("node_calls_total"), "call"), "{{call}}"),
            stacked=True,
        ),
        graph(
            "Bytes",
            "Bytes of blocks per second that engines have saved in nodes and loaded from them.",
            "Bps",
            (rate(on_node("node_bytes_total"), "direction"), "{{direction}}"),
        ),
        graph(
            "Slots of nodes stored and evicted",
            "As many evicted as stored: the stores are full and work as caches do.",
            "ops",
            (rate(in_node("slots_stored_total")), "stored"),
            (rate(in_node("slots_evicted_total")), "evicted"),
        ),
    ):
        board.with_panel(panel)


def _stores(board: Dashboard) -> None:
    board.with_row(row("Stores"))
    frames, slots = (total(in_node(name), *_EACH_STORE) for name in ("dram_frames", "slots"))
    for panel in (
        graph(
            "DRAM in use",
            "Share of each store's frames that hold data.",
            "percentunit",
            (share(total(in_node("dram_frames_used"), *_EACH_STORE), frames), _STORE_LEGEND),
        ),
        graph(
            "DRAM not yet written",
            "Share of each store's frames that are not on an SSD yet.",
            "percentunit",
            (share(total(in_node("dram_frames_dirty"), *_EACH_STORE), frames), _STORE_LEGEND),
        ),
        graph(
            "Slots in use",
            "Share of the blocks that each store has room for. A cache is full most of its life.",
            "percentunit",
            (
                share(f"({slots} - {total(in_node('slots_free'), *_EACH_STORE)})", slots),
                _STORE_LEGEND,
            ),
        ),
        graph(
            "Slots of nodes",
            "Of all stores. Pinned ones belong to requests that run.",
            "none",
            (total(in_node("slots_ready")), "ready"),
            (total(in_node("slots_free")), "free"),
            (total(in_node("slots_pinned")), "pinned"),
        ),
        graph(
            "Not stored by nodes",
            "Blocks that engines wanted to save and that are not stored, by cause.",
            "ops",
            (rate(in_node("stores_skipped_total"), "cause"), "{{cause}}"),
        ),
        graph(
            "Slots of nodes lost",
            "By cause. `engine`: not all ranks had saved the block when its engine ended.",
            "ops",
            (rate(in_node("slots_dropped_total"), "cause"), "{{cause}}"),
        ),
    ):
        board.with_panel(panel)


def _drives(board: Dashboard) -> None:
    board.with_row(row("Drives of nodes"))
    latency = in_node("io_latency_seconds_bucket")
    for panel in (
        graph(
            "Out of service on nodes",
            "0 while the drive is used, 1 once the node has taken it out.",
            "none",
            (f"1 - {total(in_node('device_state'), *_EACH_DRIVE)}", _DRIVE_LEGEND),
            limits=[(1, BAD)],
        ),
        graph(
            "Read and written",
            "Bytes per second.",
            "Bps",
            (rate(in_node("bytes_read_total"), *_EACH_DRIVE), f"{_DRIVE_LEGEND} read"),
            (rate(in_node("bytes_written_total"), *_EACH_DRIVE), f"{_DRIVE_LEGEND} written"),
        ),
        graph(
            "Latency on nodes, 99 %",
            "A drive that is far above its neighbours is dying or does garbage collection.",
            "s",
            (
                quantile(0.99, latency, *_EACH_DRIVE, "direction"),
                f"{_DRIVE_LEGEND} {{{{direction}}}}",
            ),
        ),
        graph(
            "Errors of drives",
            "Failed requests by kind.",
            "ops",
            (
                rate(in_node("io_errors_total"), *_EACH_DRIVE, "kind"),
                f"{_DRIVE_LEGEND} {{{{kind}}}}",
            ),
        ),
        graph(
            "Bad data on nodes",
            "Found by checksums and tags, by headers, and by the scrub. None of it reaches a "
            "request.",
            "ops",
            (rate(in_node("checksum_failures_total")), "checksums"),
            (rate(in_node("header_mismatches_total")), "headers"),
            (rate(in_node("scrub_bad_pages_total")), "scrub"),
        ),
        graph(
            "Endurance of drives used",
            "Bytes written as a share of `tbw`. Empty without this option.",
            "percentunit",
            (total(in_node("wear_used"), *_EACH_DRIVE), _DRIVE_LEGEND),
            limits=[(0.8, WARN), (1, BAD)],
        ),
    ):
        board.with_panel(panel)


def _engines(board: Dashboard) -> None:
    board.with_row(row("Engines that use a node"))
    for panel in (
        graph(
            "Node answers",
            "Share of the engine's nodes that answer it. At 0 nothing is found or stored, and "
            "requests are computed. An idle engine shows what was last.",
            "none",
            (total(ours("node_connected"), *_EACH_ENGINE), _ENGINE_LEGEND),
        ),
        graph(
            "Sessions lost, calls that failed",
            "Sessions that ended before their engine ended them, and calls that the node refused "
            "or did not answer in time.",
            "ops",
            (rate(ours("node_sessions_lost_total"), *_EACH_ENGINE), f"{_ENGINE_LEGEND} sessions"),
            (rate(ours("node_call_failures_total"), *_EACH_ENGINE), f"{_ENGINE_LEGEND} calls"),
        ),
        graph(
            "Second nodes asked",
            "Parts of loads that the other node with the blocks was asked for, because the first "
            "one failed or was late, and how often the other one was first.",
            "ops",
            (rate(ours("pool_loads_total"), "kind"), "{{kind}}"),
        ),
        graph(
            "Waits for prefixes",
            "Requests that waited for blocks which others were computing. Many that took over: "
            "the others die, or come too late.",
            "ops",
            (rate(ours("prefix_waits_total"), "end"), "{{end}}"),
        ),
    ):
        board.with_panel(panel)
