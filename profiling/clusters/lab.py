"""All measurements of ``ssdkv lab bench clusters`` on recorded traces, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_ssdkv.clustering import routing
from vllm_ssdkv.clustering.clusters import Clusters
from vllm_ssdkv.profiling.clusters import (
    caching,
    mass_recall,
    page_clusters,
    published,
    scores,
    upkeep,
)
from vllm_ssdkv.profiling.clusters.drives import DRIVES, PLACEMENTS, load
from vllm_ssdkv.profiling.clusters.layer_reads import (
    LAYER_HEADS,
    Scored,
    Selector,
    baseline,
)
from vllm_ssdkv.profiling.clusters.trace import I64, PAGE, Bools, Trace, budget_pages
from vllm_ssdkv.profiling.table import Table

_BLOCKS: Final = (0, 128, 512)
_SELECTORS: Final[tuple[Selector, ...]] = ("sparf", "sparf, sum of weights", "spread", "bounds")
CACHE_SHARES: Final = (0.05, 0.1, 0.2, 0.3, 0.5)
_LEAST_MASS: Final = 0.02
_SLOT_PAGES: Final = 128 // PAGE
"""Pages of a head in a slot of 128 tokens."""
"""Heads whose context has less of the attention say nothing on recall."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Choice of measurements.

    Attributes:
        budgets: Shares of the pages.
        drives: Numbers of drives.
        heads: Most KV heads of a trace for recall; time and balance take 8, as a layer has.
        every: Of so many decode steps one is measured; caches and guesses see all.
        tokens: Whether methods that need the optional libraries take part.
    """

    budgets: Sequence[float] = (0.05, 0.1)
    drives: Sequence[int] = (1, 2, 4, 8)
    heads: int = 6
    every: int = 8
    batches: Sequence[int] = (1, 4)
    tokens: bool = True


Progress = Callable[[str], None]


def measure(traces: Sequence[Trace], settings: Settings, tell: Progress) -> list[Table]:
    """All tables; ``tell`` hears what is being measured."""
    if settings.tokens:
        mass_recall.require_libraries()
    stages: list[tuple[str, Callable[[], list[Table]]]] = [
        ("recall at equal bytes", lambda: recall_tables(traces, settings, tell)),
        ("bytes at equal recall", lambda: [bytes_table(traces, settings)]),
        ("reads of a layer", lambda: [time_table(traces, settings), balance(traces, settings)]),
        ("Swarm's scheduling", lambda: [schedule_table(traces, settings)]),
        ("caches", lambda: [cache_table(traces)]),
        ("guesses", lambda: [guess_table(traces)]),
    ]
    tables: list[Table] = []
    for name, stage in stages:
        tell(name)
        tables += stage()
    tell("published figures")
    tables.append(gains_table(traces, tables, settings))
    tables.append(published_table(traces, tables, settings))
    return tables


def _steps(trace: Trace, settings: Settings) -> I64:
    return trace.decode_steps[:: settings.every]


def _columns(traces: Sequence[Trace]) -> list[str]:
    return [trace.name for trace in traces]


def recall_tables(
    traces: Sequence[Trace], settings: Settings, tell: Progress = lambda _: None
) -> list[Table]:
    """Mass of every method, a table per budget."""
    found: dict[float, dict[str, list[float | None]]] = {b: {} for b in settings.budgets}
    for number, trace in enumerate(traces):
        tell(f"recall at equal bytes, {trace.name}")
        gathered: dict[tuple[float, str], list[float]] = {}
        for layer, head in trace.heads(settings.heads):
            one = mass_recall.Head.of(trace, layer, head, _steps(trace, settings))
            if one.total / len(one.mass) < _LEAST_MASS:
                continue
            for share, name, value in _methods(one, settings):
                gathered.setdefault((share, name), []).append(value)
        for (share, name), values in gathered.items():
            row = found[share].setdefault(name, [None] * len(traces))
            row[number] = 100 * float(np.mean(values))
    tables = []
    for share, rows in found.items():
        title = f"Attention mass at {share:.0%} of the bytes, % of the context's"
        table = Table(title, ["method", *_columns(traces)])
        for name, row in rows.items():
            table.add(name, *row)
        tables.append(table)
    return tables


def _methods(head: mass_recall.Head, settings: Settings) -> Iterator[mass_recall.Recall]:
    yield from mass_recall.single_pages(head, settings.budgets)
    yield from mass_recall.infllm(head, settings.budgets)
    yield from mass_recall.swarm(head, settings.budgets)
    if settings.tokens:
        yield from mass_recall.tokens(head, settings.budgets)


def bytes_table(traces: Sequence[Trace], settings: Settings) -> Table:
    """Bytes for the recall that today's ``sparf`` has at 10 %."""
    table = Table(
        "Bytes at equal recall, % of the context",
        ["order, selector", *_columns(traces)],
        decimals=1,
        note="Equal: the mass that sparf recalls in the text's order at 10 % of the pages.",
    )
    rows: dict[str, list[float]] = {}
    for trace in traces:
        heads, steps = trace.heads(LAYER_HEADS), _steps(trace, settings)
        _, _, recall = baseline(trace, heads, steps)
        rows.setdefault("recall, %", []).append(100 * recall)
        for block in _BLOCKS:
            for selector in _SELECTORS:
                scored = Scored.of(trace, heads, steps, block, selector)
                need = 100 * scored.pages_for(recall) / (trace.pages - 1)
                rows.setdefault(f"{_order(block)}, {selector}", []).append(need)
    for name, values in rows.items():
        table.add(name, *values)
    return table


def _order(block: int) -> str:
    return f"keys in {block}" if block else "position"


def time_table(traces: Sequence[Trace], settings: Settings) -> Table:
    """Time of a layer at equal recall, by order, selector, placement and drives."""
    table = Table(
        "Time of a layer's reads at equal recall, us",
        ["order, selector, placement", "drive", "drives", *_columns(traces)],
        note="8 KV heads, pages of 8 KiB; the first rows are what version 1 did.",
    )
    cases: list[tuple[int, Selector, str]] = [
        (0, "sparf", "slot"),
        (0, "sparf", "slot + head"),
        *((b, s, "slot + head") for b in _BLOCKS[1:] for s in _SELECTORS[:3]),
    ]
    chosen: dict[tuple[int, str, int], Bools] = {}
    for number, trace in enumerate(traces):
        heads, steps = trace.adjacent_heads(LAYER_HEADS), _steps(trace, settings)
        _, _, recall = baseline(trace, heads, steps)
        for block, selector, _ in cases:
            if (block, selector, number) not in chosen:
                scored = Scored.of(trace, heads, steps, block, selector)
                chosen[block, selector, number] = scored.chosen(scored.pages_for(recall))
    for block, selector, place in cases:
        for drive in DRIVES:
            for drives in settings.drives:
                times = [
                    1e6
                    * load(
                        chosen[block, selector, number],
                        PLACEMENTS[place],
                        drives,
                        max(block, 128) // PAGE,
                    ).seconds(drive)
                    for number in range(len(traces))
                ]
                table.add(f"{_order(block)}, {selector}, {place}", drive.name, drives, *times)
    return table


def balance(traces: Sequence[Trace], settings: Settings) -> Table:
    """Busiest drive over the mean, by placement, batch and drives, for today's choices."""
    table = Table(
        "Pages of the busiest drive, of the mean",
        ["order, placement, batch", *(f"{n} drives" for n in settings.drives)],
        decimals=2,
        note="Batches take other traces of the directory, each from another slot on.",
    )
    for block, selector in ((0, "sparf"), (128, "spread"), (512, "spread")):
        chosen = []
        for trace in traces:
            heads, steps = trace.adjacent_heads(LAYER_HEADS), _steps(trace, settings)
            _, count, recall = baseline(trace, heads, steps)
            scored = Scored.of(trace, heads, steps, block, "sparf" if not block else "spread")
            chosen.append(scored.chosen(scored.pages_for(recall) if block else count))
        for place in PLACEMENTS:
            for batch in settings.batches:
                if batch > len(chosen) and batch > 1:
                    groups = [[chosen[i % len(chosen)] for i in range(batch)]]
                else:
                    groups = [chosen[i : i + batch] for i in range(0, len(chosen) - batch + 1)]
                row = [
                    _imbalance(groups, place, n, max(block, 128) // PAGE) for n in settings.drives
                ]
                table.add(f"{_order(block)}, {selector}, {place}, {batch}", *row)
    return table


def _imbalance(groups: list[list[Bools]], place: str, drives: int, slot_pages: int) -> float:
    found = []
    for group in groups:
        steps = min(one.shape[1] for one in group)
        pages = np.zeros((steps, drives), np.int64)
        for number, one in enumerate(group):
            mine = load(one[:, :steps], PLACEMENTS[place], drives, slot_pages).pages
            # Contexts begin at any slot: those of a batch are not in step with each other.
            pages += np.roll(mine, 3 * number, axis=1)
        busy = pages[pages.sum(1) > 0]
        found.append(float((busy.max(1) / busy.mean(1)).mean()))
    return float(np.mean(found))


def schedule_table(traces: Sequence[Trace], settings: Settings) -> Table:
    """Swarm's reads of whole clusters: time by schedule, and pages that are read."""
    table = Table(
        "Swarm's reads of clusters at 10 %, us on PM9A3",
        ["schedule", "drives", *_columns(traces)],
        note="Clusters lie in round robin (7), their copies are replicas; in slots the same pages "
        "lie as the engine stores them, with blocks of 128 tokens. Each page is a request.",
    )
    rows: dict[tuple[str, int], list[float]] = {}
    for trace in traces:
        heads = trace.adjacent_heads(LAYER_HEADS)
        clusters, which = activated_clusters(trace, heads, settings)
        alone = activated_clusters(trace, heads, settings, page_clusters.NO_REPLICA)
        for drives in settings.drives:
            single, picked = alone
            reads = page_clusters.scheduled(picked, single, drives, "full")
            rows.setdefault(("no replica", drives), []).append(1e6 * reads.seconds(DRIVES[0]))
            for schedule in page_clusters.SCHEDULES:
                reads = page_clusters.scheduled(which, clusters, drives, schedule)
                rows.setdefault((schedule, drives), []).append(1e6 * reads.seconds(DRIVES[0]))
                if drives == settings.drives[0] and schedule in {"full", "no dedup"}:
                    pages = rows.setdefault((f"pages, {schedule}", drives), [])
                    pages.append(float(reads.pages.sum(1).mean()))
            for held, name in ((1, "in slots"), (2, "in slots, replicas: 2")):
                reads = page_clusters.stored(which, clusters, drives, _SLOT_PAGES, held)
                rows.setdefault((name, drives), []).append(1e6 * reads.seconds(DRIVES[0]))
        copies = np.mean([len(one.member) / one.pages for one in clusters])
        rows.setdefault(("copies of a page, %", 0), []).append(100 * float(copies))
    for (name, drives), values in rows.items():
        table.add(name, drives or None, *values)
    return table


def activated_clusters(
    trace: Trace,
    heads: list[tuple[int, int]],
    settings: Settings,
    variant: page_clusters.Variant = page_clusters.VARIANTS[0],
) -> tuple[list[Clusters], list[list[I64]]]:
    """Clusters of each head, and those that each step activates, by mean weight."""
    clusters, picks = [], []
    for layer, number in heads:
        head = mass_recall.Head.of(trace, layer, number, _steps(trace, settings))
        made = page_clusters.clusters_of(head.profile, variant)
        weight = scores.weight_sum(scores.channel_logits(head.query, head.keys, head.scale))
        ranked = routing.member_scores(weight, made)
        budget = budget_pages(0.1, head.pages)
        picks.append([page_clusters.activated(row, made, budget) for row in ranked])
        clusters.append(made)
    return clusters, [list(step) for step in zip(*picks, strict=True)]


def cache_table(traces: Sequence[Trace]) -> Table:
    """Hit rates by policy and size."""
    table = Table(
        "Hit rate of the cache, %",
        ["policy", "cache, % of the context", *_columns(traces)],
        note="sparf chooses 10 % in the text's order; a cache of 10 % holds one step's choice.",
    )
    chosen = [choices(trace)[0] for trace in traces]
    for name, policy in caching.POLICIES.items():
        for share in CACHE_SHARES:
            rates = [100 * caching.hit_rate(one, share, policy) for one in chosen]
            table.add(name, round(100 * share), *rates)
    return table


def choices(trace: Trace) -> tuple[Bools, Scored]:
    """Pages that `sparf` chooses at 10 % in each decode step, and their scores."""
    scored, count, _ = baseline(trace, trace.adjacent_heads(6), trace.decode_steps)
    return scored.chosen(count), scored


def guess_table(traces: Sequence[Trace]) -> Table:
    """Right guesses of the read-ahead."""
    table = Table(
        f"Right of {caching.GUESSES} pages that are read ahead per head, %",
        ["guessed by", *_columns(traces)],
        decimals=1,
        note="Pages beyond the last choice that the next token chooses.",
    )
    rows: dict[str, list[float]] = {}
    for trace in traces:
        chosen, scored = choices(trace)
        found: dict[str, list[float]] = {}
        for mask, score in zip(chosen, scored.score, strict=True):
            for name, share in caching.right_guesses(mask, score).items():
                found.setdefault(name, []).append(share)
        for name, shares in found.items():
            rows.setdefault(name, []).append(100 * float(np.mean(shares)))
    for name, values in rows.items():
        table.add(name, *values)
    return table


def gains_table(traces: Sequence[Trace], tables: Sequence[Table], settings: Settings) -> Table:
    """Gains over version 1 at equal recall, and of guesses and the cache, from other tables."""
    table = Table(
        "Gains over version 1: times less, or points more",
        ["gain", *_columns(traces)],
        decimals=2,
        note="Version 1: sparf in the text's order, a slot on one drive, guesses by the last "
        "scores, LRU. Time is that of PM9A3.",
    )
    need = _rows(tables, "Bytes")
    for block in _BLOCKS[1:]:
        for selector in _SELECTORS[:3]:
            name = f"{_order(block)}, {selector}"
            table.add(f"bytes: {name}", *_ratios(need["position, sparf",], need[name,]))
    times = _rows(tables, "Time of a layer")
    for drives in settings.drives:
        old = times["position, sparf, slot", DRIVES[0].name, drives]
        for (label, drive, n), new in times.items():
            if drive == DRIVES[0].name and n == drives and label != "position, sparf, slot":
                table.add(f"time, {drives} drives: {label}", *_ratios(old, new))
    guesses, hits = _rows(tables, "Right of"), _rows(tables, "Hit rate")
    more = np.subtract(guesses["both ranks",], guesses["last scores",])
    table.add("right guesses, points: both ranks", *more.tolist())
    for share in (round(100 * share) for share in CACHE_SHARES):
        above = np.subtract(hits["decay", share], hits["lru", share])
        table.add(f"hits of decay over LRU, points: cache of {share} %", *above.tolist())
    return table


def published_table(traces: Sequence[Trace], tables: Sequence[Table], settings: Settings) -> Table:
    """Published figures beside ours."""
    ours = {
        "P9": f"{published.p9():.2f}",
        "P10": _against_no_cluster(tables, settings),
        "P11": schedule_ratios(tables, settings),
        "P12": _selection(traces) if settings.tokens else "not measured: --no-tokens",
        "P13": _upkeep(traces),
        "P14": _against_lru(tables),
        "P15": "no knee",
    }
    table = Table("Published figures and ours", ["id", "figure", "published", "ours", "reason"])
    for one in published.FIGURES:
        table.add(one.name, one.what, one.value, ours[one.name], one.reason)
    return table


def _rows(tables: Sequence[Table], title: str) -> dict[tuple[object, ...], list[float]]:
    """Floats of the rows of a table, by what stands before them."""
    found = next(table for table in tables if table.title.startswith(title))
    return {
        tuple(cell for cell in row if not isinstance(cell, float)): [
            cell for cell in row if isinstance(cell, float)
        ]
        for row in found.rows
    }


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f}x .. {max(values):.2f}x"


def _ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(over, under, strict=True)]


def _against_no_cluster(tables: Sequence[Table], settings: Settings) -> str:
    most = max(settings.drives)
    times = _rows(tables, "Time of a layer")
    swarm = _rows(tables, "Swarm's reads")["full", most]
    found = []
    for place in PLACEMENTS:
        single = times[f"position, sparf, {place}", DRIVES[0].name, most]
        found.append(f"{_range(_ratios(single, swarm))} ({place})")
    return f"time of single pages / Swarm, {most} drives: {', '.join(found)}"


def schedule_ratios(tables: Sequence[Table], settings: Settings) -> str:
    """P11 of our traces: time as members lie over that of the schedule, and copies over pages."""
    rows, least = _rows(tables, "Swarm's reads"), settings.drives[0]
    times = [
        ratio
        for drives in settings.drives
        if drives > 1
        for ratio in _ratios(rows["static", drives], rows["full", drives])
    ]
    volume = _ratios(rows["pages, no dedup", least], rows["pages, full", least])
    return f"{_range(times) if times else '-'}; {_range(volume)}"


def _selection(traces: Sequence[Trace]) -> str:
    """P12: time of a search among all keys over that among the medoids of clusters."""
    trace = traces[0]
    layer, head = trace.heads()[0]
    query = trace.queries(layer, head, trace.decode_steps[:1])[:, 0]
    (clusters,), _ = activated_clusters(trace, [(layer, head)], Settings())
    keys = trace.keys(layer, head)
    medoids = scores.paged(keys).mean(1)[clusters.medoid]
    return f"{published.selection_speedup(keys, medoids, query):.1f}x at {trace.context}"


def _upkeep(traces: Sequence[Trace]) -> str:
    found: dict[str, list[float]] = {}
    for trace in traces:
        for layer, head in trace.heads(LAYER_HEADS):
            for name, value in (upkeep.distances(trace, layer, head) or {}).items():
                found.setdefault(name, []).append(value)
    return "; ".join(f"{np.mean(found[n]):.2f}" if n in found else "-" for n in upkeep.RULES)


def _against_lru(tables: Sequence[Table]) -> str:
    rows = _rows(tables, "Hit rate")
    shares = [round(100 * share) for share in CACHE_SHARES]
    gaps = {s: np.subtract(rows["swarm (S-7)", s], rows["lru", s]) for s in shares}
    return "points: " + ", ".join(
        f"{g.min():+.0f} to {g.max():+.0f} at {s} %" for s, g in gaps.items()
    )
