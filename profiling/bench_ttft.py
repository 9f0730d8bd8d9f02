"""Real vLLM in reuse mode: time to first token of a hit against that of computing the prompt.

Run as ``ssdkv bench ttft``. On the drive as it is and on one slowed by the throttled twin; with
``load: always`` and with ``load: auto``. One run fills a store, then one engine after the other
opens it, with DRAM empty, and asks by turns a prompt that nobody knows, one that is on the drive,
and the same again from DRAM. Medians over repeats; a ratio is the median of those of two
measurements that followed each other. Each engine is a process of its own, which runs this file.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_ssdkv.profiling.measuring_process import add_hidden_options, measured, run_measurement

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
BLOCK = 32
CHUNK = 1024
WARM_UP = (512, 4096, 64, 1024)
"""Hits before the measurement, from which the engine learns."""
DRIVES = ("as it is", "throttled")
LOADS = ("always", "auto")


def _prompt(length: int, name: str) -> dict[str, list[int]]:
    """A prompt of ``length`` full blocks and one token more, so that all of it can be found."""
    source = random.Random(name)
    return {"prompt_token_ids": [source.randrange(32, 800) for _ in range(length + 1)]}


def _engine(job: dict[str, Any]) -> Any:  # noqa: ANN401 - vllm.LLM; vLLM is imported in the measuring process only
    from vllm import LLM

    options = {
        "devices": job["devices"],
        "dram_gib": "1GiB",
        "load": job["load"],
        "io": {"throttle": job["throttle"]},
    }
    transfer = {
        "kv_connector": "SSDKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }
    return LLM(
        job["model"],
        max_model_len=max(LENGTHS) + 64,
        enforce_eager=True,
        block_size=BLOCK,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=1,
        disable_log_stats=False,
        kv_cache_memory_bytes=128 << 20,
        kv_transfer_config=transfer,
    )


class _Asker:
    """Asks one prompt at a time, with nothing left to do from the one before."""

    def __init__(self, job: dict[str, Any]):
        from vllm import SamplingParams

        self._llm = _engine(job)
        self._params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)

    def ask(self, length: int, name: str) -> tuple[float, int]:
        """Seconds to the first token, and tokens that were not computed. HBM holds no prefix."""
        (output,) = self._llm.generate([_prompt(length, name)], self._params, use_tqdm=False)
        core = self._llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests():
            self._llm.llm_engine.step()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")
        return output.metrics.first_token_latency, output.num_cached_tokens or 0

    def close(self) -> None:
        """End the engine: what is written is journalled."""
        self._llm.llm_engine.engine_core.shutdown()


def fill(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Put every prompt that is to be found into the store."""
    asker = _Asker(job)
    for length in LENGTHS:
        for repeat in range(job["repeats"]):
            asker.ask(length, f"stored {length} {repeat}")
    for number, length in enumerate(WARM_UP):
        asker.ask(length, f"warm {number}")
    asker.close()
    return []


def measure(job: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per length."""
    asker = _Asker(job)
    news = f"{job['drive']} {job['load']}"
    for number, length in enumerate(WARM_UP):
        asker.ask(length, f"news {news} {number}")
        asker.ask(length, f"warm {number}")
    rows = []
    for length in LENGTHS:
        times: dict[str, list[float]] = {"computed": [], "ssd": [], "dram": []}
        loaded = {"ssd": 0, "dram": 0}
        for repeat in range(job["repeats"]):
            seconds, cached = asker.ask(length, f"news {news} {length} {repeat}")
            if cached:
                raise RuntimeError("a prompt that nobody knows was found")
            times["computed"].append(seconds)
            for tier in loaded:
                seconds, cached = asker.ask(length, f"stored {length} {repeat}")
                times[tier].append(seconds)
                loaded[tier] += cached
        rows.append(
            {
                "drive": job["drive"],
                "load": job["load"],
                "tokens": length,
                **{f"ttft_{name}": statistics.median(each) for name, each in times.items()},
                **{f"ratio_{name}": _ratio(times[name], times["computed"]) for name in loaded},
                **{f"loaded_{k}": n / length / job["repeats"] for k, n in loaded.items()},
            }
        )
    asker.close()
    return rows


def _ratio(these: list[float], those: list[float]) -> float:
    """Median of the ratios of what was measured one after the other."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


MEASUREMENTS = {"fill": fill, "measure": measure}

ONE_THREAD = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""vLLM's threads would spin against the loader's on a machine with few cores."""


def run_bench(
    model: Path,
    directories: Sequence[Path],
    slow: dict[str, object],
    repeats: int,
    tell: Callable[[str], object],
) -> list[dict[str, Any]]:
    """Measure everything: a row per drive, option ``load`` and length. Takes minutes.

    Args:
        model: A model directory.
        directories: Of the store's devices; left full.
        slow: Model of the slowed drive, an entry of the option ``io.throttle``.
        repeats: Prompts of each length.
        tell: Called with what is measured next.

    Raises:
        BenchError: an engine failed; the text has the end of its log.
    """
    job: dict[str, Any] = {
        "model": str(model),
        "devices": [{"path": str(path), "capacity": "1GiB"} for path in directories],
        "repeats": repeats,
    }
    run = functools.partial(run_measurement, "bench_ttft", environment=ONE_THREAD)
    tell("filling a store")
    run("fill", {**job, "load": "always", "throttle": []})
    rows = []
    for drive, throttle in zip(DRIVES, ([], [slow]), strict=True):
        for load in LOADS:
            tell(f"drive {drive}, load {load}")
            rows += run("measure", {**job, "drive": drive, "throttle": throttle, "load": load})
    return rows


def main() -> None:
    """One engine, as :func:`run_bench` starts it."""
    parser = argparse.ArgumentParser(description="Part of: ssdkv bench ttft")
    parser.add_argument("--json", help=argparse.SUPPRESS)
    add_hidden_options(parser, MEASUREMENTS)
    if not measured(parser.parse_args(), MEASUREMENTS):
        parser.error("run: ssdkv bench ttft")


if __name__ == "__main__":
    main()
