"""An engine in a process that a test can stop and kill, told what to do by lines of JSON."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.alone import environment_with_tests
from tests.e2e.engine import Engine, Tokens

KV_TOKENS = 16384
LEASE_S = 3.0
"""Of the node that tests share."""


class EngineProcess:
    """One engine, all of it in one process of its own."""

    def __init__(self, model: Path, ssdkv: Mapping[str, object], log: Path):
        order = json.dumps({"model": str(model), "ssdkv": dict(ssdkv)})
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.e2e.node_engine", order],
                env=environment_with_tests(log.parent),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self._log = log

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def order(self, **what: Any) -> None:  # noqa: ANN401 - JSON
        """Give it something to do."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def result(self) -> Any:  # noqa: ANN401 - JSON
        """Take the result of the oldest order that was not asked for yet."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        raise RuntimeError(f"the engine has ended:\n{self._log.read_text()[-4000:]}")

    def answers(self, prompts: Sequence[Tokens]) -> list[tuple[tuple[int, ...], int]]:
        """Tokens of the answers, and how many tokens of each prompt were found."""
        self.order(prompts=list(prompts))
        return self.ordered_answers()

    def ordered_answers(self) -> list[tuple[tuple[int, ...], int]]:
        """The same, of prompts that were ordered before."""
        return [(tuple(tokens), cached) for tokens, cached in self.result()]

    def metric(self, name: str) -> float:
        """One of our metrics."""
        self.order(metric=name)
        return float(self.result())

    def reset(self) -> bool:
        """Reset its caches, the store's part included, as ``/reset_prefix_cache`` can."""
        self.order(reset=True)
        return bool(self.result())

    def stop(self) -> None:
        """Stop it, as a machine that swaps does."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)


def main() -> None:
    """Carry out orders until there are no more."""
    given = json.loads(sys.argv[1])
    with Engine(
        Path(given["model"]),
        ssdkv=given["ssdkv"],
        kv_tokens=KV_TOKENS,
        enable_prefix_caching=False,
    ) as engine:
        for line in sys.stdin:
            order = json.loads(line)
            if "metric" in order:
                # A step brings the numbers up to date.
                engine.answers([[1] * 8], 1)
                result: Any = engine.ssdkv(order["metric"])
            elif "reset" in order:
                result = engine.llm.reset_prefix_cache(reset_connector=True)
            else:
                result = [(a.tokens, a.cached) for a in engine.answers(order["prompts"])]
                engine.settle()
            print(f"RESULT {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
