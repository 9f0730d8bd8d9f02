"""Suites of ``ssdkv lab bench accuracy`` over real text: their engines and their tables.

There is an engine for each selector; a request of it has one of the budgets as its own. The first
engine, with exact attention, leaves the log-probabilities that the others are compared with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.table import Table

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.bench.accuracy_plot import as_percent
from vllm_ssdkv.cli.bench.recall_accuracy import mean_over
from vllm_ssdkv.profiling.accuracy.run import SEATS, AccuracyRun
from vllm_ssdkv.profiling.accuracy.suites import SuiteName
from vllm_ssdkv.profiling.recall.bench import RecallStores, Row
from vllm_ssdkv.profiling.recall.kv_size import bytes_per_token
from vllm_ssdkv.profiling.rig.page_engine import STAGING

WINDOW: Final = 256
"""Tokens, as engines that choose have by default."""
MIN_CONTEXT: Final = 1024
"""Tokens: a table and all needles fit into it, with text between them."""
_PROMPTS: Final = 8
"""Contexts that a store holds at most: four documents, and two for each of two other suites."""
_DEVICES: Final = 2


@dataclass(frozen=True, slots=True)
class TextSuites:
    """Suites of one run, and what they have in common.

    Attributes:
        model: Directory of the checkpoint.
        suites: Each with the tokens of its contexts.
        questions: About each document.
        budgets: Shares of the tokens.
        window, block_tokens, beside_window, sparse, compare_every: As of :class:`AccuracyRun`.
    """

    model: Path
    suites: tuple[tuple[SuiteName, int], ...]
    questions: int
    budgets: tuple[float, ...]
    window: int
    block_tokens: int
    beside_window: bool
    sparse: Mapping[str, object] = field(default_factory=dict)
    compare_every: int = 0

    def plan(self, selector: str, stores: RecallStores) -> AccuracyRun:
        """The engine of a selector."""
        token = bytes_per_token(self.model)
        longest = max(tokens for _, tokens in self.suites)
        content = _PROMPTS * longest * token
        # Channels and sums take nine 16ths of the KV that they stand for.
        summaries = MIB + SEATS * longest * token * 5 // 8
        dense = stores.root / "dense"
        dense.mkdir(mode=0o700, exist_ok=True)
        exact = selector == "exact"
        sparse = {"floor": min(*self.budgets, 1 / 32), **self.sparse, "summaries": summaries}
        return AccuracyRun(
            model=str(self.model),
            stores=stores.places(selector, self.sparse),
            # Header, summary page and journal beside the KV.
            capacity=3 * content // _DEVICES + 64 * MIB,
            dram_bytes=STAGING + 256 * MIB + summaries + 2 * content,
            window=self.window,
            selector=selector,
            suites=self.suites,
            questions=self.questions,
            budgets=(1.0,) if exact else self.budgets,
            dense=str(dense),
            sparse=sparse,
            block_tokens=self.block_tokens,
            beside_window=self.beside_window,
            compare_every=self.compare_every,
        )

    def rows(self, selectors: Sequence[str], stores: RecallStores, console: Console) -> list[Row]:
        """Figures of each suite, selector and budget.

        Raises:
            BenchError: an engine failed, or DRAM had no room for what a selector must know.
        """
        found = []
        cases = ["exact", *selectors]
        for number, name in enumerate(cases, 1):
            what = f"{name} on text ({number} of {len(cases)})"
            plan = self.plan(name, stores).to_json()
            result = stores.engine("vllm_ssdkv.profiling.accuracy.run", plan, what, console)
            for row in result["passes"]:
                if name != "exact" and row["rows_exact"]:
                    raise BenchError(f"{what}: some rows attended to everything")
                found.append({"selector": name, "kv_bytes": bytes_per_token(self.model), **row})
        return found


def require_model(model: Path | None, suites: Sequence[SuiteName]) -> Path:
    """The directory of the model that suites of real text need.

    Raises:
        BadParameter: none was given.
    """
    if model is None:
        raise typer.BadParameter(
            f"missing, and --suite {','.join(suites)} needs it; `make text-model` makes one in "
            "build/text-model",
            param_hint="--model",
        )
    return model


def lengths_of(text: str, model: Path) -> list[int]:
    """The lengths of a list, none beyond the model's positions.

    Raises:
        BadParameter: one is, or the model does not tell.
    """
    try:
        most = positions(model)
    except BenchError as error:
        said = str(error).removeprefix("--model: ")
        raise typer.BadParameter(said, param_hint="--model") from None
    return arguments.whole_numbers("--contexts", text, MIN_CONTEXT, most)


def positions(model: Path) -> int:
    """Longest context of a model, by its ``config.json``.

    Raises:
        BenchError: it cannot be read, or does not tell.
    """
    bytes_per_token(model)  # says what is wrong with the file
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    found = config.get("max_position_embeddings")
    if not isinstance(found, int):
        raise BenchError(f"--model: {model / 'config.json'} does not tell max_position_embeddings")
    return found


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """A table for each suite and length."""
    for suite, length in dict.fromkeys((row["suite"], row["context"]) for row in rows):
        here = [row for row in rows if (row["suite"], row["context"]) == (suite, length)]
        make = _text_table if suite == "text" else _answers_table
        table = make(here)
        table.title = f"{suite}, {length} tokens"
        yield table


def _begun(columns: Sequence[str]) -> Table:
    table = Table(title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("selector")
    for name in ("budget", "pages", "read", "DRAM", *columns):
        table.add_column(name, justify="right")
    return table


def _first_cells(row: Row) -> list[str]:
    """Selector and budget; of the context's pages the share that was chosen, and their bytes for
    each token that is decoded; of the context's KV the share that its summaries take in DRAM."""
    exact, counted = row["selector"] == "exact", row["decoding"]
    whole = 0 if exact else counted.get("sparse_pages_in_context", 0)
    pages = counted["sparse_pages_selected"] / whole if whole else 1.0
    return [
        row["selector"],
        "-" if exact else as_percent(row["budget"]),
        f"{pages:.1%}",
        f"{pages * row['context'] * row['kv_bytes'] / 1e6:.1f} MB",
        f"{row['summary_bytes'] / row['kv_bytes']:.1%}",
    ]


def _text_table(rows: Sequence[Row]) -> Table:
    """KL from dense attention, loss less that of dense attention, and equal first choices; the
    mass that was attended to, and what the selector estimates of it, where they were compared."""
    exact = {
        q["name"]: q["loss"] for row in rows if row["selector"] == "exact" for q in row["requests"]
    }
    table = _begun(["KL", "loss", "same", "mass", "estimate"])
    for row in rows:
        asked = row["requests"]
        dense = row["selector"] == "exact"
        lost = [q["loss"] - (0 if dense else exact[q["name"]]) for q in asked]
        table.add_row(
            *_first_cells(row),
            f"{_mean(q['kl'] for q in asked):.4f}",
            f"{_mean(lost):.3f}" if dense else f"{_mean(lost):+.3f}",
            f"{_mean(q['same'] for q in asked):.1%}",
            *(mean_over(row["deviation"], name, ".1%") for name in ("mass", "estimated_mass")),
        )
    return table


def _answers_table(rows: Sequence[Row]) -> Table:
    """Parts of answers that are exact, of all, and KL from dense attention."""
    table = _begun(["right", "share", "KL"])
    for row in rows:
        right, parts = (sum(q[name] for q in row["requests"]) for name in ("right", "parts"))
        table.add_row(
            *_first_cells(row),
            f"{right}/{parts}",
            f"{right / parts:.1%}",
            f"{_mean(q['kl'] for q in row['requests']):.4f}",
        )
    return table


def _mean(values: Iterator[float] | Sequence[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
