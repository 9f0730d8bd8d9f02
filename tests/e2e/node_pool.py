"""Several engines of one model on nodes, work for them, and what may go wrong meanwhile."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final

from tests.e2e.models import prompts
from tests.faults import set_faults
from tests.kit.engine import Tokens
from tests.kit.engine_process import LEASE_S, EngineProcess
from tests.kit.node import NodeProcess
from tests.kit.server import free_port
from tests.node.clock import NO_CLOCK, JumpingClock
from tests.node.relay import Relay

BLOCK: Final = 32
ANSWER: Final = 8
"""Tokens of an answer: with those of the prompts below they fill no further block."""

ROUND_S: Final = 60.0
"""Nobody waits for an answer of a round for longer, whatever happens in it: several deadlines of
the engines, on a busy machine."""

ASKED: Final = 96
"""Prompts that an engine is asked at once, at most, when it is to find what is stored."""

STRIKE_S: Final = 0.8
"""Something happens within so many seconds after a round has begun, whose work takes about one."""

Answers = Mapping[tuple[int, ...], tuple[int, ...]]
"""Answers of stock vLLM, by prompt."""


def whole(prompt: Tokens) -> int:
    """Tokens of a prompt in whole blocks before its last token."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def eventually(what: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Check whether something becomes true."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def work(number: int, engines: int) -> list[list[Tokens]]:
    """Prompts of a round for each engine: one is everybody's, one its neighbour's too."""
    common, *own = prompts([1100] + [500] * engines, seed=1000 + number)
    ends = prompts([20] * (3 * engines), seed=3000 + number)
    return [
        [common + ends[3 * i], own[i] + ends[3 * i + 1], own[i - 1] + ends[3 * i + 2]]
        for i in range(engines)
    ]


class Site:
    """One node, a network to it, its drive and its clock, which fail when they are told to.

    Attributes:
        near: Its address on this host.
        far: Its address behind the network.
    """

    def __init__(self, root: Path, capacity: str = "768MiB", **options: object):
        """``root``: a directory of its own; ``capacity``: of its drive. Starts the node."""
        port = free_port()
        self._faults = root / "faults.json"
        set_faults(self._faults)
        self._clock = JumpingClock(root)
        self._stack = ExitStack()
        self.relay = self._stack.enter_context(Relay(port))
        given = {
            "listen": [f"unix://{root}/node.sock", f"tcp://127.0.0.1:{port}"],
            "devices": [{"path": str(root / "ssd"), "capacity": capacity}],
            "store_share": 1.0,
            "lease": LEASE_S,
            "io": {"fault_file": str(self._faults)},
            **options,
        }
        self.node = self._stack.enter_context(
            NodeProcess(root, None, self._clock.environment, **given)
        )
        self.near, self.far = self.node.address, self.relay.address

    def close(self) -> None:
        """Kill the node."""
        self._stack.close()

    def left(self) -> int:
        """Count pins and claims that sessions of engines hold."""
        status = self.node.status()
        held = sum(session.pins + session.claims for session in status.sessions)
        return held + sum(store.pinned for store in status.stores)

    def forgotten(self) -> int:
        """Count how often the node has lost its drive, and forgot what lies on it, so far."""
        return self.node.log().count("are out of reach")

    def strike(self, kind: str, source: random.Random) -> None:
        """Have something fail: until :meth:`mend`, or for a moment.

        Kinds: ``kill`` and ``stop`` of the node, ``cut`` and ``hang`` of the network, ``delay`` of
        what it carries, ``full`` and ``slow`` drive, ``skew`` of the clock.
        """
        seed = source.randrange(1 << 16)
        if kind == "kill":
            self.node.kill()
        elif kind == "stop":
            self.node.signal(signal.SIGSTOP)
        elif kind == "cut":
            self.relay.cut()
        elif kind == "hang":
            self.relay.hung.set()
        elif kind == "delay":
            self.relay.delay_s = source.uniform(0.002, 0.2)
        elif kind == "full":
            rule = {"kind": "enospc", "op": "write", "probability": source.uniform(0.2, 1.0)}
            set_faults(self._faults, {**rule, "seed": seed})
        elif kind == "slow":
            rule = {"kind": "latency", "seconds": source.uniform(0.01, 0.3)}
            set_faults(self._faults, {**rule, "probability": 0.5, "seed": seed})
        elif kind == "skew":
            self._clock.set(source.choice([-1, 1]) * source.choice([3, 3600, 86400, 3 * 10**7]))
        else:
            raise ValueError(kind)

    def mend(self, kind: str) -> None:
        """Undo :meth:`strike`; a drive that was full is used again by the node's next start."""
        if kind == "stop":
            self.node.signal(signal.SIGCONT)
        self.relay.mend()
        set_faults(self._faults)
        if kind == "full":
            self.node.kill()
        if kind in {"kill", "full"}:
            self.node.start()


KINDS: Final = ("kill", "stop", "cut", "hang", "delay", "full", "slow", *["skew"] * (not NO_CLOCK))
"""Faults that can strike a site."""


class Pool:
    """Engines that are asked in rounds, and what they have stored for good.

    Attributes:
        engines: In the order of the options.
        sharing: Numbers of those in mode reuse.
        known: Prompts all of whose blocks are durable on the nodes.
        struck: Of each round, by what struck in it, whether an engine was at work then.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        model: Path,
        root: Path,
        options: Sequence[Mapping[str, object]],
        wanted: Answers,
        **engine: object,
    ):
        """
        Args:
            sites: Their nodes.
            model: Directory of their model.
            root: Directory for logs.
            options: Of each engine; ``engine`` among them: further arguments of this one.
            wanted: What they must answer.
            engine: Further arguments of each.
        """
        self.sites, self._model, self._root = sites, model, root
        self._options, self._wanted, self._engine = options, wanted, engine
        self.engines = [self._start(number) for number in range(len(options))]
        self.sharing = [i for i, one in enumerate(options) if one.get("mode", "reuse") == "reuse"]
        self.known: list[Tokens] = []
        self.struck: dict[str, list[bool]] = {}
        self._failed = ""

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for engine in self.engines:
            engine.kill()
        for what, busy in sorted(self.struck.items()):
            print(f"{what} struck {len(busy)} times, at work {sum(busy)} times")

    def _start(self, number: int) -> EngineProcess:
        log = self._root / f"engine{number}.log"
        options = dict(self._options[number])
        own = options.pop("engine", {})
        assert isinstance(own, dict)
        return EngineProcess(self._model, options, log, **{**self._engine, **own})

    def replace(self, number: int) -> None:
        """Start an engine again that was killed."""
        self.engines[number] = self._start(number)

    def connect(self) -> None:
        """Wait until the engines in mode reuse are connected to their nodes."""
        for engine in [self.engines[number] for number in self.sharing]:
            assert eventually(lambda engine=engine: engine.metric("node_connected") >= 1)  # type: ignore[misc]  # of this turn

    def taken(self, number: int, batch: Sequence[Tokens], patience_s: float = ROUND_S) -> list[int]:
        """Take the answers to what an engine was ordered, which are right; tokens found."""
        got = self.engines[number].ordered_answers(patience_s)
        wanted = [self._wanted[tuple(prompt)] for prompt in batch]
        assert [tokens for tokens, _ in got] == wanted, f"engine {number}"
        return [cached for _, cached in got]

    def order(self, number: int, batch: Sequence[Tokens]) -> None:
        """Ask an engine, and do not wait."""
        self.engines[number].order(prompts=list(batch), tokens=ANSWER)

    def ask(self, number: int, batch: Sequence[Tokens]) -> list[int]:
        """Ask an engine, which is right; tokens found of each prompt."""
        self.order(number, batch)
        return self.taken(number, batch)

    def idle(self) -> None:
        """Check that nothing is held for anybody any more, soon."""
        for site in self.sites:
            assert eventually(lambda site=site: site.left() == 0), site.node.status()  # type: ignore[misc]  # of this turn

    def assert_known(self, number: int, source: random.Random | None = None) -> None:
        """Check that an engine finds what was stored for good: all of it, or what ``source``
        draws."""
        asked = self.known
        if source is not None:
            asked = source.sample(asked, min(len(asked), ASKED))
        for begin in range(0, len(asked), ASKED):
            batch = asked[begin : begin + ASKED]
            assert self.ask(number, batch) == [whole(prompt) for prompt in batch]

    def heal(self) -> None:
        """Wait until the engines in mode page use all drives of their nodes again."""
        for engine in [e for i, e in enumerate(self.engines) if i not in self.sharing]:

            def healed(engine: EngineProcess = engine) -> bool:
                return engine.metric("device_returned") == engine.metric("device_lost")

            assert eventually(healed)

    def learn(self, number: int, batch: Sequence[Tokens]) -> None:
        """Have an engine store what is missing of these; from now on all of it is found."""
        for _ in range(3):  # a request that shares a prefix may have computed it beside another
            if self.ask(number, batch) == [whole(prompt) for prompt in batch]:
                break
        else:
            raise AssertionError("prompts are not stored")
        self.known += batch

    def round(
        self,
        what: str,
        batches: Sequence[Sequence[Tokens]],
        source: random.Random,
        strike: Callable[[], Callable[[], None]],
        victim: int | None = None,
    ) -> None:
        """Have all engines work, and strike in the midst of it.

        Args:
            what: Strikes, in a word.
            batches: What each engine is asked.
            source: Draws the instant, and who is asked what afterwards.
            strike: Called at the instant; what it returns mends the damage.
            victim: Engine that is killed by it.
        """
        # Answers that nobody took would be taken for those of later rounds.
        assert not self._failed, f"not run: the round of {self._failed} failed before"
        self._failed = what
        forgotten = sum(site.forgotten() for site in self.sites)
        ordered = time.monotonic()
        for number, batch in enumerate(batches):
            self.order(number, batch)
        time.sleep(source.uniform(0.0, STRIKE_S))
        at_work = sum(not engine.answered() for engine in self.engines)
        self.struck.setdefault(what, []).append(at_work > 0)
        mend = strike()
        begun = time.monotonic()
        lasts = source.uniform(0.0, 0.5 if victim is not None else 2 * LEASE_S)
        time.sleep(lasts)
        others = [engine for number, engine in enumerate(self.engines) if number != victim]
        through = sum(engine.answered() for engine in others)
        mend()
        for number, batch in enumerate(batches):
            if number != victim:
                self.taken(number, batch, ROUND_S - (time.monotonic() - begun))
        taken = time.monotonic()
        if victim is not None:
            self.replace(victim)
        self.connect()
        self.heal()
        self.idle()
        asked = source.choice(self.sharing)
        # Of a drive that is out of use a node keeps nothing: what has no other copy is computed
        # again, and all else is asked for, for a hit is stored again where it is missing.
        drive_lost = sum(site.forgotten() for site in self.sites) > forgotten
        if drive_lost and len(self.sites) == 1:
            self.known.clear()
        self.assert_known(asked, None if drive_lost else source)
        self.learn(asked, [prompt for batch in batches for prompt in batch])
        self.idle()
        for site in self.sites:
            assert "Traceback" not in site.node.log()
        self._failed = ""
        print(
            f"{what} after {begun - ordered:.1f} s, {at_work} engines at work, for {lasts:.1f} s,"
            f" {through} through with it then; answers after {taken - begun:.1f} s,"
            f" end after {time.monotonic() - begun:.1f} s",
            flush=True,
        )
