"""Runs that calibrate, and runs that are predicted: those of the table in ``docs/sizing.md``.

``python -P -m vllm_ssdkv.profiling.sizing.runs FILE`` measures what FILE does not have yet and adds
it, a line of JSON for each engine. Twenty-five engines, one after the other, take half an hour of
two cores. An interrupted one goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from vllm_ssdkv.base.errors import BenchError, SSDKVError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.profiling.bench_io.report import machine
from vllm_ssdkv.profiling.recall.bench import RecallStores, Row
from vllm_ssdkv.profiling.sizing.measure import (
    Contexts,
    DecodeRun,
    HitRun,
    measure_decode,
    measure_hits,
)

_CHOOSE: Final = ("bounds", "codes", "sparf")


@dataclass(frozen=True, slots=True)
class Run:
    """An engine and what its figures are for.

    Attributes:
        predicted: They are held against predictions; else constants come from them.
    """

    name: str
    of: DecodeRun | HitRun
    predicted: bool


def _decode(
    drives: int, selector: str, *batches: tuple[int, int], dram: float = 0.2, predicted: bool
) -> Run:
    """Exact attention reads much in few requests, choosing little in many. What is predicted runs
    on slower drives, of which a step takes a second and more: busy cores matter less."""
    contexts = tuple(Contexts(*one) for one in batches)
    slow = (8.0 * MIB, 1250.0) if selector == "exact" else (2.5 * MIB, 400.0)
    if predicted:
        slow = (6.0 * MIB, 940.0) if selector == "exact" else (0.75 * MIB, 120.0)
    name = f"{selector}, {drives} drives, dram {dram:g}"
    tokens = 10 if predicted else 14
    return Run(
        name, DecodeRun(drives, selector, contexts, *slow, dram=dram, tokens=tokens), predicted
    )


def _all() -> tuple[Run, ...]:
    found = [_decode(3, "exact", (2048, 3), (6144, 1), predicted=False)]
    for selector in _CHOOSE:
        found.append(_decode(3, selector, (24576, 1), (12288, 2), (6144, 4), predicted=False))
        found.append(_decode(3, selector, (12288, 2), (6144, 4), dram=0.4, predicted=False))
    for drives in (1, 2, 4):
        batches = ((16384, drives), (8192, 2 * drives))
        found.append(_decode(drives, "exact", (8192, drives), (4096, 2 * drives), predicted=True))
        found += [_decode(drives, selector, *batches, predicted=True) for selector in _CHOOSE]
    hits = ((3, False), (1, True), (2, True), (4, True))
    found += [Run(f"hits, {drives} drives", HitRun(drives), of) for drives, of in hits]
    return tuple(found)


RUNS: Final = _all()
"""All of them, in the order in which they are measured."""


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Runs that a file has: name, whether predicted, when measured, rows; none: it is not there.

    Raises:
        BenchError: a line is no JSON.
    """
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise BenchError(f"{path}: a line is no JSON ({error}); remove the line") from error


def measure(run: Run, directory: Path | None, console: Console) -> list[Row]:
    """Rows of one run.

    Raises:
        BenchError: an engine failed.
    """
    if isinstance(run.of, HitRun):
        with console.status(run.name):
            return measure_hits(run.of, directory)
    stores = RecallStores(directory, run.of.drives)
    try:
        return measure_decode(run.of, stores, console)
    finally:
        stores.remove()


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="file of JSON lines; created or appended to")
    parser.add_argument("--dir", type=Path, help="directory for the stores")
    parser.add_argument("--most", type=int, default=len(RUNS), help="maximum number of runs")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    known = {line["name"] for line in read_runs(arguments.file)}
    for run in [run for run in RUNS if run.name not in known][: arguments.most]:
        before = machine()["load"]
        try:
            rows = measure(run, arguments.dir, console)
        except SSDKVError as error:
            parser.exit(1, f"{run.name}: {error}\n")
        line = {"name": run.name, "predicted": run.predicted, "rows": rows, "load": before}
        with arguments.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        console.print(f"measured {run.name}", highlight=False)


if __name__ == "__main__":
    main()
