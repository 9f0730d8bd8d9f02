"""A process that stores blocks is killed at any moment: what it called durable is there, and right.

Nothing is known about the moment of a kill, so the promises are checked that hold at every one:
every block a restart finds is read back and compared; the newest blocks that were reported durable
are found (older ones may be evicted); every slot is either free or ready. Meanwhile the store
writes, evicts, rewrites its journal, serves reads and is scrubbed.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.kit.alone import environment_with_tests
from vllm_ssdkv.base.errors import StoreError, StoreLockedError
from vllm_ssdkv.store.maintenance.fsck import examined
from vllm_ssdkv.store.maintenance.repair import repair

pytestmark = pytest.mark.slow

VICTIM = Path(__file__).with_name("store_victim.py")
ROUNDS = 20
WINDOW = 8
"""Blocks that are stored but not yet durable; so many slots a kill takes from older blocks."""

MOST_BLOCKS = 150
"""Blocks that become durable before a kill, at most: events, since a machine may be slow."""

LONGEST_DELAY_S = 0.03
"""From such an event to the kill."""

LONGEST_START_S = 0.7
DEADLINE_S = 240.0
"""Of a victim's whole life, which takes seconds on a machine that has time for it."""

MIX = ("writes", "evictions", "rewrites", "scrubbed", "reads")
"""What a victim does, and how often, while it is killed."""

Devices = Callable[[int], list[Path]]


@dataclass
class Life:
    """What a victim said before it died."""

    found: list[int] | None = None
    """Blocks that it found when it started; None: it died before it had looked."""
    durable: list[int] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    num_slots: int = 0
    lost: bool = False
    """Whether the journal had lost records when it died."""
    done: dict[str, float] = field(default_factory=dict)
    """How often it has done what a kill shall meet."""


@dataclass
class Ledger:
    """What the store must hold, as far as that is known from outside."""

    devices: list[str]
    state_dir: str
    log: Path
    encrypted: bool = False
    staged: bool = False
    known: list[int] = field(default_factory=list)
    """Blocks that may be found, the oldest first."""
    required: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    next_number: int = 0
    stored: int = 0
    evicted: int = 0
    recovered: int = 0
    checked: int = 0
    losses: int = 0
    done: Counter[str] = field(default_factory=Counter)

    def live(self, blocks: int | None, delay_s: float) -> None:
        """Run a victim and kill it ``delay_s`` after so many blocks became durable, or (None) after
        it was started."""
        life = self._run(WINDOW, blocks, delay_s)
        self._take_in(life)

    def end(self) -> None:
        """Look once more, close properly, and look at what a proper end leaves."""
        for _ in range(2):
            self._take_in(self._run(0, 0, 0.0))
        names = {path.name for path in Path(self.state_dir).iterdir()}
        assert names == {"journal", "store.json", "store.json.copy", self.log.name}
        for device in self.devices:
            names = {path.name for path in Path(device).iterdir()}
            data = {f"rank{rank}.data" for rank in range(2 if self.staged else 1)}
            assert names == {*data, "store.json.copy"}

    def _run(self, window: int, blocks: int | None, delay_s: float) -> Life:
        task = {
            "devices": self.devices,
            "state_dir": self.state_dir,
            "encrypted": self.encrypted,
            "staged": self.staged,
            "candidates": self.known,
            "first": self.next_number,
            "window": window,
        }
        with (
            self.log.open("w+") as log,
            subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", str(VICTIM)],
                env=environment_with_tests(Path(self.state_dir).parent),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            ) as process,
        ):
            # Its log then says where it hung.
            watchdog = threading.Timer(DEADLINE_S, process.send_signal, [signal.SIGABRT])
            watchdog.start()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(task))
            process.stdin.close()
            lines: list[str] = []
            durable = 0
            while blocks is not None and (not lines or durable < blocks):
                lines.append(process.stdout.readline())
                durable += lines[-1].startswith("D")
                if not lines[-1]:
                    break  # it has ended, which its status explains
            if window:
                time.sleep(delay_s)
                process.kill()
            lines += process.stdout.readlines()
            code = process.wait()
            watchdog.cancel()
            log.seek(0)
            # A victim that ends by itself has found something wrong, or was told to end.
            assert code == (-9 if window else 0), log.read()
        life = self._parse(lines)
        self._check(killed=window > 0, lost=life.lost)
        return life

    def _check(self, *, killed: bool, lost: bool) -> None:
        """What lies on the devices now is whole, but for an append that the kill cut off; a journal
        that could not keep up is repaired, as an operator would."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                paths = [Path(path) for path in self.devices]
                with examined(paths, Path(self.state_dir), write=lost) as found:
                    report = found.report
                    if lost:
                        repair(found)
            except StoreLockedError:  # until the last I/O of the victim has ended
                assert time.monotonic() < deadline, "the lock of a killed process stays"
                time.sleep(0.01)
                continue
            except StoreError:
                assert killed
                assert not self.checked, "the store was whole before"
                return
            break
        self.checked += report.checked_slots
        if lost:
            self.losses += 1
            assert report.unrepaired == 0, report.problems
            return
        assert report.bad == 0, report.problems
        assert report.counts.keys() <= ({"journal"} if killed else set()), report.problems

    def _parse(self, lines: list[str]) -> Life:
        life = Life()
        for line in lines:
            if not line.endswith("\n"):
                break  # the kill cut it off
            kind, _, rest = line.partition(" ")
            match kind:
                case "V":
                    life.found = json.loads(rest)
                case "N":
                    life.num_slots = int(rest)
                case "D":
                    life.durable.append(int(rest))
                case "L":
                    life.lost = True
                case "X":
                    life.dropped.add(int(rest))
                case "C":
                    life.done = json.loads(rest)
        return life

    def _take_in(self, life: Life) -> None:
        if life.found is None:
            return
        missing = self.required - set(life.found)
        assert not missing, f"lost: {sorted(missing)} of {sorted(self.required)}"
        self.recovered += len(life.found)
        self.evicted += len(set(self.known) - set(life.found))
        self.stored += len(life.durable)
        self.done.update(life.done)
        order = [*life.found, *life.durable]
        attempted = range(self.next_number, self.next_number + len(life.durable) + WINDOW)
        self.next_number = attempted.stop
        reported = set(life.durable)
        self.known = [*order, *(n for n in attempted if n not in reported)]
        if life.num_slots:
            # The window may have taken slots before the kill. Blocks that were read, were pinned
            # while the journal was rewritten, or became durable unreported, may stand elsewhere in
            # the order.
            newest = order[-(life.num_slots - 4 * WINDOW) :]
            self.required = set() if life.lost else set(newest) - life.dropped


def kill(
    devices: list[Path], rounds: int, seed: int, *, encrypted: bool = False, staged: bool = False
) -> Ledger:
    """Kill a victim again and again over the same store."""
    *data, state = devices
    log = state / "victim.log"
    ledger = Ledger([str(path) for path in data], str(state), log, encrypted, staged)
    source = random.Random(seed)
    for number in range(rounds):
        if number % 5 == 4:
            ledger.live(None, source.uniform(0.0, LONGEST_START_S))
        else:
            ledger.live(source.randint(0, MOST_BLOCKS), source.uniform(0.0, LONGEST_DELAY_S))
    ledger.end()
    print(f"{rounds} kills, seed {seed}: {dict(ledger.done)}, {ledger.checked} slots checked")
    return ledger


def test_a_killed_store_keeps_its_promises(tmp_devices: Devices) -> None:
    ledger = kill(tmp_devices(3), ROUNDS, seed=1)
    # The rounds were as eventful as they are meant to be.
    assert ledger.stored > 5 * ROUNDS
    assert ledger.evicted > 10 * ROUNDS
    assert ledger.recovered > 10 * ROUNDS
    assert ledger.checked > 10 * ROUNDS
    # A life ends after as many blocks as fill about half of a journal between two rewrites.
    assert min(ledger.done[what] for what in MIX) > ROUNDS // 4


def test_a_killed_encrypted_store_keeps_its_promises(tmp_devices: Devices) -> None:
    ledger = kill(tmp_devices(3), ROUNDS // 4, seed=2, encrypted=True)
    assert min(ledger.recovered, ledger.checked) > 0
    assert min(ledger.done[what] for what in MIX) > 0


def test_kills_between_the_writes_of_uneven_stages(tmp_devices: Devices) -> None:
    """A block that one stage has written and the other has not is not found, and leaves nothing."""
    ledger = kill(tmp_devices(3), ROUNDS // 5, seed=3, encrypted=True, staged=True)
    assert min(ledger.recovered, ledger.checked) > 0
    assert min(ledger.done[what] for what in (*MIX, "apart")) > 0


@pytest.mark.soak
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("staged", [False, True], ids=["one rank", "two stages"])
def test_kills_of_a_store(
    tmp_devices: Devices, soak_rounds: int, encrypted: bool, staged: bool
) -> None:
    seed = random.randrange(1 << 30)
    ledger = kill(tmp_devices(3), 2 * soak_rounds, seed, encrypted=encrypted, staged=staged)
    assert min(ledger.done[what] for what in MIX) > soak_rounds // 2
