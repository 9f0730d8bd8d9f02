"""A node that misbehaves, in place of ``ssdkv``.

How, is in the environment, ``BEHAVIOUR``: ``stubborn`` never listens and ignores SIGTERM, ``mute``
never listens, ``doomed`` ends at once.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def run() -> None:
    """Be such a node until a signal."""
    behaviour = os.environ["BEHAVIOUR"]

    def end(_signal: int, _frame: FrameType | None) -> None:
        if behaviour != "stubborn":
            sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    print("node: begins", flush=True)
    if behaviour == "doomed":
        sys.exit("node: no drive")
    while True:
        signal.pause()


if __name__ == "__main__":
    assert sys.argv[1:4] == ["node", "run", "--config"]
    run()
