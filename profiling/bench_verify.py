"""Cost of verified hits: time to the first token of one, and of a hit that is not verified.

Run as ``python -P -m vllm_ssdkv.profiling.bench_verify``. One engine in one process asks the same
stored prompt by turns: with the code of verification taken out, with ``verify_hits: 0``, and with
``verify_hits: 1``. So whatever else the machine does meets all three. A ratio is the median of
those within a turn, with the range in which the median lies in 95 of 100 runs. DRAM is larger than
the hits: they are read from it, which is the shortest time that verification can be a share of. And
DRAM has room for one block only in the second half of the table: they come from the drive.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from pathlib import Path
from typing import Any

from vllm_ssdkv.profiling.rig.child_process import Job, Rows, run_measurement
from vllm_ssdkv.profiling.rig.engine import BLOCK, MODEL, ONE_THREAD, Engine, random_prompt
from vllm_ssdkv.profiling.rig.measure import (
    bench_parser,
    by_turns,
    markdown,
    ratio_range,
    write_json,
)

LENGTHS = (1024, 4096, 16384)
EVERY = 256
"""The option's default."""
KINDS = ("out", "off", "verified")
TURNS = 31
DRAM = {"DRAM": "256MiB", "drive": "4MiB"}
"""Source of the hits, and the option ``dram_gib`` that makes it so."""


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


class _Asker:
    """Asks for one prompt at a time, with nothing of it in HBM."""

    def __init__(self, job: Job):
        options = {
            "devices": [job["device"]],
            "dram_gib": job["dram"],
            "load": "always",
            "verify_hits": 1,
        }
        self._engine = Engine.small(
            job["model"],
            options,
            max_model_len=max(LENGTHS) + BLOCK,
            max_num_batched_tokens=1024,
            max_num_seqs=1,
            kv_cache_memory_bytes=128 << 20,
        )
        self._verifier = self._engine.scheduler.connector.scheduler.verifier

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
        output = self._engine.ask(random_prompt(length + 1, length))
        self._engine.forget(0.02)
        return output.metrics.first_token_latency, output.num_cached_tokens or 0

    def timed(self, kind: str, length: int) -> float:
        """Seconds to the first token of a hit that is handled as ``kind`` says."""
        self.switch(kind)
        seconds, found = self.ask(length)
        if found != length - BLOCK * (kind == "verified"):
            raise RuntimeError(f"{found} of {length} tokens were found, {kind}")
        return seconds


def measure_hits(job: Job) -> Rows:
    """One row per length."""
    asker = _Asker(job)
    rows = []
    for length in LENGTHS:
        asker.switch("off")
        for _ in range(3):
            asker.ask(length)
        turns = {kind: functools.partial(asker.timed, kind, length) for kind in KINDS}
        seconds = by_turns(turns, job["turns"], rotate=True)
        rows.append({"source": job["source"], "tokens": length, **summary(seconds)})
    return rows


def summary(seconds: dict[str, list[float]]) -> dict[str, object]:
    """Ratios within turns, of seconds by kind."""
    out, off, verified = (seconds[kind] for kind in KINDS)
    more = [v - o for v, o in zip(verified, off, strict=True)]
    return {
        "hit_s": statistics.median(off),
        "off_to_out": ratio_range(off, out),
        "verified_to_off": ratio_range(verified, off),
        "more_s": statistics.median(more),
        "share_in_every": statistics.median(more) / statistics.median(off) / EVERY,
    }


def main() -> None:
    """Measure, print a table, write JSON if asked."""
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default=str(MODEL), help="model directory")
    parser.add_argument("--dir", default=".", help="directory in which a device directory is made")
    parser.add_argument("--turns", type=int, default=TURNS, help="hits of each kind and length")
    arguments = parser.parse_args()
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
            rows += run_measurement(measure_hits, job, ONE_THREAD)
    columns = ("hits from", "tokens", "ms", "off / without the code", "verified / off")
    print(markdown((*columns, "more ms", f"in {EVERY}"), map(_cells, rows)))
    write_json(arguments.json, rows)


def _cells(row: dict[str, Any]) -> list[str]:
    off, verified = (
        f"{middle:.3f} ({low:.3f} to {high:.3f})"
        for middle, low, high in (row["off_to_out"], row["verified_to_off"])
    )
    sizes = [row["source"], f"{row['tokens']:,}", f"{row['hit_s'] * 1e3:.1f}"]
    return [*sizes, off, verified, f"{row['more_s'] * 1e3:.2f}", f"{row['share_in_every']:.3%}"]


if __name__ == "__main__":
    main()
