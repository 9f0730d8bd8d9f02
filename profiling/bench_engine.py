"""Real vLLM with and without this package: time to first token on a hit, and decode speed.

Run as ``python -P -m vllm_ssdkv.profiling.bench_engine``. Every figure is a ratio of two
measurements in one run of one machine; medians over repeats. Each engine is a process of its own.
Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_ssdkv.profiling.measuring_process import (
    MODEL,
    add_hidden_options,
    measured,
    run_measurement,
)

LENGTHS = (2048, 8192, 16384, 32768)
DECODE = ((1, 2048), (1, 8192), (8, 2048))
"""Batch and context of each decode measurement."""
DECODE_TOKENS = 64
REPEATS = 3
PREFILL = 2048
"""Tokens of a prompt that is stored."""
PREFILL_REPEATS = 21
PREFILL_REST_S = 0.3
"""After a prompt, for the drive to be done with it."""
IN_ONE_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""The worker can be reached, and with two cores or more one is free for copies."""


def _options(mode: str, devices: list[str], dram: str) -> dict[str, Any]:
    return {
        "kv_connector": "SSDKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"mode": mode, "devices": devices, "dram_gib": dram},
    }


def _prompt(length: int, seed: int) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {"prompt_token_ids": [rng.randrange(32, 800) for _ in range(length)]}


def _engine(mode: str, devices: list[str], dram: str, **options: Any) -> Any:  # noqa: ANN401 - vllm.LLM; vLLM is imported in the measuring process only
    from vllm import LLM

    transfer = {} if mode == "stock" else {"kv_transfer_config": _options(mode, devices, dram)}
    return LLM(
        str(options.pop("model")),
        max_model_len=max(LENGTHS) + 256,
        enforce_eager=True,
        block_size=32,
        max_num_batched_tokens=1024,
        enable_prefix_caching=mode == "reuse",
        disable_log_stats=False,
        **transfer,
        **options,
    )


def measure_hits(job: dict[str, Any]) -> list[dict[str, Any]]:
    """TTFT of computing a prompt, and of finding it in the store, alternating by length."""
    from vllm import SamplingParams

    llm = _engine(
        job["mode"],
        job["devices"],
        "2GiB",
        model=job["model"],
        max_num_seqs=1,
        kv_cache_memory_bytes=(160 if job["mode"] == "reuse" else 8) << 20,
    )
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    llm.generate([_prompt(512, 0)], params, use_tqdm=False)
    rows = []
    for length in LENGTHS:
        computed, found = [], []
        for repeat in range(REPEATS):
            prompt = _prompt(length, 1000 * length + repeat)
            first = llm.generate([prompt], params, use_tqdm=False)[0]
            if not llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not reset its prefix cache")
            second = llm.generate([prompt], params, use_tqdm=False)[0]
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


def measure_decode(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Decode tokens per second, all of the context in HBM (stock) or HBM and DRAM (page)."""
    from vllm import SamplingParams

    llm = _engine(
        job["mode"],
        job["devices"],
        "2GiB",
        model=job["model"],
        max_num_seqs=8,
        kv_cache_memory_bytes=(256 if job["mode"] == "stock" else 32) << 20,
    )
    params = SamplingParams(max_tokens=DECODE_TOKENS, temperature=0, ignore_eos=True)
    llm.generate([_prompt(512, 0)], params, use_tqdm=False)
    rows = []
    for batch, length in DECODE:
        speeds = []
        for repeat in range(REPEATS):
            prompts = [_prompt(length, 7 * repeat + i) for i in range(batch)]
            outputs = llm.generate(prompts, params, use_tqdm=False)
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


def measure_prefill(job: dict[str, Any]) -> list[dict[str, Any]]:
    """TTFT of prompts that are stored, whose blocks are copied to DRAM at the end of each step, and
    layer by layer beside it; by turns. Processor time is that of the whole process."""
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    llm = _engine(
        job["mode"],
        job["devices"],
        "2GiB",
        model=job["model"],
        max_num_seqs=1,
        kv_cache_memory_bytes=160 << 20,
    )
    layers = get_kv_transfer_group().worker.layers
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    llm.generate([_prompt(PREFILL, 0)], params, use_tqdm=False)
    seconds: dict[str, list[tuple[float, float]]] = {"end": [], "layers": []}
    for repeat in range(PREFILL_REPEATS):
        for way in sorted(seconds, reverse=bool(repeat % 2)):
            layers.least_bytes = 1 if way == "layers" else None
            begun = time.process_time()
            prompt = _prompt(PREFILL, 1 + 2 * repeat + (way == "layers"))
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            seconds[way].append((output.metrics.first_token_latency, time.process_time() - begun))
            time.sleep(PREFILL_REST_S)
    row: dict[str, Any] = {"mode": job["mode"], "tokens": PREFILL}
    for number, name in enumerate(("ttft", "cpu")):
        end, beside = ([pair[number] for pair in seconds[way]] for way in ("end", "layers"))
        ratios = [b / a for a, b in zip(end, beside, strict=True)]
        row |= {f"{name}_end": statistics.median(end), f"{name}_layers": statistics.median(beside)}
        row[f"{name}_ratio"] = statistics.median(ratios)
        row[f"{name}_ratios"] = min(ratios), max(ratios)
    row["most_waiting"] = layers.most_waiting
    return [row]


MEASUREMENTS = {"hits": measure_hits, "decode": measure_decode, "prefill": measure_prefill}


def main() -> None:
    """Measure everything, print two tables, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=str(MODEL), help="a model directory")
    parser.add_argument("--dir", action="append", help="device directory (repeat for several)")
    parser.add_argument("--json", help="file for the figures")
    add_hidden_options(parser, MEASUREMENTS)
    arguments = parser.parse_args()
    if measured(arguments, MEASUREMENTS):
        return
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
            hits += run_measurement(
                "bench_engine", "hits", {**job, "mode": mode, "devices": devices}
            )
        prefill = [
            row
            for mode in ("reuse", "page")
            for row in run_measurement(
                "bench_engine",
                "prefill",
                {**job, "mode": mode, "devices": [f"{scratch}/0/prefill-{mode}"]},
                IN_ONE_PROCESS,
            )
        ]
        decode = [
            row
            for mode in ("stock", "page")
            for row in run_measurement(
                "bench_engine", "decode", {**job, "mode": mode, "devices": [f"{scratch}/0/decode"]}
            )
        ]
    print("| mode | tokens | TTFT computed s | TTFT hit s | ratio |\n|---|---|---|---|---|")
    for row in hits:
        ratio = row["ttft_computed"] / row["ttft_hit"]
        print(
            f"| {row['mode']} | {row['tokens']} | {row['ttft_computed']:.3f} "
            f"| {row['ttft_hit']:.3f} | {ratio:.1f} |"
        )
    print("\n| batch | context | stock tokens/s | page tokens/s | page / stock |")
    print("|---|---|---|---|---|")
    half = len(decode) // 2
    for stock, page in zip(decode[:half], decode[half:], strict=True):
        print(
            f"| {stock['batch']} | {stock['tokens']} | {stock['tokens_per_s']:.1f} "
            f"| {page['tokens_per_s']:.1f} | {page['tokens_per_s'] / stock['tokens_per_s']:.2f} |"
        )
    _print_prefill(prefill)
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"hits": hits, "decode": decode, "prefill": prefill}, indent=1)
        )


def _print_prefill(rows: list[dict[str, Any]]) -> None:
    print("\n| mode | tokens | TTFT, copied at the end | by layers | ratio | processor time |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        low, high = row["ttft_ratios"]
        print(
            f"| {row['mode']} | {row['tokens']} | {row['ttft_end']:.4f} | {row['ttft_layers']:.4f} "
            f"| {row['ttft_ratio']:.3f} ({low:.3f} to {high:.3f}) | {row['cpu_ratio']:.3f} |"
        )


if __name__ == "__main__":
    main()
