"""No request is answered with a fault of the server: fuzzed from the routes' own schema.

Needs the program `schemathesis`, which is not among the locked packages (`pipx install
schemathesis`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from tests.batch.served import DEADLINE_S, KEYS, serving
from vllm_ssdkv.config_batch import BatchConfig
from vllm_ssdkv.sizes import MIB

EXAMPLES = int(os.environ.get("SSDKV_SOAK_ROUNDS", "20")) * 10
PROGRAM = shutil.which("schemathesis")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(PROGRAM is None, reason="schemathesis is not installed"),
]


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
            server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
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


def test_no_request_is_a_fault_of_the_server(url: str, tmp_path: Path) -> None:
    assert PROGRAM is not None
    ended = subprocess.run(
        [
            PROGRAM,
            "run",
            f"{url}/openapi.json",
            "--checks",
            "not_a_server_error",
            "--header",
            f"Authorization: Bearer {KEYS[0]}",
            "--max-examples",
            str(EXAMPLES),
            "--no-color",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=7000,
        check=False,
    )
    report = ended.stdout[-6000:] + ended.stderr[-2000:]
    assert ended.returncode == 0, report
    assert "Selected: 9/9" in report, report
    request = urllib.request.Request(
        f"{url}/v1/files?limit=1", headers={"Authorization": f"Bearer {KEYS[0]}"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        assert answer.status == 200, "it still works"
