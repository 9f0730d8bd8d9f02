"""Real vLLM with and without this package: time to first token on a hit, and decode speed.

Run as ``python -P -m vllm_ssdkv.profiling.bench_engine``. Every figure is a ratio of two
measurements in one run of one machine; medians over repeats. Each engine is a process of its own.
Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.profiling.recall.kv_size import bytes_per_token
from vllm_ssdkv.profiling.rig.child_process import Job, Rows, run_measurement
from vllm_ssdkv.profiling.rig.engine import MODEL, ONE_THREAD, Engine, Request, random_prompt
from vllm_ssdkv.profiling.rig.measure import (
    bench_parser,
    markdown,
    median_ratio,
    ratios,
    write_json,
)

LENGTHS = (2048, 8192, 16384, 32768)
DECODE = ((1, 2048), (1, 8192), (8, 2048), (8, 8192))
"""Batch and context of each decode measurement."""
MODES = ("stock", "page")
DECODE_REPEATS = 5
DECODE_TOKENS = 160
"""The first of eight requests decode while the last ones are computed."""
REPEATS = 3
PREFILL = 2048
"""Tokens of a prompt that is stored."""
PREFILL_REPEATS = 21
PREFILL_REST_S = 0.3
"""Pause after a prompt, in which the drive finishes its writes."""
START_REST_S = 3.0
"""Pause after a start, in which the memory for frames is brought in."""


def _engine(job: Job, nbytes: int, seats: int) -> Engine:
    """An engine of the job's mode with so much memory for KV, warmed up."""
    mode = job["mode"]
    options = {"mode": mode, "devices": job["devices"], "dram_gib": "2GiB"}
    engine = Engine.small(
        job["model"],
        None if mode == "stock" else options,
        max_model_len=max(LENGTHS) + 256,
        max_num_batched_tokens=1024,
        enable_prefix_caching=mode == "reuse",
        max_num_seqs=seats,
        kv_cache_memory_bytes=nbytes,
    )
    engine.ask(random_prompt(512, 0))
    return engine


def measure_hits(job: Job) -> Rows:
    """TTFT of computing a prompt, and of finding it in the store, alternating by length."""
    engine = _engine(job, (160 if job["mode"] == "reuse" else 8) * MIB, 1)
    rows = []
    for length in LENGTHS:
        computed, found = [], []
        for repeat in range(REPEATS):
            prompt = random_prompt(length, 1000 * length + repeat)
            first = engine.ask(prompt)
            if not engine.llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not reset its prefix cache")
            second = engine.ask(prompt)
            if first.num_cached_tokens or not second.num_cached_tokens:
                raise RuntimeError("the first run must compute and the second must hit")
            computed.append(first.metrics.first_token_latency)
            found.append(second.metrics.first_token_latency)
        rows.append(
            {
                "mode": job["mode"],
                "tokens": length,
                "ttft_computed": statistics.median(computed),
                "ttft_hit": statistics.median(found),
            }
        )
    return rows


def measure_decode(job: Job) -> Rows:
    """Time of decode steps, all of the context in HBM (stock) or HBM and DRAM (page), by turns with
    another process, whose ``turn`` has a pipe for each. Processor time is that of the thread that
    computes."""
    mode, most = job["mode"], max(batch for batch, _ in DECODE)
    held = 2 * SSDKVConfig().window_tokens
    if mode == "stock":
        held = max(length for _, length in DECODE) + DECODE_TOKENS
    engine = _engine(job, most * (held + 64) * bytes_per_token(Path(job["model"])), most)
    engine.forget(START_REST_S)
    cases = DECODE * DECODE_REPEATS
    rows = []
    for number, (batch, length) in enumerate(cases):
        if number or mode != MODES[0]:
            Path(job["turn"], mode).read_bytes()
        requests = [
            Request(f"{number} {i}", random_prompt(length, f"{number} {i}"), DECODE_TOKENS)
            for i in range(batch)
        ]
        steps, cpu, before = list[float](), list[float](), (0.0, 0.0)
        for outputs in engine.steps(requests):
            now = time.perf_counter(), time.thread_time()
            if len(outputs) == batch and not any(output.finished for output in outputs):
                steps.append(now[0] - before[0])
                cpu.append(now[1] - before[1])
            before = time.perf_counter(), time.thread_time()
        # With the first step the last prompt ended.
        step, work = statistics.mean(steps[1:]), statistics.mean(cpu[1:])
        rows.append({"batch": batch, "tokens": length, "step_s": step, "step_cpu_s": work})
        if number + 1 < len(cases) or mode == MODES[0]:
            Path(job["turn"], MODES[mode == MODES[0]]).write_bytes(b"")
    return rows


def _decode_by_turns(job: Job, scratch: Path, threads: int) -> list[Rows]:
    """Rows of stock vLLM and of page mode, with so many threads of OpenMP each."""
    turn = scratch / "turn"
    turn.mkdir()
    for mode in MODES:
        os.mkfifo(turn / mode)
    jobs = [
        {**job, "mode": mode, "devices": [f"{scratch}/0/decode"], "turn": str(turn)}
        for mode in MODES
    ]
    more = {**ONE_THREAD, "OMP_NUM_THREADS": str(threads)}
    measure = functools.partial(run_measurement, measure_decode, more=more)
    # Processes, as who waits for a measurement has the signals of its own.
    with ProcessPoolExecutor(len(jobs), get_context("fork")) as waiting:
        return list(waiting.map(measure, jobs))


def measure_prefill(job: Job) -> Rows:
    """TTFT of prompts that are stored, whose blocks are copied to DRAM at the end of each step, and
    layer by layer beside it; by turns. Processor time is that of the whole process."""
    engine = _engine(job, 160 * MIB, 1)
    layers = engine.worker.layers
    engine.ask(random_prompt(PREFILL, 0))
    seconds: dict[str, list[tuple[float, float]]] = {"end": [], "layers": []}
    for repeat in range(PREFILL_REPEATS):
        for way in sorted(seconds, reverse=bool(repeat % 2)):
            layers.least_bytes = 1 if way == "layers" else None
            begun = time.process_time()
            prompt = random_prompt(PREFILL, 1 + 2 * repeat + (way == "layers"))
            output = engine.ask(prompt)
            seconds[way].append((output.metrics.first_token_latency, time.process_time() - begun))
            time.sleep(PREFILL_REST_S)
    row: dict[str, Any] = {"mode": job["mode"], "tokens": PREFILL}
    for number, name in enumerate(("ttft", "cpu")):
        end, beside = ([pair[number] for pair in seconds[way]] for way in ("end", "layers"))
        found = ratios(beside, end)
        row |= {f"{name}_end": statistics.median(end), f"{name}_layers": statistics.median(beside)}
        row[f"{name}_ratio"] = statistics.median(found)
        row[f"{name}_ratios"] = min(found), max(found)
    row["most_waiting"] = layers.most_waiting
    return [row]


def main() -> None:
    """Measure everything, print two tables, write JSON if asked."""
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default=str(MODEL), help="model directory")
    parser.add_argument("--dir", action="append", help="device directory (repeat for several)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a decode step")
    arguments = parser.parse_args()
    for given in arguments.dir or ():
        if not Path(given).is_dir():
            parser.error(f"--dir: {given} is not a directory; make it, or name another one")
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        (Path(scratch) / "0").mkdir()  # what no --dir takes the place of
        job: dict[str, Any] = {"model": arguments.model}
        hits: list[dict[str, Any]] = []
        for mode in ("reuse", "page"):
            devices = [f"{d}/{mode}" for d in arguments.dir or (f"{scratch}/0", f"{scratch}/1")]
            for device in devices:
                Path(device).mkdir(parents=True, exist_ok=True)
            hits += run_measurement(measure_hits, {**job, "mode": mode, "devices": devices})
        prefill = [
            row
            for mode in ("reuse", "page")
            for row in run_measurement(
                measure_prefill,
                {**job, "mode": mode, "devices": [f"{scratch}/0/prefill-{mode}"]},
                ONE_THREAD,
            )
        ]
        decode = _decode_by_turns(job, Path(scratch), arguments.threads)
    columns = ("mode", "tokens", "TTFT computed s", "TTFT hit s", "ratio")
    print(markdown(columns, map(_hit_cells, hits)))
    speeds = ("stock tokens/s", "page tokens/s", "page / stock", "by processor time")
    cases = [
        _decode_cells(*(rows[i :: len(DECODE)] for rows in decode)) for i in range(len(DECODE))
    ]
    print("\n" + markdown(("batch", "context", *speeds), cases))
    ways = ("TTFT, copied at the end", "by layers", "ratio", "processor time")
    print("\n" + markdown(("mode", "tokens", *ways), map(_prefill_cells, prefill)))
    write_json(arguments.json, {"hits": hits, "decode": decode, "prefill": prefill})


def _hit_cells(row: dict[str, Any]) -> list[str]:
    computed, hit = row["ttft_computed"], row["ttft_hit"]
    cells = [f"{computed:.3f}", f"{hit:.3f}", f"{computed / hit:.1f}"]
    return [row["mode"], str(row["tokens"]), *cells]


def _decode_cells(stock: Rows, page: Rows) -> list[str]:
    """A case in all rounds."""
    batch = stock[0]["batch"]
    cells = [str(batch), str(stock[0]["tokens"])]
    for rows in (stock, page):
        cells.append(f"{batch / statistics.median(row['step_s'] for row in rows):.0f}")
    for key in ("step_s", "step_cpu_s"):
        ratio = median_ratio([row[key] for row in stock], [row[key] for row in page])
        cells.append(f"{ratio:.2f}")
    return cells


def _prefill_cells(row: dict[str, Any]) -> list[str]:
    low, high = row["ttft_ratios"]
    cells = [f"{row['ttft_end']:.4f}", f"{row['ttft_layers']:.4f}"]
    cells += [f"{row['ttft_ratio']:.3f} ({low:.3f} to {high:.3f})", f"{row['cpu_ratio']:.3f}"]
    return [row["mode"], str(row["tokens"]), *cells]


if __name__ == "__main__":
    main()
