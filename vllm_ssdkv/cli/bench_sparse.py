"""``ssdkv bench accuracy`` and ``ssdkv bench decode``: what sparse decode loses, and what it wins.

Both run the demo's recall model through the real vLLM, one engine per selector and budget. All
sparse engines share a store, so that the prompts are computed once; ``exact`` has one of its own.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from vllm_ssdkv.cli import recall
from vllm_ssdkv.cli.demo_child import PhaseError, environment, run_process, tail
from vllm_ssdkv.cli.demo_plan import bytes_per_token
from vllm_ssdkv.cli.recall_run import STAGING, Batch, RecallRun
from vllm_ssdkv.errors import BenchError
from vllm_ssdkv.sizes import MIB, parse_size

SPARSE: Final = ("bounds", "adaptive", "window")
WINDOW: Final = 64
DECODED: Final = 24
"""Tokens per answer in ``bench decode``."""
_TIMEOUT_S: Final = 3600.0

Row = dict[str, Any]

_Directory = Annotated[
    Path | None,
    typer.Option("--dir", help="Where to make the stores, on one disk; the system's, if missing."),
]
_Contexts = Annotated[str, typer.Option(help="Lengths of the prompts in tokens.")]
_Selectors = Annotated[str, typer.Option(help="Of bounds, adaptive and window.")]
_Json = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")]


def _numbers(option: str, text: str, low: float, high: float) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(low <= value <= high for value in found):
        raise typer.BadParameter(f"{text!r}: numbers from {low:g} to {high:g}", param_hint=option)
    return found


def _names(text: str) -> list[str]:
    found = text.split(",")
    if not set(found) <= set(SPARSE):
        raise typer.BadParameter(f"{text!r}: any of {', '.join(SPARSE)}", param_hint="--selectors")
    return found


class Stores:
    """Directories of an emulated machine with some devices, removed at the end."""

    def __init__(self, directory: Path | None, devices: int):
        self.root = Path(tempfile.mkdtemp(prefix="ssdkv-bench-", dir=directory))
        self._devices = devices

    def places(self, kind: str) -> tuple[str, ...]:
        """Directories of the stores for exact attention, or for sparse."""
        paths = [self.root / f"{kind}{i}" for i in range(self._devices)]
        for path in paths:
            path.mkdir(mode=0o700, exist_ok=True)
        return tuple(map(str, paths))

    def run(self, plan: RecallRun, what: str, console: Console) -> list[Row]:
        """Figures of each batch of an engine.

        Raises:
            BenchError: the engine failed.
        """
        command = [sys.executable, "-P", "-m", "vllm_ssdkv.cli.recall_run", plan.to_json()]
        log = self.root / "engine.log"
        try:
            with console.status(what):
                found = run_process(command, environment("page"), log, _TIMEOUT_S, lambda _: None)
        except PhaseError as error:
            raise BenchError(f"{what}: {error}\n{tail(log)}") from error
        batches: list[Row] = found["batches"]
        return batches

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.root, ignore_errors=True)


def _plan(
    places: Sequence[str],
    selector: str,
    batches: Sequence[Batch],
    dram_bytes: int,
    sparse: dict[str, object],
    throttle: Sequence[dict[str, object]] = (),
) -> RecallRun:
    content = sum(b.context * b.count * len(b.tasks) for b in batches) * bytes_per_token()
    return RecallRun(
        stores=tuple(places),
        selector=selector,
        batches=tuple(batches),
        window=WINDOW,
        dram_bytes=dram_bytes,
        # Header, summary page and journal beside the KV, and what a run before left.
        capacity=3 * content // len(places) + 64 * MIB,
        sparse=sparse,
        throttle=tuple(throttle),
    )


def _write(path: Path | None, document: Row) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def accuracy(
    directory: _Directory = None,
    contexts: _Contexts = "2048,4096,8192",
    selectors: _Selectors = "bounds,window",
    budgets: Annotated[str, typer.Option(help="Shares of the tokens.")] = "0.5,0.25,0.125,0.0625",
    questions: Annotated[int, typer.Option(min=1, max=1000, help="Of each task and length.")] = 8,
    json_file: _Json = None,
) -> None:
    """Ask the recall model questions with each selector and budget: how many answers are right.

    An answer is right when all of its tokens are. Its first token comes from the prompt, which is
    exact, the others from sparse decode.
    """
    lengths = [
        int(n) for n in _numbers("--contexts", contexts, recall.MIN_CONTEXT, recall.MAX_CONTEXT)
    ]
    shares, names = _numbers("--budgets", budgets, 0.001, 1), _names(selectors)
    batches = [Batch(length, questions) for length in lengths]
    dram = STAGING + 256 * MIB
    console, stores, rows = Console(stderr=True), Stores(directory, 2), []
    try:
        cases = [("exact", 1.0), *((name, share) for name in names for share in shares)]
        for name, share in cases:
            kind = "exact" if name == "exact" else "sparse"
            sparse: dict[str, object] = {"budget": share, "floor": min(share, 1 / 32)}
            plan = _plan(stores.places(kind), name, batches, dram, sparse)
            for found in stores.run(plan, f"{name} at {share:g}", console):
                rows.append({"selector": name, "budget": share, **found})
    except BenchError as error:
        typer.echo(f"ssdkv bench accuracy: {error}", err=True)
        raise typer.Exit(1) from error
    finally:
        stores.remove()
    _write(json_file, {"window_tokens": WINDOW, "questions": questions, "rows": rows})
    table = Table("selector", "budget", "context", "pages read", *recall.TASKS)
    for row in rows:
        decoding = row["decoding"]
        whole = decoding.get("sparse_pages_in_context", 0)
        share = decoding["sparse_pages_selected"] / whole if whole else 1.0
        right = [f"{100 * row['right'][task] / row['asked']:.0f} %" for task in recall.TASKS]
        budget = "-" if row["selector"] == "exact" else f"{row['budget']:g}"
        table.add_row(row["selector"], budget, str(row["context"]), f"{100 * share:.1f} %", *right)
    Console().print(table)


def decode(
    directory: _Directory = None,
    contexts: _Contexts = "4096,16384",
    batch: Annotated[str, typer.Option(help="Requests at a time.")] = "1,8",
    selectors: _Selectors = "bounds",
    budget: Annotated[float, typer.Option(min=0.001, max=1, help="Share of the tokens.")] = 0.125,
    devices: Annotated[int, typer.Option(min=1, max=16, help="Emulated devices.")] = 4,
    bandwidth: Annotated[str, typer.Option(help="Of each device, per second.")] = "64MiB",
    iops: Annotated[float, typer.Option(min=1, help="Of each device.")] = 20000,
    latency: Annotated[float, typer.Option(min=0, max=1, help="Of each, in seconds.")] = 0.0005,
    json_file: _Json = None,
) -> None:
    """Decode from contexts on slow emulated devices: tokens per second, bytes, where time goes.

    DRAM holds little more than single pages, so that contexts must be read.
    """
    lengths = [
        int(n) for n in _numbers("--contexts", contexts, recall.MIN_CONTEXT, recall.MAX_CONTEXT)
    ]
    sizes, names = [int(n) for n in _numbers("--batch", batch, 1, 64)], _names(selectors)
    model: dict[str, object] = {
        "bandwidth": parse_size(bandwidth),
        "iops": iops,
        "latency": latency,
    }
    batches = [
        Batch(length, size, tasks=("copy",), tokens=DECODED) for length in lengths for size in sizes
    ]
    most = max(length * size for length in lengths for size in sizes) * bytes_per_token()
    dram = STAGING + 8 * MIB + most // 4
    console, stores, rows = Console(stderr=True), Stores(directory, devices), []
    try:
        for name in ("exact", *names):
            kind = "exact" if name == "exact" else "sparse"
            sparse: dict[str, object] = {
                "budget": budget,
                "floor": min(budget, 1 / 32),
                "page_cache": max(MIB, most // 32),
                "summaries": MIB + most // 8,
            }
            plan = _plan(stores.places(kind), name, batches, dram, sparse, [model])
            for found in stores.run(plan, name, console):
                rows.append({"selector": name, **found})
    except BenchError as error:
        typer.echo(f"ssdkv bench decode: {error}", err=True)
        raise typer.Exit(1) from error
    finally:
        stores.remove()
    _write(json_file, {"devices": devices, "model": model, "budget": budget, "rows": rows})
    parts = ("select", "wait", "attend", "merge")
    table = Table("selector", "context", "batch", "tokens/s", "read per token", *parts)
    for row in rows:
        decoding, count = row["decoding"], max(1, row["decoded_tokens"])
        read = decoding.get("bytes_read", 0.0) / count
        seconds = [decoding.get(f"attention_seconds.{part}", 0.0) for part in parts]
        table.add_row(
            row["selector"],
            str(row["context"]),
            str(row["requests"]),
            f"{row['decoded_tokens'] / row['decoding_s']:.1f}",
            f"{read / 1024:.0f} KiB",
            *(f"{1000 * s / count:.2f} ms" for s in seconds),
        )
    Console().print(table)
