"""The dashboard ``devices``: each SSD's work, speed, errors and wear."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from vllm_ssdkv.grafana.panels import (
    BAD,
    DEVICE_LEGEND,
    EACH_DEVICE,
    WARN,
    graph,
    new_dashboard,
    of_device,
    ours,
    quantile,
    rate,
    row,
    share,
    total,
    with_device_choice,
    with_engine_choice,
)

_DIRECTED = f"{DEVICE_LEGEND} {{{{direction}}}}"


def devices() -> Dashboard:
    """The whole dashboard."""
    empty = new_dashboard(
        "SSDKV devices", "ssdkv-devices", "The SSDs of the KV cache: work, speed, errors, wear."
    )
    board = with_device_choice(with_engine_choice(empty))
    _state(board)
    _work(board)
    _speed(board)
    _wear(board)
    return board


def _state(board: Dashboard) -> None:
    board.with_row(row("State"))
    for panel in (
        graph(
            "Out of service",
            "0 while the device is used, 1 once its engine has taken it out.",
            "none",
            (f"1 - {total(of_device('device_state'), *EACH_DEVICE)}", DEVICE_LEGEND),
            limits=[(1, BAD)],
        ),
        graph(
            "Share of what is stored now",
            "Lowered while the device is slow or lost.",
            "percentunit",
            (total(of_device("device_share"), *EACH_DEVICE), DEVICE_LEGEND),
        ),
        graph(
            "Blocks out of reach",
            "Stored on a device that is out of use: they are found again with it.",
            "none",
            (total(ours("slots_masked")), "masked"),
            limits=[(1, WARN)],
        ),
        graph(
            "Blocks rewritten",
            "Stored again after a hit, where they are read faster.",
            "ops",
            (rate(ours("blocks_rewritten_total")), "rewritten"),
        ),
        graph(
            "Errors",
            "Failed requests by kind, and refusals to be trimmed.",
            "ops",
            (
                rate(of_device("io_errors_total"), *EACH_DEVICE, "kind"),
                f"{DEVICE_LEGEND} {{{{kind}}}}",
            ),
            (rate(of_device("trim_errors_total"), *EACH_DEVICE), f"{DEVICE_LEGEND} trim"),
        ),
    ):
        board.with_panel(panel)


def _work(board: Dashboard) -> None:
    board.with_row(row("Work"))
    read, written = of_device("bytes_read_total"), of_device("bytes_written_total")
    for panel in (
        graph("Read", "Bytes per second.", "Bps", (rate(read, *EACH_DEVICE), DEVICE_LEGEND)),
        graph("Written", "Bytes per second.", "Bps", (rate(written, *EACH_DEVICE), DEVICE_LEGEND)),
        graph(
            "Requests",
            "I/O requests per second.",
            "iops",
            (rate(of_device("io_requests_total"), *EACH_DEVICE, "direction"), _DIRECTED),
        ),
        graph(
            "Bytes per request",
            "Small requests cost throughput: SSDs are fastest from 128 KiB on.",
            "bytes",
            *(
                (
                    share(
                        rate(of_device(f"bytes_{past}_total"), *EACH_DEVICE),
                        rate(
                            of_device("io_requests_total", f'direction="{direction}"'), *EACH_DEVICE
                        ),
                    ),
                    f"{DEVICE_LEGEND} {direction}",
                )
                for past, direction in (("read", "read"), ("written", "write"))
            ),
        ),
        graph(
            "Scrubbed",
            "Bytes read again to find what has gone bad, of all devices.",
            "Bps",
            (rate(ours("scrub_bytes_total")), "scrub"),
        ),
        graph(
            "Trimmed",
            "Bytes of dropped slots that were given back to the device.",
            "Bps",
            (rate(of_device("bytes_trimmed_total"), *EACH_DEVICE), DEVICE_LEGEND),
        ),
    ):
        board.with_panel(panel)


def _speed(board: Dashboard) -> None:
    board.with_row(row("Speed"))
    buckets = of_device("io_latency_seconds_bucket")
    depth = of_device("io_queue_depth_bucket")
    for panel in (
        graph(
            "Latency, median",
            "Time that half of the requests spent in the device, at most.",
            "s",
            (quantile(0.5, buckets, *EACH_DEVICE, "direction"), _DIRECTED),
        ),
        graph(
            "Latency, 99 %",
            "A device that is far above its neighbours is dying or does garbage collection.",
            "s",
            (quantile(0.99, buckets, *EACH_DEVICE, "direction"), _DIRECTED),
        ),
        graph(
            "Queue depth",
            "Requests in the device when one more was given to it: mean, and 95 %.",
            "none",
            (
                share(
                    rate(of_device("io_queue_depth_sum"), *EACH_DEVICE),
                    rate(of_device("io_queue_depth_count"), *EACH_DEVICE),
                ),
                f"{DEVICE_LEGEND} mean",
            ),
            (quantile(0.95, depth, *EACH_DEVICE), f"{DEVICE_LEGEND} 95 %"),
        ),
    ):
        board.with_panel(panel)


def _wear(board: Dashboard) -> None:
    board.with_row(row("Space and wear"))
    for panel in (
        graph(
            "Data files",
            "Their size.",
            "bytes",
            (total(of_device("store_bytes"), *EACH_DEVICE), DEVICE_LEGEND),
        ),
        graph(
            "Written in the life of the store",
            "Bytes, and their share of the endurance where the option `tbw` gives it.",
            "decbytes",
            (total(of_device("wear_bytes"), *EACH_DEVICE), DEVICE_LEGEND),
        ),
        graph(
            "Endurance and budget used",
            "Bytes written as a share of `tbw`, and today's as a share of `daily_write_budget`. "
            "Empty without these options.",
            "percentunit",
            (total(of_device("wear_used"), *EACH_DEVICE), f"{DEVICE_LEGEND} endurance"),
            (
                total(of_device("write_budget_used"), *EACH_DEVICE),
                f"{DEVICE_LEGEND} today's budget",
            ),
            limits=[(0.8, WARN), (1, BAD)],
        ),
    ):
        board.with_panel(panel)
