"""Real vLLM with and without this package: time to first token on a hit, and decode speed.

Run as ``python -P -m vllm_ssdkv.profiling.bench_engine``. Every figure is a ratio of two
measurements in one run of one machine; medians over repeats. Each engine is a process of its own.
Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.profiling.rig.child_process import Job, Rows, run_measurement
from vllm_ssdkv.profiling.rig.engine import MODEL, ONE_THREAD, Engine, random_prompt
from vllm_ssdkv.profiling.rig.measure import bench_parser, markdown, ratios, write_json

LENGTHS = (2048, 8192, 16384, 32768)
DECODE = ((1, 2048), (1, 8192), (8, 2048))
"""Batch and context of each decode measurement."""
DECODE_TOKENS = 64
REPEATS = 3
PREFILL = 2048
"""Tokens of a prompt that is stored."""
PREFILL_REPEATS = 21
PREFILL_REST_S = 0.3
"""Pause after a prompt, in which the drive finishes its writes."""


def _engine(job: Job, mib: int, seats: int) -> Engine:
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
        kv_cache_memory_bytes=mib * MIB,
    )
    engine.ask(random_prompt(512, 0))
    return engine


def measure_hits(job: Job) -> Rows:
    """TTFT of computing a prompt, and of finding it in the store, alternating by length."""
    engine = _engine(job, 160 if job["mode"] == "reuse" else 8, 1)
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
    """Decode tokens per second, all of the context in HBM (stock) or HBM and DRAM (page)."""
    engine = _engine(job, 256 if job["mode"] == "stock" else 32, 8)
    rows = []
    for batch, length in DECODE:
        speeds = []
        for repeat in range(REPEATS):
            prompts = [random_prompt(length, 7 * repeat + i) for i in range(batch)]
            outputs = engine.ask_all(prompts, DECODE_TOKENS)
            begin = max(o.metrics.first_token_ts for o in outputs)
            end = max(o.metrics.last_token_ts for o in outputs)
            speeds.append(batch * (DECODE_TOKENS - 1) / (end - begin))
        rows.append(
            {
                "mode": job["mode"],
                "batch": batch,
                "tokens": length,
                "tokens_per_s": statistics.median(speeds),
            }
        )
    return rows


def measure_prefill(job: Job) -> Rows:
    """TTFT of prompts that are stored, whose blocks are copied to DRAM at the end of each step, and
    layer by layer beside it; by turns. Processor time is that of the whole process."""
    engine = _engine(job, 160, 1)
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
        decode = [
            row
            for mode in ("stock", "page")
            for row in run_measurement(
                measure_decode, {**job, "mode": mode, "devices": [f"{scratch}/0/decode"]}
            )
        ]
    columns = ("mode", "tokens", "TTFT computed s", "TTFT hit s", "ratio")
    print(markdown(columns, map(_hit_cells, hits)))
    columns = ("batch", "context", "stock tokens/s", "page tokens/s", "page / stock")
    half = len(decode) // 2
    print("\n" + markdown(columns, map(_decode_cells, decode[:half], decode[half:])))
    ways = ("TTFT, copied at the end", "by layers", "ratio", "processor time")
    print("\n" + markdown(("mode", "tokens", *ways), map(_prefill_cells, prefill)))
    write_json(arguments.json, {"hits": hits, "decode": decode, "prefill": prefill})


def _hit_cells(row: dict[str, Any]) -> list[str]:
    computed, hit = row["ttft_computed"], row["ttft_hit"]
    cells = [f"{computed:.3f}", f"{hit:.3f}", f"{computed / hit:.1f}"]
    return [row["mode"], str(row["tokens"]), *cells]


def _decode_cells(stock: dict[str, Any], page: dict[str, Any]) -> list[str]:
    ours, theirs = page["tokens_per_s"], stock["tokens_per_s"]
    cells = [f"{theirs:.1f}", f"{ours:.1f}", f"{ours / theirs:.2f}"]
    return [str(stock["batch"]), str(stock["tokens"]), *cells]


def _prefill_cells(row: dict[str, Any]) -> list[str]:
    low, high = row["ttft_ratios"]
    cells = [f"{row['ttft_end']:.4f}", f"{row['ttft_layers']:.4f}"]
    cells += [f"{row['ttft_ratio']:.3f} ({low:.3f} to {high:.3f})", f"{row['cpu_ratio']:.3f}"]
    return [row["mode"], str(row["tokens"]), *cells]


if __name__ == "__main__":
    main()
