"""A program with the commands of ``ssdkv`` that a pool uses, and a node that can misbehave.

Its name in the environment ``BEHAVIOUR``: ``stubborn`` ignores SIGTERM, ``mute`` never listens,
``doomed`` ends at once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import yaml


def run(config: str) -> None:
    """Be a node until a signal."""
    behaviour = os.environ.get("BEHAVIOUR", "")
    address = yaml.safe_load(Path(config).read_text())["listen"][-1]
    path = Path(address.removeprefix("unix://"))
    print("node: begins", flush=True)
    if behaviour == "doomed":
        sys.exit("node: no drive")

    def end(_signal: int, _frame: FrameType | None) -> None:
        if behaviour != "stubborn":
            sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    if behaviour == "mute":
        while True:
            signal.pause()
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        while True:
            listener.accept()[0].close()


def status(address: str) -> None:
    """Fail unless a node listens."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(address.removeprefix("unix://"))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["node", "run", "--config", file]:
            run(file)
        case ["node", "status", where]:
            status(where)
        case other:
            sys.exit(f"no such command: {other}")
