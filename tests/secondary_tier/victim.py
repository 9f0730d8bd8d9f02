"""An engine that stores chunks for ever and is killed; run by ``test_kills.py``.

Its argument is one JSON object. Lines that it says:

- ``V [...]``: numbers of chunks that a restart found, each read and compared
- ``D [...]``: numbers of chunks whose job has ended well
- ``E``: it ended by itself
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.tiering.base import JobResult

from tests.secondary_tier.rig import Engine, key_of

AT_ONCE = 6


def say(kind: str, what: object = "") -> None:
    # One system call: a kill loses none of it.
    os.write(1, f"{kind} {what}\n".encode())


class Watched:
    """The tier's results on their way to vLLM: tells the chunks of jobs that have ended well."""

    def __init__(self, engine: Engine):
        self.chunks: dict[int, list[int]] = {}
        self._take, self._submit = engine.tier.get_finished_jobs, engine.tier.submit_store
        tier: Any = engine.tier
        tier.get_finished_jobs, tier.submit_store = self.take, self.submit
        self.numbers: list[int] = []

    def submit(self, job: Any) -> None:  # noqa: ANN401 - of vLLM's
        self.chunks[job.job_id] = self.numbers
        self._submit(job)

    def take(self) -> list[JobResult]:
        results = list(self._take())
        for result in results:
            numbers = self.chunks.pop(result.job_id, None)
            if numbers is not None and result.success:
                say("D", json.dumps(numbers))
        return results


def main() -> None:
    task: dict[str, Any] = json.loads(sys.argv[1])
    settings = pickle.loads(Path(task["settings"]).read_bytes())
    devices = [Path(path) for path in task["devices"]]
    # The pool's file lies in memory until somebody removes it: it has a name that others know.
    more = task.get("options", {})
    engine = Engine(settings, devices, config={"engine_id": task["engine_id"]}, **more)
    candidates = task["candidates"]
    there = engine.stored([key_of(number) for number in candidates])
    found = [candidates[position] for position in sorted(there)]
    assert engine.recovered(found) == found
    engine.empty_pool()
    say("V", json.dumps(found))
    watched, number = Watched(engine), int(task["first"])
    while task["stores"]:
        context = engine.begin()
        watched.numbers = list(range(number, number + AT_ONCE))
        engine.store([key_of(n) for n in watched.numbers], context)
        engine.step()
        engine.end(context)
        number += AT_ONCE
        time.sleep(task.get("pause_s", 0.0))
    engine.close()
    say("E")


if __name__ == "__main__":
    main()
