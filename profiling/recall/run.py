"""One engine that answers batches of recall questions, in a process of its own, and its figures.

Its events: ``batch`` after each batch, ``result`` at the end.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Final

from vllm_ssdkv.profiling.python_time import PythonTime, engine_borders
from vllm_ssdkv.profiling.recall import recall
from vllm_ssdkv.profiling.recall.recall import DTYPE
from vllm_ssdkv.profiling.rig.child_process import Tell, serve
from vllm_ssdkv.profiling.rig.engine import ONE_PROCESS, Engine, Request, worker_metrics
from vllm_ssdkv.profiling.rig.page_engine import PageEngine

if TYPE_CHECKING:
    from vllm_ssdkv.connector.worker.worker import SSDKVWorker
    from vllm_ssdkv.profiling.recall.device_time import DeviceTime

BLOCK_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Batch:
    """Questions that are asked at once: ``count`` of each task, of ``context`` tokens.

    Attributes:
        tokens: Of each answer; None: as many as the right one has.
        stored: The prompts are asked once before, for one token each, so that the store has them
            and all answers are decoded side by side.
    """

    context: int
    count: int
    tasks: tuple[recall.Task, ...] = recall.TASKS
    tokens: int | None = None
    stored: bool = False

    def questions(self) -> list[recall.Question]:
        """The same for every selector. A context that is too short for a question is its end."""
        length = max(self.context, recall.MIN_CONTEXT)
        whole = [recall.ask(task, length, i) for task in self.tasks for i in range(self.count)]
        return [replace(question, prompt=question.prompt[-self.context :]) for question in whole]


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
        profile: Whether Python's own time while decoding is told: its share in the first half of
            the steps, and function by function in the others, at the price of a slower Python.
        longest: Contexts that the engine must be able to serve, beside those of ``batches``.
        drafts: Tokens that n-grams draft in a step; 0: there is no speculative decoding.
        compare_every: Attention is compared with exact attention in every so manieth step in which
            tokens are decoded; 0: never.
        block_tokens: Of vLLM's blocks.
        slow_prompts: Whether drives are throttled while prompts are stored, too: a prompt of page
            mode reads all of its chunks again for each of them.
        deadline: Option io.deadline; None: its default.
    """

    stores: tuple[str, ...]
    selector: str
    batches: tuple[Batch, ...]
    window: int
    dram_bytes: int
    capacity: int
    sparse: dict[str, object] = field(default_factory=dict)
    throttle: tuple[dict[str, object], ...] = ()
    profile: bool = False
    longest: int = 0
    drafts: int = 0
    compare_every: int = 0
    block_tokens: int = BLOCK_TOKENS
    slow_prompts: bool = True
    deadline: float | None = None

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
        longest = (
            max(self.longest, *(batch.context for batch in self.batches)) + 8 * self.block_tokens
        )
        speculation: dict[str, object] = {}
        if self.drafts:
            ngrams = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
            method = {"method": "ngram", "num_speculative_tokens": self.drafts, **ngrams}
            speculation = {"speculative_config": method}
        return {**speculation, **self.engine().settings(longest, rows, DTYPE)}

    def engine(self) -> PageEngine:
        """The engine without its limits. All requests choose, however short."""
        return PageEngine(
            recall.MODEL_DIR,
            self.stores,
            self.capacity,
            self.dram_bytes,
            self.window,
            self.selector,
            self.sparse,
            self.block_tokens,
            self.throttle,
            self.deadline,
        )

    def options(self) -> dict[str, object]:
        """Options of this package."""
        return self.engine().options()


def run(plan: RecallRun, tell: Tell) -> None:
    """Start the engine, ask, report, stop the engine."""
    from vllm_ssdkv.attention.sparse_deviation import SparseDeviation
    from vllm_ssdkv.connector import active_worker
    from vllm_ssdkv.profiling.recall.device_time import DeviceTime
    from vllm_ssdkv.store.io.testing.throttled import ThrottledEngine

    engine = Engine(**plan.engine_settings())
    worker, deviation, device_time = active_worker.worker(), None, None
    if plan.compare_every and worker is not None:
        worker.page_mode.deviation = deviation = SparseDeviation(plan.compare_every)
    if worker is not None and isinstance(worker.store.files.engine, ThrottledEngine):
        device_time = DeviceTime(worker.store.files.engine)
        worker.page_mode.layer_ended = device_time.layer_ended
    found = []
    for number, batch in enumerate(plan.batches):
        if batch.stored:
            _store(engine, batch, number, None if plan.slow_prompts else worker)
        profiler = cProfile.Profile() if plan.profile else None
        figures = {**_ask(engine, batch, number, profiler, device_time), **_profile(profiler)}
        if deviation is not None:
            figures["deviation"] = [
                {"layer": layer, **of_layer} for layer, of_layer in deviation.take().items()
            ]
        found.append(figures)
        tell("batch", number=number)
    engine.close()
    tell("result", batches=found)


def _ask(
    engine: Engine,
    batch: Batch,
    number: int,
    profiler: cProfile.Profile | None,
    device_time: DeviceTime | None,
) -> dict[str, object]:
    """Figures of a batch. *Decoding* is what comes after every request has its first token, or if
    the prompts are stored, its second: a first step brings in what later ones find in DRAM."""
    questions, idle = batch.questions(), _counted(device_time)
    first = 2 if batch.stored else 1
    tokens: dict[int, tuple[int, ...]] = {}
    begun: tuple[float, int, dict[str, float]] | None = None
    end, steps, python = 0.0, 0, PythonTime(engine_borders)
    asked = [(q, batch.tokens or len(q.answer)) for q in questions]
    half = max(1, (min(count for _, count in asked) - first) // 2)
    for tokens in _answers(engine, str(number), asked):
        end, steps = time.monotonic(), steps + 1
        if begun is None and sum(len(t) >= first for t in tokens.values()) == len(questions):
            known = _counted(device_time)  # takes as long as a step of a small model
            begun, steps = (time.monotonic(), sum(map(len, tokens.values())), known), 0
            if profiler is not None:
                python.start()
        elif profiler is not None and begun is not None and steps == half:
            python.stop()
            profiler.enable()
    if profiler is not None:
        profiler.disable()
    if begun is None:
        raise RuntimeError("the engine lost a request")
    start, before, known = begun
    last = _counted(device_time)
    right: dict[str, int] = {}
    for i, question in enumerate(questions):
        good = tokens[i][: len(question.answer)] == question.answer
        right[question.task] = right.get(question.task, 0) + good
    return {
        "context": batch.context,
        "requests": len(questions),
        "asked": batch.count,
        "right": right,
        "decoded_tokens": sum(map(len, tokens.values())) - before,
        "decoding_s": end - start,
        "decoding_steps": steps,
        "rows_exact": last.get("sparse_rows_exact", 0.0) - idle.get("sparse_rows_exact", 0.0),
        "decoding": {name: value - known.get(name, 0) for name, value in last.items()},
        **({} if profiler is None else python.figures(half)),
    }


def _store(engine: Engine, batch: Batch, number: int, fast: SSDKVWorker | None) -> None:
    """Ask the prompts once, for one token each. ``fast``: its drives are not slowed meanwhile."""
    from vllm_ssdkv.store.io.testing.throttled import ThrottledEngine

    twin = fast.store.files.engine if fast is not None else None
    if isinstance(twin, ThrottledEngine):
        twin.change(())
    for _ in _answers(engine, f"{number}.stored", [(q, 1) for q in batch.questions()]):
        pass
    if fast is not None and isinstance(twin, ThrottledEngine):
        twin.change(fast.config.io.engine_options().throttle)


def _profile(profiler: cProfile.Profile | None) -> dict[str, object]:
    """Calls of Python functions and seconds in each, itself; the dearest first.

    What native code does is its caller's, but for functions of C that Python can tell apart.
    """
    if profiler is None:
        return {}
    table: dict[tuple[str, int, str], tuple[int, int, float, float, object]]
    table = pstats.Stats(profiler).stats  # type: ignore[attr-defined]  # not in its stub
    functions = [
        {"function": f"{file}:{name}", "calls": calls, "seconds": own}
        for (file, _, name), (_, calls, own, _, _) in table.items()
    ]
    functions.sort(key=lambda row: -float(str(row["seconds"])))
    return {"profile": functions}


def _answers(
    engine: Engine, name: str, asked: Sequence[tuple[recall.Question, int]]
) -> Iterator[dict[int, tuple[int, ...]]]:
    """After each step of the engine, the tokens so far, by question."""
    requests = [
        Request(f"{name}.{i}", question.prompt, count) for i, (question, count) in enumerate(asked)
    ]
    for tokens in engine.answers(requests):
        yield {int(name.rpartition(".")[2]): of_one for name, of_one in tokens.items()}


def _counted(device_time: DeviceTime | None) -> dict[str, float]:
    """The worker's counters, and what a throttled engine knows."""
    found = worker_metrics()
    if device_time is not None:
        found["device_seconds.busiest"] = device_time.busiest_s
        found["device_seconds.even"] = device_time.even_s
        found["layers"] = device_time.layers
    return found


def main(plan: str, tell: Tell) -> None:
    """Run a plan that is JSON."""
    os.environ.update(ONE_PROCESS)
    run(RecallRun.from_json(plan), tell)


if __name__ == "__main__":
    serve(main)
