"""Runs the batches of a directory, with answers that take a moment, until none is left or it is
killed. What is sent is logged before it is answered.

A prompt that is ``POISON`` kills it. Without one, whoever kills it is a request of a user, which is
under way all the time. Its clock is fast.

Usage: victim.py DIRECTORY LOG REQUESTS [POISON]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from vllm_ssdkv.base.sizes import DAY_S
from vllm_ssdkv.batch.answers import Reply, Usage
from vllm_ssdkv.batch.files import KEPT_S
from vllm_ssdkv.batch.jobs import NewBatch
from vllm_ssdkv.batch.prometheus import BatchCounters
from vllm_ssdkv.batch.request import COMPLETIONS, ENDPOINTS
from vllm_ssdkv.batch.runner import Runner
from vllm_ssdkv.batch.service import Service, open_service
from vllm_ssdkv.batch.users import Users
from vllm_ssdkv.config.batch import BatchConfig

OWNER = b"owner"
FAST = 1000


class Model:
    def __init__(self, log: Path, poison: str) -> None:
        self._log = log.open("ab", buffering=0)
        self._poison = poison

    async def answer(self, endpoint: str, body: dict[str, Any]) -> Reply:
        self._log.write(f"{body['prompt']}\n".encode())
        await asyncio.sleep(0.001)
        if body["prompt"] == self._poison:
            os.kill(os.getpid(), signal.SIGKILL)
        return Reply(200, json.dumps({"echo": body["prompt"]}).encode(), Usage(3, 1, 2))


def begin(service: Service, count: int) -> None:
    with service.files.upload() as upload:
        for i in range(count):
            line = {
                "custom_id": f"id-{i}",
                "method": "POST",
                "url": COMPLETIONS,
                "body": {"prompt": str(i)},
            }
            service.files.append(upload, json.dumps(line).encode() + b"\n")
        file = service.files.keep(upload, OWNER, "in.jsonl", "batch", KEPT_S)
    service.jobs.create(OWNER, NewBatch(COMPLETIONS, file["id"], "30d", 30 * DAY_S, None))


async def run(directory: Path, log: Path, count: int, poison: str) -> None:
    service = open_service(directory, BatchConfig(), frozenset(ENDPOINTS))
    if not service.jobs.page(OWNER, after=None, limit=1)[0]:
        begin(service, count)
    counters = BatchCounters(CollectorRegistry())
    began = time.time()
    runner = Runner(
        service,
        Model(log, poison),
        4,
        counters,
        clock=lambda: began + FAST * (time.time() - began),
    )
    users = Users(directory, None, counters)
    with contextlib.nullcontext() if poison else users.one():
        task = asyncio.create_task(runner.run())
        while service.jobs.unended():
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), "".join(sys.argv[4:])))
