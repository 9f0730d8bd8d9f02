"""One engine that answers batches of recall questions, in a process of its own, and its figures.

``python -P -m vllm_ssdkv.cli.recall_run RUN FD`` writes one JSON object per line to the descriptor
FD, each with its ``event``: ``batch`` after each batch, ``result`` at the end. Everything else goes
to standard output and error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TextIO

from vllm_ssdkv.cli import recall
from vllm_ssdkv.cli.demo_plan import DTYPE, bytes_per_token
from vllm_ssdkv.metrics import PREFIX
from vllm_ssdkv.sizes import MIB

BLOCK_TOKENS: Final = 16
CHUNK: Final = 512
STAGING: Final = 4 * MIB
SHUTDOWN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Questions that are asked at once: ``count`` of each task, of ``context`` tokens.

    ``tokens`` of each answer; None: as many as the right one has.
    """

    context: int
    count: int
    tasks: tuple[recall.Task, ...] = recall.TASKS
    tokens: int | None = None

    def questions(self) -> list[recall.Question]:
        """The same for every selector."""
        return [recall.ask(task, self.context, i) for task in self.tasks for i in range(self.count)]


@dataclass(frozen=True, slots=True)
class RecallRun:
    """One engine's life.

    Attributes:
        stores: One directory per device.
        selector, sparse: Options.
        batches: Asked one after the other.
        window: Option hbm_window_tokens.
        dram_bytes: Option dram_gib.
        capacity: Bytes of each device.
        throttle: Option io.throttle.
    """

    stores: tuple[str, ...]
    selector: str
    batches: tuple[Batch, ...]
    window: int
    dram_bytes: int
    capacity: int
    sparse: dict[str, object] = field(default_factory=dict)
    throttle: tuple[dict[str, object], ...] = ()

    @classmethod
    def from_json(cls, text: str) -> RecallRun:
        """The run that :meth:`to_json` wrote."""
        fields = json.loads(text)
        batches = tuple(Batch(**{**b, "tasks": tuple(b["tasks"])}) for b in fields["batches"])
        lists = {name: tuple(fields[name]) for name in ("stores", "throttle")}
        return cls(**{**fields, **lists, "batches": batches})

    def to_json(self) -> str:
        """As text, for the command line."""
        return json.dumps(asdict(self))

    def engine_settings(self) -> dict[str, object]:
        """Keyword arguments of ``vllm.LLM``."""
        rows = max(len(batch.tasks) * batch.count for batch in self.batches)
        longest = max(batch.context for batch in self.batches) + 8 * BLOCK_TOKENS
        held = self.window + CHUNK + 2 * BLOCK_TOKENS
        return {
            "model": str(recall.MODEL_DIR),
            "dtype": DTYPE,
            "max_model_len": longest,
            "block_size": BLOCK_TOKENS,
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": rows,
            "kv_cache_memory_bytes": rows * held * bytes_per_token(),
            "distributed_executor_backend": "uni",
            "enforce_eager": True,
            "disable_log_stats": False,
            "kv_transfer_config": {
                "kv_connector": "SSDKVConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": self.options(),
            },
        }

    def options(self) -> dict[str, object]:
        """Options of this package. All requests choose, however short."""
        return {
            "mode": "page",
            "devices": [
                {"path": path, "capacity": self.capacity, "weight": 1} for path in self.stores
            ],
            "dram_gib": f"{self.dram_bytes}B",
            "hbm_window_tokens": self.window,
            "selector": self.selector,
            "sparse": {"exact_below": 0, **self.sparse},
            "io": {"staging": STAGING, "throttle": list(self.throttle)},
        }


def run(plan: RecallRun, events: TextIO) -> None:
    """Start the engine, ask, report, stop the engine."""
    from vllm import LLM

    llm: Any = LLM(**plan.engine_settings())
    found = []
    for number, batch in enumerate(plan.batches):
        found.append(_ask(llm, batch, number))
        _tell(events, event="batch", number=number)
    llm.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_S)
    _tell(events, event="result", batches=found)


def _ask(llm: Any, batch: Batch, number: int) -> dict[str, object]:  # noqa: ANN401 - vLLM's LLM
    """Figures of a batch. *Decoding* is what comes after every request has its first token."""
    from vllm import SamplingParams

    engine, questions = llm.llm_engine, batch.questions()
    for i, question in enumerate(questions):
        count = batch.tokens or len(question.answer)
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        prompt = {"prompt_token_ids": list(question.prompt)}
        engine.add_request(f"{number}.{i}", prompt, sampling)
    tokens: dict[str, tuple[int, ...]] = {}
    begun: tuple[float, int, dict[str, float]] | None = None
    end, last = 0.0, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = tuple(output.outputs[0].token_ids)
        end, last = time.monotonic(), _metrics()
        if begun is None and len(tokens) == len(questions):
            begun = (end, sum(map(len, tokens.values())), last)
    if begun is None:
        raise RuntimeError("the engine lost a request")
    start, before, first = begun
    right: dict[str, int] = {}
    for i, question in enumerate(questions):
        good = tokens[f"{number}.{i}"][: len(question.answer)] == question.answer
        right[question.task] = right.get(question.task, 0) + good
    return {
        "context": batch.context,
        "requests": len(questions),
        "asked": batch.count,
        "right": right,
        "decoded_tokens": sum(map(len, tokens.values())) - before,
        "decoding_s": end - start,
        "decoding": {name: value - first.get(name, 0) for name, value in last.items()},
    }


def _metrics() -> dict[str, float]:
    """Our counters by name and labels, devices added up; vLLM's own way there rounds them."""
    from prometheus_client import REGISTRY

    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and sample.name.endswith("_total"):
                name = sample.name.removeprefix(PREFIX).removesuffix("_total")
                label = sample.labels.get("tier") or sample.labels.get("part")
                key = f"{name}.{label}" if label else name
                found[key] = found.get(key, 0.0) + sample.value
    return found


def _tell(events: TextIO, **fields: object) -> None:
    events.write(json.dumps(fields) + "\n")
    events.flush()


def main() -> None:
    """Entry point of the process."""
    plan, descriptor = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a step ends when step() returns
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as events:
        run(RecallRun.from_json(plan), events)


if __name__ == "__main__":
    main()
