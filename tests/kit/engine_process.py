"""An engine in a process that a test can stop and kill, told what to do."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.kit.engine import MAX_TOKENS, Engine, Tokens
from tests.kit.forks import ForkedProcess, to_log
from tests.node.networks import enter
from vllm_ssdkv.node.client import awaited_chains

KV_TOKENS = 16384
PATIENCE_S = 300.0
"""For which a result is waited."""

COUNTED_LATER = {"device_lost", "device_returned"}
"""Metrics without samples until there is something to count."""

LEASE_S = 3.0
"""Of the node that tests share."""


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
            engine: Further arguments of :class:`Engine`.
        """
        given = {"kv_tokens": KV_TOKENS, "enable_prefix_caching": False, **engine}
        self._orders, theirs = multiprocessing.Pipe()
        order = (theirs, log, namespace, model, {"ssdkv": dict(ssdkv), **given})
        self.process = ForkedProcess(target=serve, args=order)
        self.process.start()
        theirs.close()
        self._log = log

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
        self.process.join()
        self._orders.close()

    def order(self, **what: Any) -> None:  # noqa: ANN401 - what :func:`serve` knows
        """Give it something to do."""
        self._orders.send(what)

    def result(self, patience_s: float = PATIENCE_S) -> Any:  # noqa: ANN401 - of any order
        """Take the result of the oldest order that was not asked for yet.

        Raises:
            RuntimeError: the engine has ended.
            TimeoutError: the time ran out; the log has what its threads do.
        """
        try:
            if self._orders.poll(patience_s):
                return self._orders.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"the engine has ended:\n{self._log.read_text()[-4000:]}") from None
        self._signal(signal.SIGUSR1)
        time.sleep(1.0)
        raise TimeoutError(f"the engine hangs:\n{self._log.read_text()[-12000:]}")

    def answered(self) -> bool:
        """Check whether a result waits to be taken."""
        return self._orders.poll(0)

    def answers(
        self, prompts: Sequence[Tokens], tokens: int = MAX_TOKENS
    ) -> list[tuple[tuple[int, ...], int]]:
        """Tokens of the answers, and how many tokens of each prompt were found."""
        self.order(prompts=list(prompts), tokens=tokens)
        return self.ordered_answers()

    def ordered_answers(self, patience_s: float = PATIENCE_S) -> list[tuple[tuple[int, ...], int]]:
        """The same, of prompts that were ordered before."""
        return list(self.result(patience_s))

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
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)


def serve(
    orders: Connection,
    log: Path,
    namespace: str | None,
    model: Path,
    given: Mapping[str, Any],
) -> None:
    """In the process: carry out orders until there are no more."""
    to_log(log)
    faulthandler.register(signal.SIGUSR1)
    if namespace is not None:
        enter(namespace)
    with Engine(model, **given) as engine, contextlib.suppress(EOFError):
        while True:
            orders.send(carried_out(engine, orders.recv()))


def carried_out(engine: Engine, order: Mapping[str, Any]) -> object:
    """The result of one order."""
    if "patience" in order:
        vars(awaited_chains).update(PATIENCE=order["patience"], STALL_S=order["patience"])
        return None
    if "metric" in order:
        # A step brings the numbers up to date.
        engine.answers([[1] * 8], 1)
        try:
            return engine.ssdkv(order["metric"], **order["labels"])
        except KeyError:
            if order["metric"] not in COUNTED_LATER:
                raise
            return 0.0
    if "reset" in order:
        return engine.llm.reset_prefix_cache(reset_connector=True)
    found = engine.answers(order["prompts"], order.get("tokens", MAX_TOKENS))
    engine.settle()
    return [(answer.tokens, answer.cached) for answer in found]
