"""``ssdkv bench accuracy``: what sparse decode loses, in the real vLLM with the demo's model."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Annotated, Final, Literal

import typer
from rich.console import Console
from rich.table import Table

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.bench.accuracy_plot import as_fraction, plot
from vllm_ssdkv.cli.bench.bench import PlotOption
from vllm_ssdkv.cli.bench.recall_options import (
    DirectoryOption,
    ReuseOption,
    SelectorsOption,
    SimilarityOption,
    WindowOption,
)
from vllm_ssdkv.profiling.recall import recall
from vllm_ssdkv.profiling.recall.bench import (
    SPARSE,
    WINDOW,
    RecallStores,
    Row,
    names,
    numbers,
    recall_plan,
    require_choices,
)
from vllm_ssdkv.profiling.recall.kv_size import bytes_per_token
from vllm_ssdkv.profiling.recall.run import STAGING, Batch

_SELECTORS: Final = ",".join(SPARSE)
_CONTEXTS: Final = "2048,4096,8192,16384,32768"
_BUDGETS: Final = "0.5,0.25,0.125,0.0625,0.03125"
_QUESTIONS: Final = "8,8,8,4,2"
_COMPARE_EVERY: Final = 4
"""Steps. Reading whole contexts would else be most of the time."""


def accuracy(
    directory: DirectoryOption = None,
    contexts: Annotated[
        str | None, typer.Option(help=f"Lengths of the prompts in tokens; default: {_CONTEXTS}.")
    ] = None,
    selectors: SelectorsOption = _SELECTORS,
    budgets: Annotated[
        str | None, typer.Option(help=f"Shares of the tokens; default: {_BUDGETS}.")
    ] = None,
    questions: Annotated[
        str | None,
        typer.Option(
            help=f"Of each task: one number, or one for each length; default: {_QUESTIONS}."
        ),
    ] = None,
    window: WindowOption = WINDOW,
    reuse_steps: ReuseOption = 1,
    reuse_similarity: SimilarityOption = 0.8,
    channel_dtype: Annotated[
        Literal["as_k", "int8"],
        typer.Option(
            help="How the copy of K is kept by which sparf and adaptive score: as_k or int8."
        ),
    ] = "as_k",
    channel_group: Annotated[
        int, typer.Option(min=1, help="Neighbours among its channels that are chosen together.")
    ] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="4 questions at 2048 and 4096 tokens, budget 1/8.")
    ] = False,
    as_json: arguments.Json = False,
    plot_file: PlotOption = None,
) -> None:
    """Ask the recall model questions with each selector and budget: how many answers are right.

    An answer is right when all of its tokens are. Its first token comes from the prompt, which is
    exact, the others from sparse decode. In every fourth step the attention that was computed is
    compared with exact attention over the same context: `error` is the relative L2 distance of the
    outputs, the mean over layers and heads, `mass` the share of the softmax that window and chosen
    pages have, `recall` what the chosen pages have of what the best choice of as many has.
    """
    from vllm_ssdkv.profiling.bench_io.plot import require_plot

    lengths = contexts or ("2048,4096" if quick else _CONTEXTS)
    batches = _batches(lengths, questions or ("4" if quick or contexts else _QUESTIONS))
    shares = numbers("--budgets", budgets or ("0.125" if quick else _BUDGETS), 0.001, 1)
    chosen = names(selectors)
    if recall.HEAD_SIZE % channel_group:
        raise typer.BadParameter(
            f"{channel_group} does not divide the model's head size, {recall.HEAD_SIZE}",
            param_hint="--channel-group",
        )
    # Channels and sums take nine 16ths of the KV that they stand for, and nobody may go without.
    most = max(batch.context * batch.count * len(batch.tasks) for batch in batches)
    summaries = MIB + most * bytes_per_token() * 5 // 8
    dram = STAGING + 256 * MIB + summaries
    console, stores, rows = Console(stderr=True), RecallStores(directory, 2), []
    begun, load = time.time(), os.getloadavg()
    try:
        if plot_file is not None:
            require_plot(plot_file)
        cases = [("exact", 1.0), *((name, share) for name in chosen for share in shares)]
        for number, (name, share) in enumerate(cases, 1):
            sparse: dict[str, object] = {
                "budget": share,
                "floor": min(share, 1 / 32),
                "reuse_steps": reuse_steps,
                "reuse_similarity": reuse_similarity,
                "channel_dtype": channel_dtype,
                "channel_group": channel_group,
                "summaries": summaries,
            }
            plan = recall_plan(stores.places(name), name, batches, dram, sparse, window=window)
            if name != "exact":
                plan = replace(plan, compare_every=_COMPARE_EVERY)
            what = f"{name} at {share:g} ({number} of {len(cases)})"
            found = stores.run(plan, what, console)
            require_choices(found, what)
            rows += [{"selector": name, "budget": share, **batch} for batch in found]
        document = {
            "window_tokens": window,
            "reuse_steps": reuse_steps,
            "reuse_similarity": reuse_similarity,
            "channel_dtype": channel_dtype,
            "channel_group": channel_group,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)),
            "seconds": time.time() - begun,
            "load_before": load,
            "rows": rows,
        }
        if as_json:
            arguments.print_json(document)
        if plot_file is not None:
            plot(rows, plot_file)
    except BenchError as error:
        typer.echo(f"ssdkv bench accuracy: {error}", err=True)
        raise typer.Exit(1) from error
    finally:
        stores.remove()
    for length in sorted({int(row["context"]) for row in rows}):
        Console(stderr=as_json).print(
            _table(length, [row for row in rows if row["context"] == length])
        )


def _batches(lengths: str, questions: str) -> list[Batch]:
    """A batch for each length, with its number of questions."""
    found = numbers("--contexts", lengths, recall.MIN_CONTEXT, recall.MAX_CONTEXT)
    counts = numbers("--questions", questions, 1, 1000)
    if len(counts) == 1:
        counts *= len(found)
    if len(counts) != len(found):
        raise typer.BadParameter(
            f"{questions!r}: one number, or as many as --contexts has ({len(found)})",
            param_hint="--questions",
        )
    return [Batch(int(n), int(count)) for n, count in zip(found, counts, strict=True)]


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
    if not layers:
        return ["-"] * 3
    names = ("relative_l2", "mass", "recall")
    error, mass, recalled = (sum(x[name] for x in layers) / len(layers) for name in names)
    return [f"{error:.3f}", f"{mass:.1%}", f"{recalled:.1%}"]
