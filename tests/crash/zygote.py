"""A process that has imported vLLM once and forks an engine whenever it is told to.

Run as a script by ``test_engine_kill.py``. Standard input has one JSON task per line; for each, a
child in a process group of its own starts an engine, checks the first batch, and answers batches
until it is killed or has done what it was told. What zygote and children say goes to the original
standard output, one JSON object per line; everything else goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.kit.engine import Engine

ANSWER_TOKENS = 24
BETWEEN = 4
"""Tokens, at least, that wait for their block to be full when an engine waits for its end."""
NUMBERS = ("slots_free", "slots_ready", "slots_pinned", "slots_evicted")
FAULTS = ("checksum_failures", "header_mismatches", "load_failures", "slots_dropped")


def say(**what: object) -> None:
    """One line. Those of engines that are killed are short: written whole or not at all."""
    os.write(VOICE, json.dumps(what).encode() + b"\n")


def import_all() -> None:
    """Everything a child needs, so that it starts in little time."""
    # The repository's root must not be on the path: vLLM asks for modules by names that it has.
    tests = types.ModuleType("tests")
    tests.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["tests"] = tests
    importlib.import_module("tests.kit.engine").preload()
    importlib.import_module("tests.kit.forks").end_with_parent()


def batches(task: dict[str, Any]) -> Any:  # noqa: ANN401 - an endless iterator or a list
    """Numbers of the prompts of each batch."""
    yield from task["first"]
    source = random.Random(task["seed"])
    left = task["batches"]
    while left is None or left > 0:
        yield source.sample(range(len(task["prompts"])), task["batch_size"])
        left = None if left is None else left - 1


def serve(task: dict[str, Any], engine: Engine) -> None:
    """Answer batches; every answer must be the reference's."""
    for number, batch in enumerate(batches(task)):
        say(event="asked", batch=batch)
        answers = engine.answers([task["prompts"][i] for i in batch], ANSWER_TOKENS)
        tokens = [list(a.tokens) for a in answers]
        if task["reference"] is None:
            say(event="answers", batch=batch, tokens=tokens)
            continue
        wrong = [i for i, got in zip(batch, tokens, strict=True) if got != task["reference"][i]]
        if wrong:
            raise AssertionError(f"batch {number}: prompts {wrong} were answered differently")
        named = {"tickets": "offload_tickets", "as_x": "x_cache_requests"}
        counts = {name: near(task, engine, metric) for name, metric in named.items()}
        say(event="right", cached=sum(a.cached for a in answers), **counts)


def near(task: dict[str, Any], engine: Engine, name: str) -> float:
    """A count of engines with a device near storage."""
    return engine.ssdkv(name) if "offload" in (task["ssdkv"] or {}) else 0.0


def wait_between_writes(task: dict[str, Any], engine: Engine) -> None:
    """Decode until every full block is durable and each request has some tokens more; stay so.

    Raises:
        RuntimeError: requests ended before that.
    """
    held = task["held"]
    for i in held:
        engine.add(str(i), task["prompts"][i], 3 * engine.block)
    index = engine.scheduler.connector.scheduler.index
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.step()
        running = engine.scheduler.running
        if len(running) < len(held) or min(r.num_output_tokens for r in running) < engine.block:
            continue
        behind = min(r.num_computed_tokens % engine.block for r in running)
        gauges = index.gauges()
        if behind >= BETWEEN and gauges["writing"] == 0:
            say(event="held", ready=gauges["ready"], tickets=near(task, engine, "offload_tickets"))
            signal.pause()
    raise RuntimeError("the requests ended")


def child(task: dict[str, Any]) -> None:
    from tests.kit.engine import Engine

    with Engine(Path(task["model"]), ssdkv=task["ssdkv"], **task["options"]) as engine:
        index = None if task["ssdkv"] is None else engine.scheduler.connector.scheduler.index
        found = {} if index is None else {"total": index.num_slots, **index.gauges()}
        say(event="ready", slots=found)
        serve(task, engine)
        if task["held"]:
            wait_between_writes(task, engine)
        if index is not None:
            engine.settle()
            numbers = {name: engine.ssdkv(name) for name in (*NUMBERS, *FAULTS)}
            say(event="numbers", slots_total=index.num_slots, **numbers)


def fork(task: dict[str, Any]) -> None:
    """Run one task in a child, and wait for its end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            importlib.import_module("tests.kit.forks").end_with_parent()
            os.setsid()
            say(event="started", pid=os.getpid())
            child(task)
            code = 0
        finally:  # whatever happened, this process must not run on as a second zygote
            if code:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    say(event="ended", code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    VOICE = os.dup(1)
    os.dup2(2, 1)
    import_all()
    say(event="imported")
    for line in sys.stdin:
        fork(json.loads(line))
