"""A node as users run it: a process of its own, with a log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from vllm_ssdkv.base.errors import NodeError
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.cli.node.status import ask_status
from vllm_ssdkv.node.protocol.credentials import Credentials
from vllm_ssdkv.node.protocol.messages import Status

STARTED_S = 120.0


class NodeProcess:
    """One node, which is started, killed and started again on the same directories.

    Attributes:
        address: Its first address.
    """

    def __init__(
        self,
        root: Path,
        keys: Path | None = None,
        environment: Mapping[str, str] | None = None,
        **options: object,
    ):
        """``root``: a directory of its own; ``keys``: with those of both sides; ``environment``:
        variables that it has beside those of this process."""
        self.root = root
        self._environment = {**os.environ, **(environment or {})}
        self.address = f"unix://{root}/node.sock"
        given: dict[str, object] = {
            "listen": [self.address],
            "devices": [{"path": str(root / "ssd"), "capacity": "192MiB"}],
            "dram_gib": "64MiB",
            "store_share": 0.5,
            **options,
        }
        self._credentials = None
        if keys is not None:
            given["keys"] = str(keys)
            self._credentials = Credentials.load(keys, "engine")
        listen = given["listen"]
        self.address = str(listen[0]) if isinstance(listen, list) else self.address
        (root / "ssd").mkdir(exist_ok=True)
        self.config = root / "node.json"
        self.config.write_text(json.dumps(given))
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> NodeProcess:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-P", "-m", "vllm_ssdkv.cli.main", "node", "run"]
        with (self.root / "node.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--config", str(self.config)],
                env=self._environment,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + STARTED_S
        while True:
            with contextlib.suppress(NodeError):
                self.status()
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the node does not start:\n{self.log()}")
            time.sleep(0.1)

    def status(self) -> Status:
        """State of the node."""
        return ask_status(Address.parse(self.address), self._credentials, 5.0)

    def log(self) -> str:
        """All of its log."""
        return (self.root / "node.log").read_text()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def end(self) -> int:
        """Have it drain and end; its exit code."""
        assert self.process is not None
        self.signal(signal.SIGTERM)
        code = self.process.wait(60)
        self.process = None
        return code
