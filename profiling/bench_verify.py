"""Cost of verified hits: time to the first token of one, and of a hit that is not verified.

Run as ``python -P -m vllm_ssdkv.profiling.bench_verify``. One engine in one process asks the same
stored prompt by turns: with the code of verification taken out, with ``verify_hits: 0``, and with
``verify_hits: 1``. So whatever else the machine does meets all three. A ratio is the median of
those within a turn, with the range in which the median lies in 95 of 100 runs. DRAM is larger than
the hits: they are read from it, which is the shortest time that verification can be a share of. And
DRAM has room for one block only in the second half of the table: they come from the drive.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_ssdkv.profiling.bench_metrics import median_range
from vllm_ssdkv.profiling.measuring_process import (
    MODEL,
    Job,
    Rows,
    add_hidden_options,
    measured,
    run_measurement,
)

LENGTHS = (1024, 4096, 16384)
BLOCK = 32
EVERY = 256
"""The option's default."""
KINDS = ("out", "off", "verified")
TURNS = 31
DRAM = {"DRAM": "256MiB", "drive": "4MiB"}
"""Where hits come from, and the option ``dram_gib`` with which they do."""


_VERIFICATION = ("shorten", "extend", "computed", "forget")
"""Calls on a ``HitVerifier`` that every request makes."""


class _NoVerification:
    """These calls, as they would be if there were no verification."""

    def shorten(
        self, request: object, keys: object, first: int, blocks: int, usable: object
    ) -> int:
        return blocks

    def extend(self, request_id: str, load: Any) -> Any:  # noqa: ANN401 - a GroupLoad
        return load

    def computed(self, *args: object) -> None:
        return None

    def forget(self, request_id: str) -> None:
        return None


def _engine(job: Job) -> Any:  # noqa: ANN401 - vllm.LLM; vLLM is imported in the measuring process only
    from vllm import LLM

    return LLM(
        job["model"],
        max_model_len=max(LENGTHS) + BLOCK,
        enforce_eager=True,
        block_size=BLOCK,
        disable_log_stats=False,
        max_num_batched_tokens=1024,
        max_num_seqs=1,
        kv_cache_memory_bytes=128 << 20,
        kv_transfer_config={
            "kv_connector": "SSDKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "devices": [job["device"]],
                "dram_gib": job["dram"],
                "load": "always",
                "verify_hits": 1,
            },
        },
    )


class _Asker:
    """Asks for one prompt at a time, with nothing of it in HBM."""

    def __init__(self, job: Job):
        from vllm import SamplingParams

        self._llm = _engine(job)
        self._params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        core = self._llm.llm_engine.engine_core.engine_core
        self._vllm = core.scheduler
        self._verifier = core.scheduler.connector.scheduler.verifier

    def switch(self, kind: str) -> None:
        """One of :data:`KINDS`."""
        for name in _VERIFICATION:
            self._verifier.__dict__.pop(name, None)
            if kind == "out":
                setattr(self._verifier, name, getattr(_NoVerification(), name))
        self._verifier._every = int(kind == "verified")
        self._verifier._next = 0

    def ask(self, length: int) -> tuple[float, int]:
        """Seconds to the first token, and tokens that were found."""
        source = random.Random(length)
        tokens = [source.randrange(32, 800) for _ in range(length + 1)]
        (output,) = self._llm.generate([{"prompt_token_ids": tokens}], self._params, use_tqdm=False)
        while self._vllm.has_requests():
            self._llm.llm_engine.step()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")
        time.sleep(0.02)
        return output.metrics.first_token_latency, output.num_cached_tokens or 0


def measure_hits(job: Job) -> Rows:
    """One row per length."""
    asker = _Asker(job)
    rows = []
    for length in LENGTHS:
        asker.switch("off")
        for _ in range(3):
            asker.ask(length)
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(job["turns"]):
            first = turn % len(KINDS)
            for kind in (*KINDS[first:], *KINDS[:first]):
                asker.switch(kind)
                spent, found = asker.ask(length)
                if found != length - BLOCK * (kind == "verified"):
                    raise RuntimeError(f"{found} of {length} tokens were found, {kind}")
                seconds[kind].append(spent)
        rows.append({"source": job["source"], "tokens": length, **summary(seconds)})
    return rows


def summary(seconds: dict[str, list[float]]) -> dict[str, object]:
    """Ratios within turns, of seconds by kind."""
    out, off, verified = (seconds[kind] for kind in KINDS)
    more = [v - o for v, o in zip(verified, off, strict=True)]
    return {
        "hit_s": statistics.median(off),
        "off_to_out": _ratio(off, out),
        "verified_to_off": _ratio(verified, off),
        "more_s": statistics.median(more),
        "share_in_every": statistics.median(more) / statistics.median(off) / EVERY,
    }


def _ratio(these: Sequence[float], those: Sequence[float]) -> tuple[float, float, float]:
    """Median of the ratios, and its range."""
    ratios = [a / b for a, b in zip(these, those, strict=True)]
    return (statistics.median(ratios), *median_range(ratios))


MEASUREMENTS = {"hits": measure_hits}


def main() -> None:
    """Measure, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=str(MODEL), help="a model directory")
    parser.add_argument("--dir", default=".", help="where a device directory is made")
    parser.add_argument("--turns", type=int, default=TURNS, help="hits of each kind and length")
    parser.add_argument("--json", help="file for the figures")
    add_hidden_options(parser, MEASUREMENTS)
    arguments = parser.parse_args()
    if measured(arguments, MEASUREMENTS):
        return
    rows: Rows = []
    for source, dram in DRAM.items():
        with tempfile.TemporaryDirectory(dir=Path(arguments.dir).absolute()) as device:
            job = {
                "model": arguments.model,
                "device": device,
                "source": source,
                "dram": dram,
                "turns": arguments.turns,
            }
            environment = {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
            }
            rows += run_measurement("bench_verify", "hits", job, environment)
    print(
        "| hits from | tokens | ms | off / without the code | verified / off | more ms | in 256 |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        off, verified = (
            f"{middle:.3f} ({low:.3f} to {high:.3f})"
            for middle, low, high in (row["off_to_out"], row["verified_to_off"])
        )
        print(
            f"| {row['source']} | {row['tokens']:,} | {row['hit_s'] * 1e3:.1f} | {off} "
            f"| {verified} | {row['more_s'] * 1e3:.2f} | {row['share_in_every']:.3%} |"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
