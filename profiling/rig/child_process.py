"""A child process that sends events as JSON lines, and is ended in time.

vLLM's engine is built once in a process, so each engine of a benchmark has its own. The parent
calls :func:`run_module` or :func:`run_measurement`, the module of the child :func:`serve`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from vllm_ssdkv.base.errors import BenchError, SSDKVError

TAIL_LINES: Final = 40
PATIENCE_S: Final = 900.0
"""Seconds of a measurement, at most."""
_KILL_AFTER_S: Final = 15.0

Event: TypeAlias = dict[str, Any]
"""Fields of a line, with the name of the event as ``event``."""
Job: TypeAlias = dict[str, Any]
Rows: TypeAlias = list[dict[str, Any]]


class Tell(Protocol):
    """Sends an event to the parent."""

    def __call__(self, event: str, **fields: object) -> None:
        """Send ``fields``, which JSON knows."""


class PhaseError(SSDKVError):
    """The process of a phase failed, or did not end in time."""


def run_process(
    command: list[str],
    variables: Mapping[str, str],
    log: Path,
    timeout_s: float,
    watch: Callable[[Event], None],
) -> Event:
    """Run ``command`` plus the number of a pipe for its events; its output goes to ``log``.

    Whatever happens, the process and its children have ended when this returns.

    Raises:
        PhaseError: it failed, gave no result, or took longer than ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    reading, writing = os.pipe()
    result: Event | None = None
    process: subprocess.Popen[bytes] | None = None
    with os.fdopen(reading, "rb", buffering=0) as events, log.open("wb") as output:
        try:
            try:
                with _signals_held_back():
                    # A session of its own: engines start processes, and all must end with the
                    # phase.
                    process = subprocess.Popen(
                        [*command, str(writing)],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env=dict(variables),
                        pass_fds=(writing,),
                        start_new_session=True,
                    )
            finally:
                os.close(writing)
            for event in _events(events.fileno(), deadline):
                watch(event)
                if event["event"] == "result":
                    result = event
            code = process.wait(max(0.1, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            raise PhaseError(f"did not end within {timeout_s:.0f} s") from None
        finally:
            if process is not None:
                _end(process)
    if code != 0 or result is None:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise PhaseError(f"failed with {how}{'' if result else ', without a result'}")
    return result


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Signals that end this process come when this is over: their handlers raise, and in the middle
    of a start nobody would know what was started. Not by a mask: other threads would take them.
    """
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


def tail(log: Path) -> str:
    """The last lines of a log."""
    with log.open(encoding="utf-8", errors="replace") as file:
        return "".join(deque(file, TAIL_LINES)).rstrip()


def _events(fd: int, deadline: float) -> Iterator[Event]:
    """Events until the other end of the pipe is closed.

    Raises:
        TimeoutError: the deadline passed.
    """
    rest = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            raise TimeoutError
        read = os.read(fd, 1 << 16)
        if not read:
            return
        *lines, rest = (rest + read).split(b"\n")
        for line in lines:
            event: Event = json.loads(line)
            yield event


def _end(process: subprocess.Popen[bytes]) -> None:
    """End whatever is left of the session: politely, then not."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_AFTER_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_module(
    module: str,
    arguments: Sequence[str],
    log: Path,
    timeout_s: float,
    watch: Callable[[Event], None] = lambda _: None,
    variables: Mapping[str, str] | None = None,
) -> Event:
    """Run a module that calls :func:`serve`, and return its ``result``.

    Args:
        module: Its full name.
        arguments: Of the module's function.
        log: Gets what the process prints.
        timeout_s: See :func:`run_process`.
        watch: Sees every event.
        variables: Environment; :func:`environment` if missing.

    Raises:
        PhaseError: see :func:`run_process`.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    given = environment(stock=False) if variables is None else variables
    return run_process(command, given, log, timeout_s, watch)


def serve(run: Callable[..., None]) -> None:
    """Be the process of :func:`run_module`: call ``run`` with its arguments and a :class:`Tell`."""
    *arguments, descriptor = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as events:

        def tell(event: str, **fields: object) -> None:
            events.write(json.dumps({"event": event, **fields}) + "\n")
            events.flush()

        run(*arguments, tell)


def run_measurement(
    measure: Callable[[Job], Rows], job: Job, more: Mapping[str, str] | None = None
) -> Rows:
    """Rows of a function of a module, which a process of its own calls. Blocks.

    ``more``: environment of the process, beside this one's.

    Raises:
        BenchError: it failed, with the end of what it printed; or took longer than
            :data:`PATIENCE_S`.
    """
    # The module that was started has another __module__.
    module, name = measure.__globals__["__spec__"].name, measure.__name__
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        try:
            result = run_module(
                "vllm_ssdkv.profiling.rig.measurement",
                [module, name, json.dumps(job)],
                log,
                PATIENCE_S,
                variables={**environment(stock=False), **(more or {})},
            )
        except PhaseError as error:
            what = f"{module.rpartition('.')[2]}: {name}"
            raise BenchError(f"{what} {error}\n{tail(log)}") from error
        rows: Rows = result["rows"]
        return rows


def environment(*, stock: bool) -> dict[str, str]:
    """This process's, with nothing that needs a network; stock vLLM loads no plugin at all."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # On a CPU this goes before the KV memory that the plan gives to vLLM.
    variables.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if stock:
        variables["VLLM_PLUGINS"] = ""
    return variables
