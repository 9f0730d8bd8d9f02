"""A wall clock of a process that jumps, as those of hosts do that are set."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final

NO_CLOCK: Final = "" if shutil.which("c++") else "a clock that jumps needs a C++ compiler"
"""Why there is none."""


class JumpingClock:
    """Wall clock of the processes that are started with :attr:`environment`.

    Attributes:
        environment: Variables that a process is to have.
    """

    def __init__(self, folder: Path):
        """``folder``: gets a library and a file. Blocks on the compiler."""
        self._file = folder / "clock"
        self.set(0)
        self.environment: dict[str, str] = {}
        if NO_CLOCK:
            return
        library = folder / "clock.so"
        source = Path(__file__).with_suffix(".cpp")
        command = ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True, timeout=120)
        self.environment = {"LD_PRELOAD": str(library), "SSDKV_TEST_CLOCK": str(self._file)}

    def set(self, seconds: int) -> None:
        """Have the clock go fast by so many seconds from now on."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("=q", seconds))
