"""Constants of the engine here, fitted to runs that calibrate, and predictions of others."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.recall.bench import Row
from vllm_ssdkv.profiling.recall.recall import MODEL_DIR
from vllm_ssdkv.profiling.recall.run import BLOCK_TOKENS
from vllm_ssdkv.profiling.rig.engine import BLOCK
from vllm_ssdkv.profiling.rig.page_engine import STAGING
from vllm_ssdkv.profiling.simulation.hardware import Drive, Gpu
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape
from vllm_ssdkv.profiling.sizing.costs import EngineCosts, Misses
from vllm_ssdkv.profiling.sizing.forecast import Choice, Sizing, hit_s, page_room, page_step
from vllm_ssdkv.profiling.sizing.machine import SizedMachine
from vllm_ssdkv.profiling.sizing.measure import BUDGET, WINDOW
from vllm_ssdkv.profiling.sizing.workload import Workload

TOLERANCE: Final = 0.2
"""Deviation up to which a prediction counts as right."""
_HIT_TOKENS: Final = 4096
"""Shortest hits that are predicted: shorter ones are vLLM's own time."""
_PLENTY: Final = 1e15


@dataclass(frozen=True, slots=True)
class Prediction:
    """A setting, what was predicted and what was measured.

    Attributes:
        what: tokens/s or TTFT in seconds.
    """

    drives: int
    setting: str
    what: str
    predicted: float
    measured: float

    @property
    def deviation(self) -> float:
        """Deviation of the prediction, by what was measured."""
        return self.predicted / self.measured - 1

    @property
    def miss(self) -> bool:
        """Check whether it is outside of the tolerance."""
        return abs(self.deviation) > TOLERANCE


def sizing_of(row: Row, costs: EngineCosts | None, *, block: int = BLOCK_TOKENS) -> Sizing:
    """The setting of a row. Memory and arithmetic are in the constants of the engine here."""
    drive = Drive.model_validate(
        {
            "name": "throttled",
            "read_bandwidth": row["bandwidth"],
            "write_bandwidth": row["bandwidth"],
            "iops": row.get("iops", _PLENTY),
            "latency_s": row["latency"],
            "sources": dict.fromkeys(
                ("read_bandwidth", "write_bandwidth", "iops", "latency_s"), "option io.throttle"
            ),
        }
    )
    figures = {"memory_bytes": _PLENTY, "bandwidth": _PLENTY, "flops": _PLENTY}
    gpu = Gpu.model_validate(
        {"name": "processor", **figures, "sources": dict.fromkeys(figures, "see sizing_of")}
    )
    dram = float(row.get("dram_bytes", _PLENTY))
    drives = (drive,) * int(row["drives"])
    machine = SizedMachine(gpu, _PLENTY, _PLENTY, dram, drives, cpu=True)
    model = ModelShape.read(MODEL_DIR / "config.json", name="the demo's model")
    context, batch = int(row.get("context", 1)), int(row.get("batch", 1))
    # DRAM is divided for the engine's limits, which this batch need not reach.
    longest = max(context, int(row.get("limit_tokens", context * batch)) // batch)
    work = Workload(context, 1, longest, batch)
    return Sizing(model, work, machine, costs or EngineCosts(0.0), block_tokens=block)


def choice_of(row: Row) -> Choice:
    """The way in which the engine of a row served."""
    return Choice("page", row["selector"], BUDGET, int(row["batch"]), WINDOW, STAGING)


def rows_of(runs: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rows of runs, with the limits of their engines."""
    found = []
    for run in runs:
        batches = [int(row.get("batch", 1)) for row in run["rows"]]
        for row in run["rows"]:
            limit = {"limit_tokens": row["longest"] * max(batches)} if "longest" in row else {}
            found.append({**row, **limit})
    return found


def fit(rows: Sequence[Row]) -> dict[str, EngineCosts]:
    """Constants by selector, and those of hits under ``reuse``.

    Raises:
        BenchError: there is nothing to fit to.
    """
    if not rows:
        raise BenchError("no run that calibrates: measure one first")
    found = {}
    for selector in sorted({row["selector"] for row in rows if "selector" in row}):
        of = [row for row in rows if row.get("selector") == selector]
        misses = {} if selector == "exact" else {selector: Misses.fitted(_seen(of))}
        rest = [row["step_s"] - _step_s(row, EngineCosts(0.0, misses=misses)) for row in of]
        found[selector] = replace(_overhead(of, rest), misses=misses)
    hits = [row for row in rows if "ttft_ssd" in row]
    if hits:
        beside = [row["ttft_ssd"] - hit_s(_hit_sizing(row, 0.0), row["tokens"]) for row in hits]
        found["reuse"] = EngineCosts(0.0, hit_s=max(0.0, statistics.median(beside)))
    return found


def _overhead(rows: Sequence[Row], rest: Sequence[float]) -> EngineCosts:
    """Seconds of a step and of each request in it, neither below 0.

    The line through all pairs of runs of which the slope, then the level, is the median: one run
    beside which the machine was busy moves it little.
    """
    batches = [float(row["batch"]) for row in rows]
    slopes = [
        (rest[b] - rest[a]) / (batches[b] - batches[a])
        for a, b in itertools.combinations(range(len(rows)), 2)
        if batches[a] != batches[b]
    ]
    of_row = max(0.0, statistics.median(slopes)) if slopes else 0.0
    step = statistics.median(r - of_row * b for r, b in zip(rest, batches, strict=True))
    if step < 0:
        of_row = 0.0
        step = max(0.0, statistics.median(rest))
    return EngineCosts(step, of_row)


def _seen(rows: Sequence[Row]) -> list[tuple[float, float, float]]:
    """Context, room and part of missing pages of each row."""
    found = []
    for row in rows:
        room, chosen = page_room(sizing_of(row, None), choice_of(row))
        found.append((float(row["context"]), room, row["step_bytes"] / chosen))
    return found


def _step_s(row: Row, costs: EngineCosts) -> float:
    return page_step(sizing_of(row, costs), choice_of(row)).seconds


def _hit_sizing(row: Row, beside_s: float) -> Sizing:
    return sizing_of(row, EngineCosts(0.0, hit_s=beside_s), block=BLOCK)


def predict(rows: Sequence[Row], costs: Mapping[str, EngineCosts]) -> list[Prediction]:
    """Predictions of rows, beside what was measured; short hits are left out."""
    found = []
    for row in rows:
        drives = int(row["drives"])
        if "ttft_ssd" in row:
            if row["tokens"] >= _HIT_TOKENS:
                seconds = hit_s(_hit_sizing(row, costs["reuse"].hit_s), row["tokens"])
                setting = f"reuse, a hit of {row['tokens']:,} tokens"
                found.append(Prediction(drives, setting, "TTFT s", seconds, row["ttft_ssd"]))
            continue
        step = _step_s(row, costs[row["selector"]])
        setting = f"page, {row['selector']}, {row['batch']} x {row['context']:,} tokens"
        speed = row["batch"] / step
        found.append(Prediction(drives, setting, "tokens/s", speed, row["tokens_per_s"]))
    return found
