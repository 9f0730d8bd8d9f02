"""Twin that fails on purpose, as told by rules or by a file that a test changes while we run."""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.io_engine import FaultRule
from vllm_ssdkv.store.io.engines.protocol import PENDING, U16, U32, U64, Batch, IoEngine, Op
from vllm_ssdkv.store.io.testing.faults import FaultFile, RuleState, carry_over
from vllm_ssdkv.store.io.testing.held import Corruption, FaultyBatch, Hold, Part, Requests
from vllm_ssdkv.store.memory.arena import Arena

__all__ = ["FaultRule", "FaultyEngine"]

logger = logging.getLogger(__name__)

_ERRNO = {"eio": errno.EIO, "enospc": errno.ENOSPC, "dead": errno.ENODEV}
_ALIGN = 4096
_FILE_POLL_S = 0.02  # how soon a stall ends after its rule was taken out of the file


class FaultyEngine:
    """See :class:`vllm_ssdkv.store.io.engines.protocol.IoEngine`; wraps any engine.

    Requests that are held go to the inner engine only when the delay is over, so their bytes land
    late, as those of a hung device do. A thread of this class, which exists from the first such
    request on, does that.

    Args:
        inner: Engine that does the I/O; closed with this one.
        devices: Number of its devices.
        arena: Its memory, where ``corrupt`` changes bytes.
        rules: Rules that stay.
        fault_file: Path of further rules, see :class:`FaultFile`.

    Raises:
        ConfigError: a rule names a device that does not exist, or the file is malformed. Later, a
            malformed file is counted (``fault_file_errors``), logged, and changes nothing.
    """

    def __init__(
        self,
        inner: IoEngine,
        devices: int,
        arena: Arena,
        rules: Sequence[FaultRule],
        fault_file: str | Path | None = None,
    ) -> None:
        self._inner = inner
        self._devices = devices
        self._memory = arena.view(0, arena.nbytes)
        self._rules = tuple(rules)
        self._file = None if fault_file is None else FaultFile(fault_file)
        from_file = () if self._file is None else self._file.read()
        self._states = carry_over((*self._rules, *from_file), [], devices)
        self._stalls: dict[int, Hold] = {}  # by device
        self._held: list[Part] = []
        self._counts: Counter[str] = Counter()
        self._closed = False
        self._given_up = False
        self._changed = threading.Condition()  # guards all of the above
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """``faulty(<inner>)``."""
        return f"faulty({self._inner.name})"

    def submit(self, op: Op, device: U16, offset: U64, length: U32, buffer: U64) -> Batch:
        """See the protocol."""
        arrays = (
            np.ascontiguousarray(device),
            np.ascontiguousarray(offset),
            np.array(length),  # short rules change it
            np.ascontiguousarray(buffer),
        )
        _io.check_requests(*arrays, self._devices, self._memory.size)
        requests = Requests(Op(op), *arrays)
        with self._changed:
            if self._closed:
                raise ValueError("the engine is closed")
            self._look_at_file()
            batch = self._inject(requests)
        return self._inner.submit(requests.op, *arrays) if batch is None else batch

    def statistics(self) -> Mapping[str, int]:
        """See the protocol; those of the wrapped engine, plus what never reached it.

        And ``fault_<kind>.<device>``: requests that a rule of that kind hit; ``fault_file_reloads``
        and ``fault_file_errors``.
        """
        with self._changed:
            counts = Counter(self._counts)
        counts.update(self._inner.statistics())
        return counts

    def close(self, timeout_s: float) -> bool:
        """See the protocol. Requests that are still held then stay pending for ever."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closed = True
            patience = min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
            self._changed.wait_for(lambda: not self._held or self._given_up, patience)
            abandoned = bool(self._held)
            self._given_up = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        return self._inner.close(max(deadline - time.monotonic(), 0.0)) and not abandoned

    def _inject(self, requests: Requests) -> FaultyBatch | None:
        """Apply the rules to these requests; None if nothing happens to any of them."""
        rule_of = self._judge(requests)
        now = time.monotonic()
        self._stalls = {d: hold for d, hold in self._stalls.items() if hold.until > now}
        results = np.full(len(rule_of), PENDING, dtype=np.int32)
        holds: list[Hold] = []
        hold_of = np.full(len(rule_of), -1)
        corruptions: list[Corruption] = []
        for number in np.unique(rule_of[rule_of >= 0]):
            state, hit = self._states[number], np.flatnonzero(rule_of == number)
            kind, devices = state.rule.kind, requests.device[hit]
            self._count(f"fault_{kind}", devices)
            if kind in _ERRNO:
                results[hit] = -_ERRNO[kind]
            elif kind == "short":
                shorter = requests.length[hit] // 2 // _ALIGN * _ALIGN
                requests.length[hit] = shorter
                results[hit[shorter == 0]] = 0
            elif kind == "corrupt":
                corruptions += [_corruption(requests, int(index), state) for index in hit]
            elif kind == "latency":
                hold_of[hit] = len(holds)
                holds.append(Hold(state, now + state.rule.seconds))
            else:
                until = now + (state.rule.seconds or math.inf)
                for device in np.unique(devices):
                    # A device that already stands still is not stopped once more.
                    self._stalls.setdefault(int(device), Hold(state, until))
        for device, hold in self._stalls.items():
            hold_of[requests.device == device] = len(holds)
            holds.append(hold)
        if (rule_of < 0).all() and (hold_of < 0).all():
            return None
        self._count_ended(requests, results)
        parts = self._start(requests, results == PENDING, hold_of, holds)
        return FaultyBatch(results, parts, corruptions, self._memory)

    def _judge(self, requests: Requests) -> NDArray[np.int64]:
        """Number of the rule that hits each request, or -1; shape [n]."""
        rule_of = np.full(len(requests.device), -1)
        for number, state in enumerate(self._states):
            rule = state.rule
            # Corruption changes what was read.
            wanted = "read" if rule.kind == "corrupt" else rule.op
            if wanted is not None and wanted != requests.op.name.lower():
                continue
            match = rule_of < 0
            if rule.device is not None:
                match &= requests.device == rule.device
            candidates = np.flatnonzero(match)
            rule_of[candidates[state.fire(len(candidates))]] = number
        return rule_of

    def _start(
        self,
        requests: Requests,
        open_: NDArray[np.bool_],
        hold_of: NDArray[np.int64],
        holds: Sequence[Hold],
    ) -> list[Part]:
        parts = []
        for number in np.unique(hold_of[open_]):
            which = np.flatnonzero(open_ & (hold_of == number))
            part = Part(which, requests.take(which), holds[number] if number >= 0 else None)
            parts.append(part)
            if part.hold is None:
                part.start(self._inner)
                continue
            self._held.append(part)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._start_held, name="ssdkv-faulty", daemon=True
                )
                self._thread.start()
        return parts

    def _start_held(self) -> None:
        """Body of the thread."""
        with self._changed:
            while not self._given_up:
                self._look_at_file()
                now = time.monotonic()
                due = [part for part in self._held if part.hold and part.hold.until <= now]
                if due:
                    self._held = [part for part in self._held if part not in due]
                    for part in due:
                        part.start(self._inner)
                    self._changed.notify_all()
                    continue
                next_due = min((p.hold.until for p in self._held if p.hold), default=math.inf)
                if self._held and self._file is not None:
                    next_due = min(next_due, now + _FILE_POLL_S)
                self._changed.wait(None if next_due == math.inf else next_due - now)

    def _look_at_file(self) -> None:
        if self._file is None or not self._file.changed():
            return
        try:
            states = carry_over((*self._rules, *self._file.read()), self._states, self._devices)
        except ConfigError as error:
            self._counts["fault_file_errors"] += 1
            logger.warning("ignored, the rules stay as they were: %s", error)
            return
        self._counts["fault_file_reloads"] += 1
        self._states = states
        holds = [*self._stalls.values(), *(part.hold for part in self._held if part.hold)]
        for hold in holds:
            if hold.state not in states:
                hold.until = -math.inf

    def _count(self, what: str, devices: U16) -> None:
        for device, number in zip(*np.unique(devices, return_counts=True), strict=True):
            self._counts[f"{what}.{device}"] += int(number)

    def _count_ended(self, requests: Requests, results: NDArray[np.int32]) -> None:
        """Count requests that no inner engine will see."""
        direction = requests.op.name.lower()
        self._count(f"{direction}_submitted", requests.device[results != PENDING])
        self._count(f"{direction}_requests", requests.device[results != PENDING])
        self._count(f"{direction}_errors", requests.device[(results != PENDING) & (results < 0)])


def _corruption(requests: Requests, index: int, state: RuleState) -> Corruption:
    position = int(requests.buffer[index]) + int(state.random.integers(requests.length[index]))
    return index, position, int(state.random.integers(1, 256))
