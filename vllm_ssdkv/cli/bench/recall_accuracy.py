"""Suite ``recall`` of ``ssdkv lab bench accuracy``: questions to the recall model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import typer
from rich.console import Console
from rich.table import Table

from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.bench.accuracy_plot import as_fraction
from vllm_ssdkv.profiling.recall import recall
from vllm_ssdkv.profiling.recall.bench import (
    RecallStores,
    Row,
    recall_plan,
    require_choices,
)
from vllm_ssdkv.profiling.recall.kv_size import bytes_per_token
from vllm_ssdkv.profiling.recall.run import Batch
from vllm_ssdkv.profiling.rig.page_engine import STAGING

COMPARE_EVERY: Final = 4
"""Steps. Reading whole contexts would else be most of the time."""


def batches_of(lengths: str, questions: str) -> list[Batch]:
    """A batch for each length, with its number of questions.

    Raises:
        BadParameter: one is no number, or there are not as many of both.
    """
    found = arguments.numbers("--contexts", lengths, recall.MIN_CONTEXT, recall.MAX_CONTEXT)
    counts = arguments.numbers("--questions", questions, 1, 1000)
    if len(counts) == 1:
        counts *= len(found)
    if len(counts) != len(found):
        raise typer.BadParameter(
            f"{questions!r}: one number, or as many as --contexts has ({len(found)})",
            param_hint="--questions",
        )
    return [Batch(int(n), int(count)) for n, count in zip(found, counts, strict=True)]


def recall_rows(
    batches: Sequence[Batch],
    cases: Sequence[tuple[str, float]],
    stores: RecallStores,
    console: Console,
    sparse: Mapping[str, object],
    *,
    window: int,
    block_tokens: int,
    compare_every: int,
) -> list[Row]:
    """Figures of each length, selector and budget; each case is an engine.

    Raises:
        BenchError: an engine failed, or DRAM had no room for what a selector must know.
    """
    # Channels and sums take nine 16ths of the KV that they stand for, and nobody may go without.
    most = max(batch.context * batch.count * len(batch.tasks) for batch in batches)
    summaries = MIB + most * bytes_per_token() * 5 // 8
    dram = STAGING + 256 * MIB + summaries
    rows: list[Row] = []
    for number, (name, share) in enumerate(cases, 1):
        options: dict[str, object] = {
            "budget": share,
            "floor": min(share, 1 / 32),
            "summaries": summaries,
            **sparse,
        }
        places = stores.places(name, sparse)
        plan = recall_plan(places, name, batches, dram, options, window=window)
        every = 0 if name == "exact" else compare_every
        plan = replace(plan, compare_every=every, block_tokens=block_tokens)
        what = f"{name} at {share:g} ({number} of {len(cases)})"
        found = stores.run(plan, what, console)
        require_choices(found, what)
        rows += [{"selector": name, "suite": "recall", "budget": share, **row} for row in found]
    return rows


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """A table for each length."""
    for length in sorted({int(row["context"]) for row in rows}):
        yield _table(length, [row for row in rows if row["context"] == length])


def _table(length: int, rows: list[Row]) -> Table:
    """The cases of one length, as they were run."""
    title = f"{length} tokens"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("selector")
    for name in ("budget", "pages", *recall.TASKS, "all", "error", "mass", "recall"):
        table.add_column(name, justify="right")
    for row in rows:
        counted, asked = row["decoding"], row["asked"]
        whole = counted.get("sparse_pages_in_context", 0)
        right = [row["right"][task] for task in recall.TASKS]
        exact = row["selector"] == "exact"
        table.add_row(
            row["selector"],
            "-" if exact else as_fraction(row["budget"]),
            f"{counted['sparse_pages_selected'] / whole if whole else 1.0:.1%}",
            *(f"{count}/{asked}" for count in right),
            f"{sum(right) / asked / len(right):.1%}",
            *_deviation(row.get("deviation", [])),
        )
    return table


def _deviation(layers: list[Row]) -> list[str]:
    """Error, mass and recall of a case, the mean over its layers."""
    forms = {"relative_l2": ".3f", "mass": ".1%", "recall": ".1%"}
    return [mean_over(layers, name, form) for name, form in forms.items()]


def mean_over(layers: Sequence[Row], name: str, form: str) -> str:
    """A mean over layers as text; ``-`` where nothing was compared or estimated."""
    found = [layer[name] for layer in layers]
    return "-" if not found or None in found else format(sum(found) / len(found), form)
