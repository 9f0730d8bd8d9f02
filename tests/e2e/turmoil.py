"""Requests that are added, aborted and preempted at random, and faults that come and go."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.models import prompts
from tests.faults import set_faults
from tests.kit.engine import Engine, Tokens

ANSWER = 24
FAULTS: tuple[dict[str, Any], ...] = (
    {"kind": "eio", "probability": 0.05, "count": 6},
    {"kind": "short", "probability": 0.05, "count": 6},
    {"kind": "corrupt", "op": "read", "probability": 0.05, "count": 6},
    {"kind": "latency", "probability": 0.2, "count": 40, "seconds": 0.02},
    {"kind": "enospc", "op": "write", "probability": 0.05, "count": 6},
    {"kind": "stall", "seconds": 3.0, "count": 1},
    {"kind": "dead"},
)


def family(seed: int) -> list[Tokens]:
    """Prompts that share prefixes of several lengths, as a tree of conversations does."""
    root, *tails = prompts((640, 33, 64, 95, 256, 700), seed)
    found = [root]
    for tail in tails:
        found += [root + tail, root[:320] + tail]
    return found


PROMPTS = [*family(20), *family(21), *prompts((20, 64, 1500), seed=22)]


def loading(engine: Engine) -> bool:
    """Whether requests that do not run hold HBM blocks; vLLM cannot reset meanwhile.

    A load may be filling them, also for a request that was aborted, or may have filled them and the
    request waits for its turn.
    """
    groups = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    holders = {name for group in groups for name, blocks in group.req_to_blocks.items() if blocks}
    return not holders <= {request.request_id for request in engine.scheduler.running}


@dataclass
class Turmoil:
    """What one engine in this process is asked.

    Attributes:
        wanted: Answers to ``PROMPTS``.
        likely: How often each action is drawn, of ``add``, ``step``, ``abort``, ``preempt``,
            ``fault`` (some device gets a fault), ``reset`` (of the cache, once idle) and ``settle``
            (until idle, without faults from then on).
        asks: What requests may choose for themselves.
        control: The engine's file of faults, and of how many ``devices``.
        preempted: Requests that were.
    """

    engine: Engine
    source: random.Random
    wanted: Sequence[tuple[int, ...]]
    likely: Mapping[str, float]
    asks: Sequence[dict[str, object] | None] = (None,)
    control: Path | None = None
    devices: int = 1
    preempted: int = 0
    asked: dict[str, int] = field(default_factory=dict)
    alive: set[str] = field(default_factory=set)
    got: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def run(self, actions: int) -> int:
        """So many actions, and then until idle. How many requests ended with their whole answer,
        which was the right one."""
        for number in range(actions):
            (action,) = self.source.choices(list(self.likely), list(self.likely.values()))
            self._act(action, number)
        self._settle()
        finished = {name: tokens for name, tokens in self.got.items() if len(tokens) == ANSWER}
        assert finished == {name: self.wanted[self.asked[name]] for name in finished}
        assert not self.alive, "requests that did not end"
        return len(finished)

    def _act(self, action: str, number: int) -> None:
        source, engine = self.source, self.engine
        if action == "add":
            name, which = str(number), source.randrange(len(PROMPTS))
            self.asked[name] = which
            self.alive.add(name)
            asked = source.choice(self.asks)
            engine.add(name, PROMPTS[which], ANSWER, asked, priority=source.randrange(3))
        elif action == "step":
            for _ in range(source.randrange(1, 30)):
                self._step()
        elif action == "abort" and self.alive:
            name = source.choice(sorted(self.alive))
            engine.abort(name)
            self.alive.discard(name)
            self.got.pop(name, None)
        elif action == "preempt":
            while loading(engine):
                self._step()
            self.preempted += len(engine.scheduler.running)
            assert engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        elif action == "fault":
            rule = source.choice(FAULTS)
            if rule["kind"] != "dead" or (self.devices > 1 and source.random() < 0.3):
                self._faults({**rule, "device": source.randrange(self.devices), "seed": number})
        elif action == "settle":
            self._settle()
        elif action == "reset":
            self._settle()
            engine.llm.llm_engine.reset_prefix_cache(reset_connector=True)

    def _step(self) -> None:
        self.got |= self.engine.step()
        self.alive -= {name for name, tokens in self.got.items() if len(tokens) == ANSWER}

    def _settle(self) -> None:
        while self.engine.llm.llm_engine.has_unfinished_requests():
            self._step()
        self._faults()
        self.engine.settle()

    def _faults(self, *rules: dict[str, Any]) -> None:
        if self.control is not None:
            set_faults(self.control, *rules)
