"""A real `vllm serve`, for tests of what its users see."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.kit.forks import Program

START_S = 420.0


@dataclass(frozen=True)
class Footprint:
    """What a server and its children hold.

    Attributes:
        memory: Bytes that belong to no file.
        descriptors: Open files.
        series: On the page of metrics.
    """

    memory: int
    descriptors: int
    threads: int
    series: int


@dataclass(frozen=True)
class Running:
    """A server. Its processes are in a session of their own."""

    url: str
    session: int

    def footprint(self) -> Footprint:
        """What it holds now."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            series = sum(not line.startswith(b"#") for line in answer.read().splitlines())
        memory = descriptors = threads = 0
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if os.getsid(int(process.name)) != self.session:
                    continue
                lines = (process / "status").read_text().splitlines()
                status = dict(line.split(":", 1) for line in lines)
                memory += int(status["RssAnon"].split()[0]) * 1024
                threads += int(status["Threads"])
                descriptors += len(os.listdir(process / "fd"))
        return Footprint(memory, descriptors, threads, series)


def free_port() -> int:
    """A TCP port of this host that nobody listens at; the kernel gives it to nobody who connects,
    either, before it is used."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    while True:
        port = secrets.choice(range(10_000, max(int(given[0]), 11_000)))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def started(
    command: list[str], variables: Mapping[str, str], cwd: Path, log: Path
) -> subprocess.Popen[bytes]:
    """A program as users start it, in a session of its own."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=variables,
            cwd=cwd,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


@contextlib.contextmanager
def server(
    command: list[str],
    variables: Mapping[str, str],
    cwd: Path,
    log: Path,
    start: Callable[..., subprocess.Popen[bytes] | Program] = started,
) -> Iterator[Running]:
    """A running `vllm serve`, on a free port. Ended, with its children, in any case."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = start([*command, "--host", "127.0.0.1", "--port", str(port)], variables, cwd, log)
    try:
        deadline = time.monotonic() + START_S
        while not healthy(url):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, (
                "the server did not start: " + log.read_text()[-4000:]
            )
            time.sleep(0.5)
        yield Running(url, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
