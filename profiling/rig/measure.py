"""Measuring by turns: calls that take turns, ratios within a turn, and how results are told."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def by_turns(
    calls: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 0, rotate: bool = False
) -> dict[str, list[T]]:
    """Results of each call in each round, by its name; whatever else the machine does meets all.

    Args:
        calls: In the order in which they are made.
        rounds: Whose results count.
        warm_up: Rounds before, in which memory is touched and threads begin.
        rotate: Each round begins with the next call.
    """
    found: dict[str, list[T]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(-warm_up, rounds):
        first = turn % len(names) if rotate else 0
        for name in (*names[first:], *names[:first]):
            result = calls[name]()
            if turn >= 0:
                found[name].append(result)
    return found


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """Make a call that returns its seconds."""

    def seconds() -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return seconds


def ratios(these: Iterable[float], those: Iterable[float]) -> list[float]:
    """Ratios of what was measured one after the other."""
    return [a / b for a, b in zip(these, those, strict=True)]


def median_ratio(these: Iterable[float], those: Iterable[float]) -> float:
    """Median of :func:`ratios`."""
    return statistics.median(ratios(these, those))


def ratio_range(these: Iterable[float], those: Iterable[float]) -> tuple[float, float, float]:
    """Median of :func:`ratios`, and the range in which it lies in 95 of 100 runs."""
    found = ratios(these, those)
    return (statistics.median(found), *median_range(found))


def median_range(values: Sequence[float]) -> tuple[float, float]:
    """Range of the median of the distribution of ``values``, in 95 of 100 cases."""
    ordered = sorted(values)
    middle, reach = len(ordered) / 2, 1.96 * math.sqrt(len(ordered)) / 2  # of a binomial
    low, high = math.floor(middle - reach), math.ceil(middle + reach)
    return ordered[max(0, low)], ordered[min(len(ordered), high) - 1]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, *rows)]
    lines.insert(1, "|---" * len(columns) + "|")
    return "\n".join(lines)


def bench_parser(doc: str | None) -> argparse.ArgumentParser:
    """Options of a benchmark, ``--json`` first; ``doc``: of its module."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser


def write_json(path: Path | None, results: object) -> None:
    """Write results to the file that ``--json`` named, if any."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


@contextmanager
def scratch_directories(parents: Sequence[Path] | None) -> Iterator[list[Path]]:
    """A directory below each of ``parents``, or one below this; they are removed."""
    with tempfile.TemporaryDirectory(prefix="ssdkv-bench-", dir=Path.cwd()) as scratch:
        made: list[Path] = []
        try:
            for i, parent in enumerate(parents or [Path(scratch)]):
                made.append(Path(tempfile.mkdtemp(prefix=f"ssdkv-bench-{i}-", dir=parent)))
            yield made
        finally:
            for directory in made:
                shutil.rmtree(directory, ignore_errors=True)
