"""Processes that begin with vLLM imported: forked from one that has done it once.

By itself each would take ten seconds and more of a core for it, and so would those that it starts.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import context, forkserver, reduction
from pathlib import Path
from typing import Any

from tests.kit.alone import environment_with_tests


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends, however it does."""
    pr_set_pdeathsig = 1
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl")


TEMPLATE = "tests.kit.template"

VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Else a worker starts C++ compilers when it is first asked for log probabilities: 20 s.
    "TORCH_COMPILE_DISABLE": "1",
}
"""Environment of the process that others are forked from: what is read at an import."""


class _Descriptor:
    """A descriptor that the process which is started has, too, under the number that it becomes."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[object]]:
        return _number_here, (reduction.DupFd(self._number),)


def _number_here(held: Any) -> int:  # noqa: ANN401 - of multiprocessing
    number: int = held.detach()
    return number


class ForkedProcess(context.ForkServerProcess):
    """A process with the environment and the output that this one has when it is started.

    It is killed when this process ends, and what it forks when it ends itself.
    """

    def start(self) -> None:
        """Fork it."""
        start_template()
        self._environment = dict(os.environ)
        self._outputs: tuple[Any, Any] = (_Descriptor(1), _Descriptor(2))
        super().start()

    def run(self) -> None:
        """In the process: what it is for."""
        assert TEMPLATE in sys.modules
        for descriptor, held in zip((1, 2), self._outputs, strict=True):
            os.dup2(held, descriptor)
            os.close(held)
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


@functools.cache
def start_template() -> None:
    """Start the process that others are forked from, once."""
    folder = Path(tempfile.mkdtemp(prefix="ssdkv-forks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = environment_with_tests(folder)["PYTHONPATH"]
    multiprocessing.set_forkserver_preload([TEMPLATE])
    with environment(**VARIABLES, PYTHONPATH=path, PYTHONSAFEPATH="1"):
        forkserver.ensure_running()


class ForkedContext(context.ForkServerContext):
    """The context of :mod:`multiprocessing` whose processes are forked so."""

    Process = ForkedProcess


@contextlib.contextmanager
def forked_spawns() -> Iterator[None]:
    """Have processes forked so that vLLM wants to spawn."""
    given = multiprocessing.get_context

    def get_context(method: str | None = None) -> context.BaseContext:
        return ForkedContext() if method == "spawn" else given(method)

    multiprocessing.get_context = get_context  # type: ignore[assignment]
    try:
        yield
    finally:
        multiprocessing.get_context = given


def to_log(log: Path) -> None:
    """Have a file get what this process says."""
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def _run(command: list[str], cwd: Path, log: Path) -> None:
    os.setsid()
    os.chdir(cwd)
    to_log(log)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


class Program:
    """A Python program that runs, in a session of its own. Like ``Popen``."""

    def __init__(
        self, command: list[str], variables: Mapping[str, str], cwd: Path, log: Path
    ) -> None:
        """``command`` begins with the file of the program; ``log`` gets its output."""
        self._process = ForkedProcess(target=_run, args=(command, cwd, log))
        with environment(**variables):
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Its status, if it has ended."""
        return self._process.exitcode

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def wait(self, seconds: float) -> int:
        """Wait for its end: its status."""
        self._process.join(seconds)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked program", seconds)
        return status
