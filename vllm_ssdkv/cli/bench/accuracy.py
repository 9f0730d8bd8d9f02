"""``ssdkv lab bench accuracy``: what sparse decode loses, in the real vLLM."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from vllm_ssdkv.base.errors import BenchError, ConfigError
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.bench import recall_accuracy, text_accuracy
from vllm_ssdkv.cli.bench.accuracy_plot import plot
from vllm_ssdkv.cli.bench.bench import PlotOption
from vllm_ssdkv.cli.bench.recall_options import (
    DirectoryOption,
    ReuseOption,
    SelectorsOption,
    SimilarityOption,
)
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.profiling.accuracy.suites import NEEDLES, SUITES
from vllm_ssdkv.profiling.recall.bench import SPARSE, WINDOW, RecallStores
from vllm_ssdkv.profiling.recall.run import BLOCK_TOKENS

_SELECTORS: Final = ",".join(SPARSE)
_CONTEXTS: Final = "2048,4096,8192,16384,32768"
_BUDGETS: Final = "0.5,0.25,0.125,0.0625,0.03125"
_QUESTIONS: Final = "8,8,8,4,2"
_TEXT_CONTEXTS: Final = "8192"
_TEXT_BUDGETS: Final = "0.05,0.02"
_RECALL: Final = "recall"
_OWN: Final = {"budget": "--budgets", "budget_tokens": "--budgets", "summaries": "the length"}
"""Options of ``sparse`` that the command sets itself, and by what."""


def accuracy(
    directory: DirectoryOption = None,
    suite: Annotated[
        str,
        typer.Option(help=f"Test suites, separated by commas: {', '.join((_RECALL, *SUITES))}."),
    ] = _RECALL,
    model: Annotated[
        Path | None,
        typer.Option(
            parser=arguments.directory,
            metavar="DIR",
            help="Model for the suites of real text; `make text-model` builds one.",
        ),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            help=f"Prompt lengths in tokens; default: {_CONTEXTS}, for real text {_TEXT_CONTEXTS}."
        ),
    ] = None,
    selectors: SelectorsOption = _SELECTORS,
    budgets: Annotated[
        str | None,
        typer.Option(
            help=f"Budgets as shares of the tokens; default: {_BUDGETS}, for real text "
            f"{_TEXT_BUDGETS}."
        ),
    ] = None,
    beside_window: Annotated[
        bool,
        typer.Option(
            "--beside-window",
            help="Take budgets of real text as shares of the tokens outside the window, which are "
            "added to it.",
        ),
    ] = False,
    questions: Annotated[
        str | None,
        typer.Option(
            help=f"Questions per task: one number, or one for each length; default: {_QUESTIONS}. "
            f"Real text takes one number of questions per document; default: {len(NEEDLES)}."
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            min=1,
            max=8192,
            help=f"Newest tokens that every query attends to; default: {WINDOW}, for real text "
            f"{text_accuracy.WINDOW}.",
        ),
    ] = None,
    block_tokens: Annotated[
        int, typer.Option(min=16, max=4096, help="Tokens per vLLM block.")
    ] = BLOCK_TOKENS,
    compare_every: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Steps between comparisons with exact attention, in the suites recall and text; "
            f"0 makes none. Default: {recall_accuracy.COMPARE_EVERY}; for text 0, since each one "
            "reads whole contexts.",
        ),
    ] = None,
    reuse_steps: ReuseOption = 1,
    reuse_similarity: SimilarityOption = 0.8,
    sparse: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Another option of `sparse`, such as mass=0.95; may be repeated.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Ask 4 questions at 2048 and 4096 tokens with budget 1/8; real text: 2048 "
            "tokens, 5 %.",
        ),
    ] = False,
    as_json: arguments.Json = False,
    plot_file: PlotOption = None,
) -> None:
    """Measure the accuracy of each selector and budget: right answers, and distance from dense.

    Suite `recall` asks the recall model. An answer is right when all of its tokens are; its first
    token comes from the prompt, which is exact. Some steps (--compare-every) compare the computed
    attention with exact attention over the same context. `error` is the relative L2 distance of the
    outputs, `mass` the share of the softmax in the window and the chosen pages, and `estimate` the
    selector's own estimate of it (only with --json). `recall` is the mass of the chosen pages over
    that of the best choice of the same size.

    The other suites force the right continuation of real text on the model of --model, and compare
    the log-probabilities of all words with those of exact attention. `text` has four documents:
    `KL` is the divergence per token in nats, `loss` the loss of the forced tokens, `same` the share
    of equal first choices. `needles` asks for numbers in the first half of a document, `json` for
    fields of a table. They are right when all tokens are the model's first choice. `read` is the
    size of the chosen pages per token, `DRAM` the summaries' share of the KV.
    """
    from vllm_ssdkv.profiling.rig.plot import require_plot

    suites = arguments.names("--suite", suite, (_RECALL, *SUITES))
    chosen = arguments.names("--selectors", selectors, SPARSE)
    options = {
        "reuse_steps": reuse_steps,
        "reuse_similarity": reuse_similarity,
        **_sparse(sparse or [], chosen),
    }
    asks_recall = _RECALL in suites
    if beside_window and asks_recall:
        raise typer.BadParameter("not for suite recall", param_hint="--beside-window")
    lengths = contexts or ("2048,4096" if quick else _CONTEXTS)
    shares = arguments.numbers("--budgets", budgets or ("0.125" if quick else _BUDGETS), 0.001, 1)
    batches = []
    if asks_recall:
        batches = recall_accuracy.batches_of(
            lengths, questions or ("4" if quick or contexts else _QUESTIONS)
        )
    text = None
    if named := tuple(name for name in SUITES if name in suites):
        counts = arguments.numbers("--questions", questions or str(len(NEEDLES)), 1, len(NEEDLES))
        if len(counts) > 1:
            raise typer.BadParameter("one number, with real text", param_hint="--questions")
        place = text_accuracy.require_model(model, named)
        shares_of_text = budgets or ("0.05" if quick else _TEXT_BUDGETS)
        of_text = text_accuracy.lengths_of(contexts or ("2048" if quick else _TEXT_CONTEXTS), place)
        text = text_accuracy.TextSuites(
            model=place,
            suites=tuple((name, length) for name in named for length in of_text),
            questions=int(counts[0]),
            budgets=tuple(arguments.numbers("--budgets", shares_of_text, 0.001, 1)),
            window=window or text_accuracy.WINDOW,
            block_tokens=block_tokens,
            beside_window=beside_window,
            sparse=options,
            compare_every=compare_every or 0,
        )
    console, stores, rows = Console(stderr=True), RecallStores(directory, 2), []
    begun, load = time.time(), os.getloadavg()
    try:
        if plot_file is not None:
            require_plot(plot_file)
        if asks_recall:
            cases = [("exact", 1.0), *((name, share) for name in chosen for share in shares)]
            rows += recall_accuracy.recall_rows(
                batches,
                cases,
                stores,
                console,
                options,
                window=window or WINDOW,
                block_tokens=block_tokens,
                compare_every=recall_accuracy.COMPARE_EVERY
                if compare_every is None
                else compare_every,
            )
        of_recall = len(rows)
        if text is not None:
            rows += text.rows(chosen, stores, console)
        document = {
            "window_tokens": window or (WINDOW if asks_recall else text_accuracy.WINDOW),
            "block_tokens": block_tokens,
            "beside_window": beside_window,
            **options,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)),
            "seconds": time.time() - begun,
            "load_before": load,
            "rows": rows,
        }
        if as_json:
            arguments.print_json(document)
        if plot_file is not None:
            plot(rows[:of_recall], plot_file)
    except BenchError as error:
        typer.echo(f"ssdkv lab bench accuracy: {error}", err=True)
        raise typer.Exit(1) from error
    finally:
        stores.remove()
    for table in (
        *recall_accuracy.tables(rows[:of_recall]),
        *text_accuracy.tables(rows[of_recall:]),
    ):
        Console(stderr=as_json).print(table)


def _sparse(given: Sequence[str], selectors: Sequence[str]) -> dict[str, object]:
    """Options of ``sparse`` by name; each value is JSON, or a word as it is.

    Raises:
        BadParameter: there is no such option, or not of this value with a selector.
    """
    found: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r}: NAME=VALUE", param_hint="--sparse")
        if name in _OWN:
            raise typer.BadParameter(f"{name} is set by {_OWN[name]}", param_hint="--sparse")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    try:
        for selector in selectors:
            SSDKVConfig.from_extra_config({"mode": "page", "selector": selector, "sparse": found})
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--sparse") from None
    return found
