"""A process that forks clients of two nodes, as an engine has them, which end in all ways; run by
``test_endings.py``.

Standard input has one JSON object per line. Of each a child stores blocks and says ``ready``. After
one more line, which comes when a node is gone, it asks for what it stored, and ends as it was told.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

KEPT: list[Any] = []
"""Until the interpreter has ended."""


def say(word: str) -> None:
    os.write(1, f"{word}\n".encode())


def line() -> str:
    """One line, and no byte more: a child reads on."""
    found = b""
    while not found.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return ""
        found += byte
    return found.decode()


def end(how: str, engine: Any, keys: list[bytes]) -> None:  # noqa: ANN401 - imported late
    if how == "closes":
        engine.close()
    elif how == "closes twice":
        engine.close()
        engine.close()
    elif how == "closes late":
        time.sleep(0.5)
        engine.store.take_load_outcomes()
        engine.index.close()
        engine.store.close()
    elif how == "is used when it is closed":
        engine.close()
        engine.find(keys)
        engine.ask(keys)
        engine.store.take_load_outcomes()
        engine.claim(keys)
    elif how == "closes at exit":
        atexit.register(engine.close)
    elif how == "is told to end":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "is told to end while it closes":
        signal.setitimer(signal.ITIMER_REAL, 0.003)
        engine.close()
        signal.setitimer(signal.ITIMER_REAL, 0)  # it has ended before
    elif how == "is forgotten":
        KEPT.clear()
    else:
        assert how == "just ends"


def engine_of(task: dict[str, Any]) -> None:
    from tests.node.test_pool import Engine
    from tests.node.waits import new_keys

    logging.basicConfig(level=logging.INFO)
    for number in (signal.SIGTERM, signal.SIGALRM):  # as engine cores do
        signal.signal(number, lambda *_: sys.exit(0))
    engine, keys = Engine(task["addresses"], task["how"], 2), new_keys(64)
    KEPT.append(engine)
    engine.save(keys)
    say("ready")
    line()
    for _ in range(4):
        engine.step()
        engine.ask(keys)
    end(task["how"], engine, keys)


def main() -> None:
    tests = types.ModuleType("tests")
    tests.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["tests"] = tests
    import tests.node.test_pool  # once, for all children

    say("imported")
    while task := line():
        if os.fork() == 0:
            given = json.loads(task)
            errors = os.open(given["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(errors, 2)
            engine_of(given)
            return  # through all that an interpreter does at its end
        _, status = os.wait()
        say(f"ended {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
