"""An engine in a process that a test can stop and kill, told what to do by lines of JSON."""

from __future__ import annotations

import faulthandler
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.alone import environment_with_tests
from tests.e2e.engine import MAX_TOKENS, Engine, Tokens
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
        inside: Sequence[str] = (),
        **engine: object,
    ):
        """
        Args:
            model: Its directory.
            ssdkv: Options of the connector.
            log: File that gets what the engine says.
            inside: Command that starts the process, such as one that enters a namespace.
            engine: Further arguments of :class:`Engine`, of JSON.
        """
        given = {"kv_tokens": KV_TOKENS, "enable_prefix_caching": False, **engine}
        order = json.dumps({"model": str(model), "ssdkv": dict(ssdkv), "engine": given})
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-P", "-m", "tests.e2e.node_engine", order],
                env=environment_with_tests(log.parent),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self._log = log
        self._results: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
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

    def order(self, **what: Any) -> None:  # noqa: ANN401 - JSON
        """Give it something to do."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

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


def main() -> None:
    """Carry out orders until there are no more."""
    faulthandler.register(signal.SIGUSR1)
    given = json.loads(sys.argv[1])
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


if __name__ == "__main__":
    main()
