"""A real node in a process of its own, for engines of tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0


class NodeProcess:
    """``ssdkv node run`` at an address, which a test kills, stops and starts again."""

    def __init__(
        self,
        address: str,
        devices: Sequence[object],
        log: Path,
        dram: str = "128MiB",
        **options: object,
    ):
        self.address, self.log = address, log
        self.options = {
            "listen": [address],
            "devices": list(devices),
            "dram_gib": dram,
            "lease": 3.0,
            **options,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the node, and wait until it answers."""
        file = self.log.with_suffix(".yaml")
        file.write_text(json.dumps(self.options))
        command = [sys.executable, "-P", "-m", "vllm_ssdkv.cli.main", "node", "run"]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, "--config", str(file)], stdout=output, stderr=output
            )
        until(lambda: self.status() is not None, self)

    def status(self) -> dict[str, Any] | None:
        """What ``ssdkv node status`` says; None: the node does not answer."""
        assert self._process is None or self._process.poll() is None, self.log.read_text()[-4000:]
        command = [sys.executable, "-P", "-m", "vllm_ssdkv.cli.main", "node", "status"]
        done = subprocess.run(
            [*command, self.address, "--json"], capture_output=True, timeout=60, check=False
        )
        return json.loads(done.stdout) if done.returncode == 0 else None

    def kill(self) -> None:
        """End it as a crash does."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """End it in order; its exit status."""
        return self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> int:
        process, self._process = self._process, None
        assert process is not None
        process.send_signal(how)
        return process.wait(PATIENCE_S)

    def freeze(self) -> None:
        """Stop it where it is."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it, if it runs."""
        if self._process is not None:
            self.thaw()
            self.kill()


def until(true: Callable[[], object], node: NodeProcess) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, node.log.read_text()[-4000:]
        time.sleep(0.1)
