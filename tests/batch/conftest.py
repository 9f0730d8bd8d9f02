"""A served API: on a socket, for clients that are programs, and without the pauses it makes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from tests.batch.served import DEADLINE_S, serving
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.batch import runner, sending, validations
from vllm_ssdkv.config.batch import BatchConfig


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A served API, whose requests are answered at once, on a socket of its own."""
    started, stop = threading.Event(), threading.Event()
    found: list[str] = []

    async def serve() -> None:
        config = BatchConfig(capacity=64 * MIB, max_batches=50)
        async with serving(tmp_path / "jobs", config=config) as served:
            # The app's own lifespan would run the batches a second time.
            settings = uvicorn.Config(served.app, port=0, log_level="warning", lifespan="off")
            server = uvicorn.Server(settings)
            task = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            found.append(f"http://127.0.0.1:{port}")
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.05)
            server.should_exit = True
            await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(DEADLINE_S)
    yield found[0]
    stop.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries of failed requests, at once."""
    for module in (runner, sending, validations):
        monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(runner, "POLL_S", 0.05)
