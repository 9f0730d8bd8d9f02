"""Cost of metrics: decode throughput with and without them, in one engine.

Run as ``python -P -m vllm_ssdkv.profiling.bench_metrics``. One engine in one process decodes the
same requests all the time, for some steps with metrics and for as many without, in turn, so that
whatever else the machine does meets both. The ratio is the median of these pairs, and comes with
the range in which the median lies in 95 of 100 runs. Then the time inside the code of metrics is
measured itself, which is less noisy: clocks, counting in all threads, gauges, reports, and
Prometheus's objects, all in one process, although a server has several. It is CPU time, and so is
what it is a share of, that of the thread that steps: others on the machine do not count in it.
To watch a call takes longer than most of these calls. What that takes is measured at the same
calls of the same engine, in turn with them, with nothing in their place.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.profiling.rig.child_process import Job, Rows, run_measurement
from vllm_ssdkv.profiling.rig.engine import BLOCK, MODEL, ONE_PROCESS, Engine, Request
from vllm_ssdkv.profiling.rig.measure import bench_parser, markdown, median_range, write_json

SHAPES = ((1, 2048), (8, 2048))
"""Batch and context, at first."""
STEPS = BLOCK
"""Steps in a row with metrics, and as many without: in each turn one block is completed. With
shorter turns all blocks may be completed with metrics, or all without."""
PAIRS, LEAST_PAIRS = 120, 25
"""Maximum and minimum number of pairs."""
PAIRS_S = 30.0
"""Seconds after which the least number of pairs is enough."""
WATCHED = 25 * STEPS
"""Steps whose time in metrics is measured: long enough for gauges to be told several times."""
WARM_UP = 16
TOKENS = 2 * WARM_UP + 2 * PAIRS * STEPS + 2 * WATCHED

ENGINES: dict[str, dict[str, object]] = {
    "reuse": {"mode": "reuse", "dram_gib": "1GiB"},
    "page": {"mode": "page", "dram_gib": "1GiB"},
    # What is chosen is read from the device, so that every counter of a step moves.
    "page, sparf": {
        "mode": "page",
        "dram_gib": "8MiB",
        "selector": "sparf",
        "hbm_window_tokens": 128,
        "sparse": {"exact_below": 0, "budget": 0.25},
        "io": {"staging": "4MiB"},
    },
}
"""Options."""


def _sources() -> list[tuple[type, str]]:
    """Calls that metrics begin with: without these there is nothing to carry on."""
    from vllm_ssdkv.attention.sparse import SparseDecode
    from vllm_ssdkv.connector.scheduler.scheduler import SSDKVScheduler
    from vllm_ssdkv.connector.worker.paged_step import PagedStep
    from vllm_ssdkv.connector.worker.worker import SSDKVWorker
    from vllm_ssdkv.kernels.step_clock import AttentionClock

    return [
        *((Counters, name) for name in ("add", "add_keyed", "add_all", "set")),
        *((AttentionClock, name) for name in ("start", "lap")),
        *((SparseDecode, name) for name in ("_count", "_count_channels")),
        (PagedStep, "count"),
        (SSDKVWorker, "update_gauges"),
        (SSDKVScheduler, "take_stats"),
    ]


def _parts() -> list[tuple[type, str]]:
    """All code that exists for metrics only, outermost calls."""
    from vllm_ssdkv.connector.metrics.stats import SSDKVPromMetrics, SSDKVStats
    from vllm_ssdkv.connector.metrics.stats_collector import StatsCollector

    return [
        *_sources(),
        *((Counters, name) for name in ("take_gained", "take_gauges")),
        (StatsCollector, "take_in"),
        *((SSDKVStats, name) for name in ("aggregate", "reduce")),
        (SSDKVPromMetrics, "observe"),
    ]


@dataclass
class Switch:
    """True if metrics are on."""

    on: bool = True


def _switched(call: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    def maybe(*args: object, **kwargs: object) -> object:
        return call(*args, **kwargs) if switch.on else None

    return maybe


@contextmanager
def switchable() -> Iterator[Switch]:
    """Switch metrics at the calls that they begin with. To take it away and put it back each time
    would make the interpreter forget what it knows of these classes, which takes longer than the
    metrics."""
    switch = Switch()
    with ExitStack() as stack:
        for owner, name in _sources():
            call = _switched(getattr(owner, name), switch)
            stack.enter_context(patch.object(owner, name, call))
        yield switch


@dataclass
class Watched:
    """CPU seconds and number of the outermost calls, those of other threads included."""

    seconds: float = 0.0
    calls: int = 0

    @property
    def each(self) -> float:
        """Seconds of a call."""
        return self.seconds / self.calls


Watch: TypeAlias = dict[str, Watched]
"""Watched calls by the name of the called function."""


def _watch(
    call: Callable[..., Any] | None, inside: threading.local, watched: Watched
) -> Callable[..., Any]:
    def timed(*args: object, **kwargs: object) -> object:
        if getattr(inside, "now", False):
            return None if call is None else call(*args, **kwargs)
        inside.now, began = True, time.thread_time()
        try:
            return None if call is None else call(*args, **kwargs)
        finally:
            watched.seconds += time.thread_time() - began
            watched.calls += 1
            inside.now = False

    return timed


@contextmanager
def watching(watch: Watch, *, empty: bool = False) -> Iterator[None]:
    """Add every outermost call of metrics to ``watch``; or, if ``empty``, of what they begin with,
    which are left out then."""
    inside = threading.local()
    with ExitStack() as stack:
        for owner, name in _sources() if empty else _parts():
            watched = watch.setdefault(f"{owner.__name__}.{name}", Watched())
            call = None if empty else getattr(owner, name)
            stack.enter_context(patch.object(owner, name, _watch(call, inside, watched)))
        yield


def own_seconds(watch: Watch, blank: Watch) -> float:
    """Seconds of metrics alone. A call that was never made ``blank`` is as dear to watch as the
    others in the mean."""
    known = {name: one for name, one in blank.items() if one.calls}
    mean = sum(one.seconds for one in known.values()) / sum(one.calls for one in known.values())
    return sum(
        one.seconds - one.calls * (known[name].each if name in known else mean)
        for name, one in watch.items()
    )


def measure_decode(job: Job) -> Rows:
    """One row per shape."""
    engine = Engine.small(
        job["model"],
        {"devices": [job["device"]], **job["options"]},
        max_model_len=max(length for _, length in SHAPES) + TOKENS,
        enable_prefix_caching=False,
        max_num_seqs=max(batch for batch, _ in SHAPES),
        kv_cache_memory_bytes=64 << 20,
    )

    def seconds(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            engine.core.step()
        return time.perf_counter() - began

    rows: Rows = []
    for batch, length in SHAPES:
        for i in range(batch):
            prompt = [32 + (7 * i + t) % 768 for t in range(length)]
            engine.add(Request(f"{batch} {i}", prompt, TOKENS))
        while len(engine.core.step()) < batch:
            pass  # prompts are computed until every request gets a token in each step
        seconds(WARM_UP)
        watch: Watch = {}
        blank: Watch = {}
        whole = 0.0
        for _ in range(WATCHED // STEPS):
            with watching(watch):
                began = time.thread_time()
                seconds(STEPS)
                whole += time.thread_time() - began
            with watching(blank, empty=True):
                seconds(STEPS)
        own = own_seconds(watch, blank)
        spent = sum(one.seconds for one in watch.values())
        stepping = whole - spent + own
        ratios: list[float] = []
        end = time.monotonic() + PAIRS_S
        with switchable() as switch:
            while len(ratios) < PAIRS and (len(ratios) < LEAST_PAIRS or time.monotonic() < end):
                times: dict[bool, float] = {}
                for switch.on in (True, False) if len(ratios) % 2 else (False, True):
                    times[switch.on] = seconds(STEPS)
                ratios.append(times[False] / times[True])
        rows.append(
            {
                "engine": job["engine"],
                "batch": batch,
                "tokens": length,
                "cpu_step_s": stepping / WATCHED,
                "with_to_without": statistics.median(ratios),
                "range": median_range(ratios),
                "per_step_s": own / WATCHED,
                "share_of_time": own / stepping,
            }
        )
        for i in range(batch):
            engine.core.abort_request([f"{batch} {i}"])
        seconds(2)
    return rows


def main() -> None:
    """Measure, print a table, write JSON if asked."""
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default=str(MODEL), help="model directory")
    parser.add_argument("--dir", default=".", help="directory in which a device directory is made")
    arguments = parser.parse_args()
    rows: Rows = []
    for engine, options in ENGINES.items():
        with tempfile.TemporaryDirectory(dir=Path(arguments.dir).absolute()) as device:
            job = {
                "model": arguments.model,
                "device": device,
                "engine": engine,
                "options": options,
            }
            rows += run_measurement(measure_decode, job, ONE_PROCESS)
    columns = ("engine", "batch", "context", "CPU ms a step", "throughput with / without")
    print(markdown((*columns, "in metrics"), map(_cells, rows)))
    write_json(arguments.json, rows)


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = row["range"]
    return [
        *map(str, (row["engine"], row["batch"], row["tokens"])),
        f"{row['cpu_step_s'] * 1e3:.2f}",
        f"{row['with_to_without']:.4f} ({low:.4f} to {high:.4f})",
        f"{row['per_step_s'] * 1e6:.1f} us a step, {row['share_of_time']:.2%}",
    ]


if __name__ == "__main__":
    main()
