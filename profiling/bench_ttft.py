"""Real vLLM in reuse mode: time to first token of a hit against that of computing the prompt.

Run as ``ssdkv lab bench ttft``. On the drive as it is and on one slowed by the throttled twin; with
``load: always`` and with ``load: auto``. One run fills a store, then one engine after the other
opens it, with DRAM empty, and asks by turns a prompt that nobody knows, one that is on the drive,
and the same again from DRAM. Medians over repeats; a ratio is the median of those of two
measurements that followed each other. Each engine is a process of its own.

How fast the connector loads what is on the drive, in bytes per second that it was at it, is set
against what our I/O engine alone reads from the same drives with requests of the same size: as many
of them in one batch, to empty queues and after as much rest as the hit had, which is what a load of
that size can reach at best; and with the queues kept full, as under ``ssdkv lab bench io``. Both
before and after.

Of the time to the first token of a hit on the drive, *load* is ours: from when the worker was told
of the load until its last byte was copied. *Report* is how long the worker then did not look, which
is when vLLM steps. All the rest is vLLM's: from the request to the plan, from the worker's report
to the next step, and that step, which computes the last token.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import GIB, MIB, approximate_size
from vllm_ssdkv.config.io_engine import EngineKind, ThrottleRule
from vllm_ssdkv.profiling.bench_io.case import MEMORY_BYTES, Case
from vllm_ssdkv.profiling.bench_io.engines import DEADLINE_S, EngineContender
from vllm_ssdkv.profiling.bench_io.files import bench_files
from vllm_ssdkv.profiling.recall.kv_size import bytes_per_token
from vllm_ssdkv.profiling.rig.child_process import Job, Rows, run_measurement
from vllm_ssdkv.profiling.rig.engine import BLOCK, ONE_THREAD, Engine, random_prompt
from vllm_ssdkv.profiling.rig.measure import median_ratio
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.read.load_job import LoadOutcome

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
CHUNK = 1024
WARM_UP = (max(LENGTHS), 512, 4096, 64, 1024)
"""Hits before the measurement, from which the engine learns. The first uses all of HBM: here that
is memory like any other, which the kernel clears at its first use."""
REST_S = 0.3
"""Seconds after a prompt, for the drive to be done with what was written: hits of 8 and 16 MiB that
came at once were loaded at half of their speed after this rest."""
DRIVES = ("as it is", "throttled")
LOADS = ("always", "auto")
REGION_BYTES = 256 * MIB
"""Bytes of the file, per drive, that the engine alone reads."""
ALONE_S = 0.3
"""Seconds of one run of it, at least."""
BATCHES_S = 3 * REST_S
"""Seconds of one run of batches of one size, rests included, at least."""


class _Asker:
    """Asks one prompt at a time, with nothing left to do from the one before."""

    def __init__(self, job: Job):
        options = {
            "devices": job["devices"],
            "dram_gib": job["dram_bytes"] / GIB,
            "load": job["load"],
            "io": {"throttle": job["throttle"]},
        }
        self._engine = Engine.small(
            job["model"],
            options,
            max_model_len=max(LENGTHS) + 64,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=1,
            kv_cache_memory_bytes=job["hbm_bytes"],
        )
        self._worker = self._engine.worker
        self._taken: list[tuple[LoadOutcome, float]] = []
        self._note_loads()

    def ask(self, length: int, name: str) -> tuple[float, int]:
        """Seconds to the first token, and tokens that were not computed. HBM holds no prefix.

        The prompt is ``length`` full blocks and one token more, so that all of it can be found.
        """
        output = self._engine.ask(random_prompt(length + 1, name))
        self._engine.forget(REST_S)
        return output.metrics.first_token_latency, output.num_cached_tokens or 0

    def _note_loads(self) -> None:
        store = self._worker.store
        take = store.take_load_outcomes

        def noted(patience_s: float = 0.0) -> list[LoadOutcome]:
            outcomes: list[LoadOutcome] = take(patience_s)
            now = time.monotonic()
            self._taken += [(outcome, now - outcome.ended) for outcome in outcomes]
            return outcomes

        store.take_load_outcomes = noted

    def load_parts(self) -> tuple[float, float]:
        """Seconds of the loads from the drive since the last call, queued and loaded, and until
        the worker took notice."""
        taken, self._taken = self._taken, []
        loads = [(o.queued_s + o.ssd_s, late) for o, late in taken if o.tokens_from_ssd]
        return sum(load for load, _ in loads), sum(late for _, late in loads)

    def loaded(self) -> tuple[float, float]:
        """Bytes that were loaded from the drive so far, and the seconds that it took."""
        worker = self._worker
        blocks = worker.counters.total("hit_tokens", tier="ssd") / BLOCK
        seconds = worker.counters.total("load_seconds", tier="ssd")
        return blocks * worker.layout.geometry.slot_bytes, seconds

    def request(self) -> tuple[int, int, int]:
        """Bytes of the largest request that a block is read with, how many are in flight, and how
        many a block takes."""
        files = self._worker.store.files
        extents = files.placement.extents(np.arange(1), 0, files.geometry.slot_bytes, merged=False)
        depth = self._worker.config.io.queue_depth
        return int(extents.length.max()), depth, len(extents.length)

    def close(self) -> None:
        """End the engine: what is written is journalled."""
        self._engine.close()


class _EngineAlone:
    """Our engine reads random requests of ``nbytes`` from the job's drives."""

    def __init__(self, contender: EngineContender, nbytes: int, depth: int, devices: int):
        self._contender = contender
        self._case = Case(Op.READ, nbytes, depth, devices)
        self._full: list[float] = []
        self._at_once: dict[int, list[float]] = {}

    def measure(self, batches: Sequence[int]) -> None:
        """Measure with full queues, and with so many requests in one batch."""
        self._full.append(self._contender.run(self._case, ALONE_S).bytes_per_s)
        for requests in batches:
            speeds = self._contender.one_batch(self._case, requests, BATCHES_S, REST_S)
            self._at_once.setdefault(requests, []).extend(speeds)

    def full(self) -> float:
        """Bytes per second with full queues; median of all measurements."""
        return statistics.median(self._full)

    def at_once(self, requests: int) -> float:
        """The same of so many requests in one batch."""
        return statistics.median(self._at_once[requests])


@contextmanager
def _engine_alone(job: Job, nbytes: int, depth: int) -> Iterator[_EngineAlone]:
    """``depth``: requests in flight on each drive, or fewer where that is enough."""
    paths = [Path(device["path"]) for device in job["devices"]]
    model = None
    most = MEMORY_BYTES // nbytes // len(paths)
    if job["throttle"]:
        (slow,) = job["throttle"]
        model = ThrottleRule(bandwidth=slow["bandwidth"], latency_s=slow["latency"])
        # Enough to keep it busy: more would only take long to end.
        most = min(most, 4 + int(slow["bandwidth"] * slow["latency"] / nbytes))
    arena = Arena(MEMORY_BYTES)
    try:
        with bench_files(paths, len(paths), REGION_BYTES) as files:
            kind: EngineKind = "uring" if _io.has_uring else "threads"
            contender = EngineContender(kind, files, arena, model)
            yield _EngineAlone(contender, nbytes, max(1, min(depth, most)), len(paths))
    finally:
        arena.close()


def fill(job: Job) -> Rows:
    """Put every prompt that is to be found into the store."""
    asker = _Asker(job)
    for length in LENGTHS:
        for repeat in range(job["repeats"]):
            asker.ask(length, f"stored {length} {repeat}")
    for number, length in enumerate(WARM_UP):
        asker.ask(length, f"warm {number}")
    asker.close()
    return []


def measure(job: Job) -> Rows:
    """One row per length."""
    asker = _Asker(job)
    nbytes, depth, per_block = asker.request()
    batches = {length: per_block * length // BLOCK for length in LENGTHS}
    with _engine_alone(job, nbytes, depth) as alone:
        alone.measure(list(batches.values()))
        rows = _ask_all(asker, job)
        alone.measure(list(batches.values()))
    asker.close()
    for row in rows:
        load = row["load_bytes_per_s"]
        engine = {"batch": alone.at_once(batches[row["tokens"]]), "engine": alone.full()}
        row["request_bytes"] = nbytes
        for name, speed in engine.items():
            row[f"{name}_bytes_per_s"] = speed
            row[f"load_per_{name}"] = None if load is None else load / speed
    return rows


def _ask_all(asker: _Asker, job: Job) -> Rows:
    news = f"{job['drive']} {job['load']}"
    for number, length in enumerate(WARM_UP):
        asker.ask(length, f"news {news} {number}")
        asker.ask(length, f"warm {number}")
    rows = []
    for length in LENGTHS:
        times: dict[str, list[float]] = {"computed": [], "ssd": [], "dram": []}
        loaded = {"ssd": 0, "dram": 0}
        speeds: list[float] = []
        parts: list[tuple[float, float, float]] = []
        for repeat in range(job["repeats"]):
            seconds, cached = asker.ask(length, f"news {news} {length} {repeat}")
            if cached:
                raise RuntimeError("a prompt that nobody knows was found")
            times["computed"].append(seconds)
            before = asker.loaded()
            asker.load_parts()
            for tier in loaded:
                seconds, cached = asker.ask(length, f"stored {length} {repeat}")
                times[tier].append(seconds)
                loaded[tier] += cached
                load, report = asker.load_parts()
                if load:
                    parts.append((load, report, seconds - load - report))
            size, spent = np.subtract(asker.loaded(), before).tolist()
            if size:
                speeds.append(size / spent)
        rows.append(
            {
                "drive": job["drive"],
                "load": job["load"],
                "tokens": length,
                **{f"ttft_{name}": statistics.median(each) for name, each in times.items()},
                **{f"ratio_{k}": median_ratio(times[k], times["computed"]) for k in loaded},
                **{f"loaded_{k}": n / length / job["repeats"] for k, n in loaded.items()},
                "load_bytes_per_s": statistics.median(speeds) if speeds else None,
                "hit_parts_s": [statistics.median(part) for part in zip(*parts, strict=True)],
            }
        )
    return rows


def run_bench(
    model: Path,
    directories: Sequence[Path],
    slow: dict[str, float],
    repeats: int,
    tell: Callable[[str], object],
) -> Rows:
    """Measure everything: a row per drive, option ``load`` and length. Takes minutes.

    Args:
        model: A model directory.
        directories: Of the store's devices; left full.
        slow: Model of the slowed drive, an entry of the option ``io.throttle``.
        repeats: Prompts of each length.
        tell: Called with what is measured next.

    Raises:
        BenchError: an engine failed, and the text has the end of its log; it cannot be told how
            large the model's KV is; or the slowed drive is too slow for it.
    """
    _require_bandwidth(max(LENGTHS) * bytes_per_token(model), slow["bandwidth"], len(directories))
    job = _job(model, directories, repeats, engines=len(DRIVES) * len(LOADS) + 1)
    tell("filling a store")
    run_measurement(fill, {**job, "load": "always", "throttle": []}, ONE_THREAD)
    rows = []
    for drive, throttle in zip(DRIVES, ([], [slow]), strict=True):
        for load in LOADS:
            tell(f"drive {drive}, load {load}")
            mine = {**job, "drive": drive, "throttle": throttle, "load": load}
            rows += run_measurement(measure, mine, ONE_THREAD)
    return rows


def slowed_hits(
    model: Path, directories: Sequence[Path], slow: dict[str, float], repeats: int
) -> Rows:
    """The same on slowed drives alone, with ``load: always``: a row per length.

    Raises:
        BenchError: see :func:`run_bench`.
    """
    _require_bandwidth(max(LENGTHS) * bytes_per_token(model), slow["bandwidth"], len(directories))
    job = _job(model, directories, repeats, engines=2)
    run_measurement(fill, {**job, "load": "always", "throttle": []}, ONE_THREAD)
    slowed = {**job, "drive": DRIVES[1], "throttle": [slow], "load": "always"}
    return run_measurement(measure, slowed, ONE_THREAD)


def _job(model: Path, directories: Sequence[Path], repeats: int, *, engines: int) -> Job:
    """Common part of all engines."""
    hit = bytes_per_token(model) * (max(LENGTHS) + CHUNK)
    # What is stored, and what each of the other engines adds to it; headers and padding on top.
    asked = engines * (repeats * sum(LENGTHS) + sum(WARM_UP))
    content = asked * bytes_per_token(model) * 5 // 4
    capacity = 64 * MIB + max(GIB, content) // len(directories)
    return {
        "model": str(model),
        "devices": [{"path": str(path), "capacity": capacity} for path in directories],
        "repeats": repeats,
        "dram_bytes": max(GIB, 4 * hit),
        "hbm_bytes": max(128 * MIB, hit),
    }


def _require_bandwidth(hit: int, bandwidth: float, drives: int) -> None:
    """Require that the engine alone reads a hit in time, with as much to spare."""
    least = 2 * hit / DEADLINE_S / drives
    if bandwidth < least:
        raise BenchError(
            f"--bandwidth: the longest hit, {approximate_size(hit)}, would take "
            f"{hit / bandwidth / drives:.0f} s, and has {DEADLINE_S:.0f} s: give "
            f"{math.ceil(least / MIB)} MiB at least"
        )
