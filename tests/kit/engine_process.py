"""An engine in a process that a test can stop and kill, told what to do by lines of JSON.

Run as a module it is the process that such engines are forked from: it has imported vLLM once.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import json
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.kit.alone import environment_with_tests
from tests.kit.engine import MAX_TOKENS, Engine, Tokens, end_with_parent, preload
from tests.node.networks import enter
from vllm_ssdkv.node.client import awaited_chains

KV_TOKENS = 16384
PATIENCE_S = 300.0
"""For which a result is waited."""

COUNTED_LATER = {"device_lost", "device_returned"}
"""Metrics without samples until there is something to count."""

LEASE_S = 3.0
"""Of the node that tests share."""


class Forked:
    """A process that somebody else has forked."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)  # type: ignore[attr-defined]

    def kill(self) -> None:
        """Kill it, if it runs."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        """Wait for its end."""
        if not select.select([self._descriptor], [], [], PATIENCE_S)[0]:
            raise TimeoutError("a process that was killed does not end")


class Forks:
    """The process that engines are forked from. It ends with this one, and they with it."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="ssdkv-forks-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(PATIENCE_S)
        self._lock = threading.Lock()
        with theirs:
            subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.kit.engine_process", str(theirs.fileno())],
                env=environment_with_tests(folder),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )

    def fork(self, order: Mapping[str, object], *files: int) -> Forked:
        """Have an engine forked, with these files as its standard input, output and error."""
        with self._lock:
            socket.send_fds(self._control, [json.dumps(order).encode()], files)
            return Forked(int(self._control.recv(64)))


@functools.cache
def forks() -> Forks:
    """The one of this process."""
    return Forks()


class EngineProcess:
    """One engine, all of it in one process of its own."""

    def __init__(
        self,
        model: Path,
        ssdkv: Mapping[str, object],
        log: Path,
        namespace: str | None = None,
        **engine: object,
    ):
        """
        Args:
            model: Its directory.
            ssdkv: Options of the connector.
            log: File that gets what the engine says.
            namespace: Network namespace that it runs in, if not in this one.
            engine: Further arguments of :class:`Engine`, of JSON.
        """
        given = {"kv_tokens": KV_TOKENS, "enable_prefix_caching": False, **engine}
        order = {
            "model": str(model),
            "ssdkv": dict(ssdkv),
            "engine": given,
            "namespace": namespace,
        }
        orders, to_it = os.pipe()
        from_it, said = os.pipe()
        self._orders, self._said = os.fdopen(to_it, "w"), os.fdopen(from_it)
        with log.open("ab") as file:
            self.process = forks().fork(order, orders, said, file.fileno())
        os.close(orders)
        os.close(said)
        self._log = log
        self._results: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with self._said:
            for line in self._said:
                if line.startswith("RESULT "):
                    self._results.put(line.removeprefix("RESULT "))
        self._results.put(None)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):  # an order that it did not read
            self._orders.close()

    def order(self, **what: Any) -> None:  # noqa: ANN401 - JSON
        """Give it something to do."""
        self._orders.write(json.dumps(what) + "\n")
        self._orders.flush()

    def result(self, patience_s: float = PATIENCE_S) -> Any:  # noqa: ANN401 - JSON
        """Take the result of the oldest order that was not asked for yet.

        Raises:
            RuntimeError: the engine has ended.
            TimeoutError: the time ran out; the log has what its threads do.
        """
        try:
            line = self._results.get(timeout=patience_s)
        except queue.Empty:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
            raise TimeoutError(f"the engine hangs:\n{self._log.read_text()[-12000:]}") from None
        if line is None:
            raise RuntimeError(f"the engine has ended:\n{self._log.read_text()[-4000:]}")
        return json.loads(line)

    def answered(self) -> bool:
        """Check whether a result waits to be taken."""
        return not self._results.empty()

    def answers(
        self, prompts: Sequence[Tokens], tokens: int = MAX_TOKENS
    ) -> list[tuple[tuple[int, ...], int]]:
        """Tokens of the answers, and how many tokens of each prompt were found."""
        self.order(prompts=list(prompts), tokens=tokens)
        return self.ordered_answers()

    def ordered_answers(self, patience_s: float = PATIENCE_S) -> list[tuple[tuple[int, ...], int]]:
        """The same, of prompts that were ordered before."""
        return [(tuple(tokens), cached) for tokens, cached in self.result(patience_s)]

    def metric(self, name: str, **labels: str) -> float:
        """One of our metrics, summed over the samples that have these labels."""
        self.order(metric=name, labels=labels)
        return float(self.result())

    def reset(self) -> bool:
        """Reset its caches, the store's part included, as ``/reset_prefix_cache`` can."""
        self.order(reset=True)
        return bool(self.result())

    def await_chains(self, patience: float) -> None:
        """Have requests wait so long for blocks that others compute: seconds without a new block,
        and multiples of what they would compute themselves."""
        self.order(patience=patience)
        self.result()

    def stop(self) -> None:
        """Stop it, as a machine that swaps does."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)


def serve(given: Mapping[str, Any]) -> None:
    """Carry out orders until there are no more."""
    faulthandler.register(signal.SIGUSR1)
    if given["namespace"] is not None:
        enter(given["namespace"])
    with Engine(Path(given["model"]), ssdkv=given["ssdkv"], **given["engine"]) as engine:
        for line in sys.stdin:
            order = json.loads(line)
            if "patience" in order:
                vars(awaited_chains).update(PATIENCE=order["patience"], STALL_S=order["patience"])
                result: Any = None
            elif "metric" in order:
                # A step brings the numbers up to date.
                engine.answers([[1] * 8], 1)
                try:
                    result = engine.ssdkv(order["metric"], **order["labels"])
                except KeyError:
                    if order["metric"] not in COUNTED_LATER:
                        raise
                    result = 0.0
            elif "reset" in order:
                result = engine.llm.reset_prefix_cache(reset_connector=True)
            else:
                tokens = order.get("tokens", MAX_TOKENS)
                result = [(a.tokens, a.cached) for a in engine.answers(order["prompts"], tokens)]
                engine.settle()
            # One write: `print` lets a log record of another thread in before the end of the line.
            sys.stdout.write(f"RESULT {json.dumps(result)}\n")
            sys.stdout.flush()


def forked(order: bytes, files: Sequence[int]) -> None:
    """A new process: an engine, and its end."""
    code = 1
    try:
        end_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        serve(json.loads(order))
        code = 0
    except BaseException:  # noqa: BLE001 - the log has it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def reap(*_: object) -> None:
    """Let engines that have ended go."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """Fork an engine for each order, until nobody is there to give one."""
    control = socket.socket(fileno=int(sys.argv[1]))
    preload()
    sys.stdout.flush()  # or each engine would say the same again
    signal.signal(signal.SIGCHLD, reap)
    while True:
        order, files, *_ = socket.recv_fds(control, 1 << 20, 3)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            forked(order, files)
        for file in files:
            os.close(file)
        control.send(str(pid).encode())


if __name__ == "__main__":
    main()
