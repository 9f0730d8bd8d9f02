"""Screens of ``ssdkv top``: a server, or a node."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vllm_ssdkv.base.sizes import approximate_size, blocks_of
from vllm_ssdkv.cli.monitor.metrics_sample import Sample
from vllm_ssdkv.cli.monitor.node_sample import NodeSample, StoreSample
from vllm_ssdkv.cli.monitor.tables import (
    BAD,
    devices_table,
    head,
    named_rows,
    percent,
    share_of,
    short,
    troubles_line,
)


def screen(sample: Sample | NodeSample, problem: str = "") -> Group:
    """The sample for people; ``problem``: why it is not the newest, empty when it is."""
    middle: list[Table | Text]
    if isinstance(sample, NodeSample):
        engines = _counted(sample.sessions["scheduler"], "engine")
        rest = f"{engines}, {_counted(len(sample.stores), 'store')}"
        first = head("node", rest, sample.time, sample.seconds)
        middle = [_node(sample), Text(), _stores(sample.stores)]
    else:
        models = ", ".join(sample.models) or "no model yet"
        first = head(models, "; ".join(sample.in_force), sample.time, sample.seconds)
        middle = [_server(sample)]
    return Group(
        first,
        *([Text(problem, BAD)] if problem else []),
        Text(),
        *middle,
        Text(),
        devices_table(sample.devices),
        Text(),
        troubles_line(sample.troubles),
    )


def _server(sample: Sample) -> Table:
    per_second = sample.restored_tokens_per_s
    rows: list[tuple[str, str | Text]] = [
        ("requests", f"{sample.requests_running} running, {sample.requests_waiting} waiting"),
        (
            "tokens/s",
            f"{sample.prompt_tokens_per_s:,.0f} prompt, "
            f"{sample.generation_tokens_per_s:,.1f} generated",
        ),
        (
            "hit rate",
            f"{percent(sample.hit_rate)} now, {percent(sample.hit_rate_since_start)} "
            "since the start",
        ),
        (
            "restored",
            "; ".join(
                f"{tier} {per_second[tier]:,.0f} tokens/s, {count:,} since the start"
                for tier, count in sample.restored_tokens.items()
            ),
        ),
    ]
    if sample.node_answers is None:  # a node shows its store itself
        rows += [*_worth(sample), *_store(sample)]
    rows.append(("HBM", percent(sample.hbm_used)))
    if any(sample.context_pages_per_s.values()):
        pages = sample.context_pages_per_s.items()
        rows.append(("context", ", ".join(f"{tier} {n:,.0f} pages/s" for tier, n in pages)))
    if sample.node_answers is not None:
        rows.append(("node", "answers" if sample.node_answers else Text("DOES NOT ANSWER", BAD)))
    return named_rows(rows)


def _worth(sample: Sample) -> list[tuple[str, str | Text]]:
    """Gains of the store, and their price: writes and the life of the drives."""
    tokens = sum(sample.restored_tokens.values())
    written = f"{approximate_size(round(sample.written_bytes_per_day))} a day at this rate"
    if sample.worst_years_left is not None:
        written += f"; drives last {sample.worst_years_left:,.1f} years"
    return [
        ("saved", f"{sample.seconds_saved:,.0f} s, {tokens:,} prompt tokens not computed"),
        ("written", written),
    ]


def _store(sample: Sample) -> list[tuple[str, str | Text]]:
    used = sample.slots - sample.slots_free
    return [
        (
            "slots",
            f"{blocks_of(used, sample.slots, sample.slots_to_come)}: {sample.slots_ready:,} "
            f"ready, {sample.slots_retained:,} retained, {sample.slots_pinned:,} pinned, "
            f"{sample.slots_free:,} free",
        ),
        (
            "DRAM",
            f"{percent(share_of(sample.dram_frames_used, sample.dram_frames))} of "
            f"{sample.dram_frames:,} frames, {sample.dram_frames_dirty:,} not yet written",
        ),
    ]


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


def _node(sample: NodeSample) -> Table:
    calls = sorted(sample.calls_per_s.items(), key=lambda item: -item[1])
    ended = [f"{count:,} {cause}" for cause, count in sample.sessions_ended.items() if count]
    refused = [f"{count:,} {cause}" for cause, count in sample.refusals.items()]
    return named_rows(
        [
            ("sessions", ", ".join(f"{n} {role}" for role, n in sample.sessions.items())),
            (
                "leases",
                f"{sample.pins:,} pins, {sample.claims:,} claims; {sample.pins_released:,} pins "
                "released since the start, as their session ended",
            ),
            (
                "calls/s",
                f"{sum(sample.calls_per_s.values()):,.1f}"
                + "".join(f", {name} {rate:,.1f}" for name, rate in calls),
            ),
            (
                "bytes",
                "; ".join(
                    f"{way} {short(sample.bytes_per_s[way] / 1e6)} MB/s, "
                    f"{approximate_size(count)} since the start"
                    for way, count in sample.bytes_since_start.items()
                ),
            ),
            ("ended", ", ".join(ended) or "no session since the start"),
            ("refused", Text(", ".join(refused), BAD) if refused else "nobody since the start"),
        ]
    )


def _stores(stores: tuple[StoreSample, ...]) -> Table:
    """Each store on a line. On 80 columns only names of models are folded."""
    table = Table(box=None, pad_edge=False)
    table.add_column("\nModel", overflow="fold")
    table.add_column("\nStore", no_wrap=True)
    slots, frames = ("Slots\nall", "\nused", "\npinned"), ("DRAM\nframes", "\nused", "\ndirty")
    for name in (*slots, *frames):
        table.add_column(name, justify="right", no_wrap=True)
    for store in stores:
        table.add_row(
            Text(store.model),
            Text(store.store),
            _whole(store.slots),
            percent(share_of(store.slots - store.slots_free, store.slots)),
            _whole(store.slots_pinned),
            _whole(store.dram_frames),
            percent(share_of(store.dram_frames_used, store.dram_frames)),
            _whole(store.dram_frames_dirty),
        )
    return table


def _whole(number: int) -> str:
    return f"{number}" if number < 10_000 else short(number)
