"""Short runs of the real engine on throttled drives, which predictions are held against.

Decoding is that of ``ssdkv lab bench decode``: the demo's model, DRAM for a share of the contexts,
an engine of its own for each case. Hits are those of ``ssdkv lab bench ttft``. Drives are as many
times slower in requests as in bytes, so that they are the limit, and busy cores are not.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console

from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.profiling.bench_ttft import slowed_hits
from vllm_ssdkv.profiling.recall.bench import RecallStores, Row, dram_share_plan
from vllm_ssdkv.profiling.recall.kv_size import bytes_per_token
from vllm_ssdkv.profiling.recall.recall import MODEL_DIR
from vllm_ssdkv.profiling.recall.run import Batch

WINDOW: Final = 64
BUDGET: Final = 0.125
DEADLINE_S: Final = 120.0
"""Time limit of a read: drives that are so slow are not out of use."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """Contexts that are decoded from at a time."""

    tokens: int
    batch: int


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """An engine that decodes from contexts, one batch after the other.

    Attributes:
        bandwidth, iops, latency: Of each drive: bytes/s, requests/s, seconds.
        dram: DRAM, as a share of the KV of the largest batch.
        tokens: Of each answer; the first two are not measured.
    """

    drives: int
    selector: str
    batches: tuple[Contexts, ...]
    bandwidth: float
    iops: float
    latency: float = 0.002
    dram: float = 0.2
    tokens: int = 14


@dataclass(frozen=True, slots=True)
class HitRun:
    """An engine that finds prompts in its store, of all lengths of ``ssdkv lab bench ttft``."""

    drives: int
    bandwidth: float = 4.0 * MIB
    latency: float = 0.02
    repeats: int = 2


def measure_decode(run: DecodeRun, stores: RecallStores, console: Console) -> list[Row]:
    """A row for each batch, with all that a prediction needs to know.

    Raises:
        BenchError: the engine failed.
    """
    asked = [
        Batch(one.tokens, one.batch, ("copy",), run.tokens, stored=True) for one in run.batches
    ]
    largest = max(asked, key=lambda one: one.context * one.count)
    rule = {"bandwidth": run.bandwidth, "iops": run.iops, "latency": run.latency}
    machine: Row = {
        "model": rule,
        "dram": run.dram,
        "budget": BUDGET,
        "window_tokens": WINDOW,
        "reuse_steps": 1,
        "reuse_similarity": 0.8,
        "longest": max(one.context for one in asked),
        "short_exact": False,
    }
    content = 2 * sum(one.context * one.count for one in asked) * bytes_per_token()
    plan = dram_share_plan(stores.places(run.selector), run.selector, largest, machine, content)
    what = f"{run.drives} drives, {run.selector}"
    whole = replace(plan, batches=tuple(asked), slow_prompts=False, deadline=DEADLINE_S)
    found = stores.run(whole, what, console)
    sizes = {"drives": run.drives, "selector": run.selector, "dram_bytes": plan.dram_bytes}
    longest = plan.engine_settings()["max_model_len"]
    return [{**sizes, **rule, "longest": longest, **_figures(one)} for one in found]


def _figures(found: Row) -> Row:
    counted, steps = found["decoding"], max(1, found["decoding_steps"])
    return {
        "context": found["context"],
        "batch": found["requests"],
        "tokens_per_s": found["decoded_tokens"] / found["decoding_s"],
        "step_s": found["decoding_s"] / steps,
        "rows_exact": found["rows_exact"],
        "step_bytes": counted.get("bytes_read", 0.0) / steps,
        "step_requests": counted.get("read_requests", 0.0) / steps,
        "io_s": counted.get("device_seconds.busiest", 0.0) / steps,
    }


def measure_hits(run: HitRun, directory: Path | None) -> list[Row]:
    """A row for each length: seconds to the first token, computed and found on the drives.

    Raises:
        BenchError: an engine failed.
    """
    slow = {"bandwidth": run.bandwidth, "latency": run.latency}
    root = Path(tempfile.mkdtemp(prefix="ssdkv-sizing-", dir=directory))
    try:
        places = [root / str(number) for number in range(run.drives)]
        for place in places:
            place.mkdir(mode=0o700)
        rows = slowed_hits(MODEL_DIR, places, slow, run.repeats)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    kept = ("tokens", "ttft_computed", "ttft_ssd", "loaded_ssd")
    return [{"drives": run.drives, **slow, **{name: row[name] for name in kept}} for row in rows]
