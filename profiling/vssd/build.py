"""Compile the file system of the virtual SSDs when it is first needed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.host import default_root

SOURCES = Path(__file__).parent / "src"
_FLAGS = ("-std=c++20", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror")
_TIMEOUT_S = 300.0


def _call(command: list[str], cure: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{command[0]}: {error}; {cure}") from error
    if done.returncode:
        raise BenchError(f"{command[0]} failed; {cure}\n{done.stderr[-2000:]}")
    return done.stdout


def build(cache: Path | None = None) -> Path:
    """Path of the program, made from the sources unless it is there already. Takes seconds.

    Args:
        cache: Folder for it; by default beside the stores of users who name no device.

    Raises:
        BenchError: there is no C++20 compiler, or no libfuse 3.
    """
    files = sorted(SOURCES.glob("*.[ch]pp"))
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]
    folder = default_root().parent / "ssdkv-vssd" if cache is None else cache
    program = folder / f"vssd-{digest}"
    if program.exists():
        return program
    flags = _call(
        ["pkg-config", "--cflags", "--libs", "fuse3"],
        "install pkg-config and libfuse 3 (Debian and Ubuntu: pkg-config libfuse3-dev fuse3)",
    ).split()
    compiler = os.environ.get("CXX") or shutil.which("c++") or "c++"
    folder.mkdir(parents=True, exist_ok=True)
    units = [str(file) for file in files if file.suffix == ".cpp"]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "vssd"
        command = [compiler, *_FLAGS, *units, "-o", str(made), *flags, "-pthread"]
        _call(command, "install a C++20 compiler (Debian and Ubuntu: g++)")
        made.replace(program)
    return program
