"""Health of devices: which are in use, which take writes, and when each is tried again."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.format.slot_geometry import I64
from vllm_ssdkv.store.io.engines.protocol import PENDING, Batch, Op

logger = logging.getLogger(__name__)

_KINDS: Final = {-errno.EIO: "eio", -errno.ENOSPC: "enospc"}

NO_ROOM: Final = (-errno.ENOSPC, -errno.EDQUOT, -errno.EROFS)
"""Results that say something of the file system and nothing of the device."""

CONDEMN_S = 10.0
"""Seconds over which requests fail, without one that succeeds, before a device is condemned."""

FAILURES_TO_CONDEMN: Final = 3
"""Requests that must have failed in this time at least. Retries of a request are not counted."""

FIRST_RETRY_S: Final = 1.0
LAST_RETRY_S: Final = 60.0
"""Pauses before a device is tried again: they double from the first to the last."""

WRONG_TO_QUARANTINE = 8
RIGHT_PER_WRONG = 16
"""Pieces with wrong bytes that condemn a device; so many right ones make up for a wrong one. A few
flipped bits on a large drive do not, a drive or cable that garbles what passes does."""

_MOST_UNREADABLE: Final = 4096


class WriteState(IntEnum):
    """State of the writes to a device.

    ``TRIAL``: they were paused, and the next one shows whether they succeed again. ``NEVER``: the
    device is out of use.
    """

    OPEN = 0
    TRIAL = 1
    PAUSED = 2
    NEVER = 3


class BackOff:
    """Pauses between tries, which double. Not thread-safe.

    Example:
        >>> tries = BackOff()
        >>> tries.failed(100.0)
        >>> tries.due
        101.0
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self.due = 0.0
        """Time of the next try."""

    def failed(self, now: float) -> None:
        """A try has failed. After one that succeeded long ago, pauses begin anew."""
        if now > self.due + LAST_RETRY_S:
            self._pause_s = 0.0
        self._pause_s = min(LAST_RETRY_S, max(FIRST_RETRY_S, 2 * self._pause_s))
        self.due = now + self._pause_s


@dataclass(slots=True)
class _Failures:
    """Failures of one kind of request since the last one that succeeded."""

    count: int = 0
    since: float = 0.0

    def add(self, now: float) -> None:
        if not self.count:
            self.since = now
        self.count += 1

    def last(self, now: float, patience_s: float) -> bool:
        """Check whether they have lasted long enough to condemn a device."""
        return self.count >= FAILURES_TO_CONDEMN and now - self.since >= patience_s


@dataclass(slots=True)
class _Unreadable:
    """Bytes of a slot, from ``begin`` to ``end``, that could not be read."""

    begin: int
    end: int
    failures: _Failures = field(default_factory=_Failures)


@dataclass(slots=True)
class _Device:
    """Record of one device.

    Attributes:
        reads, writes: Failures of these.
        wrong: Score of pieces with wrong bytes.
        for_good: It is not tried again.
        hung: Batches with requests that missed their deadline.
        tries: Instants at which it is tried while it is out of use.
        paused: Its writes are paused, or on trial.
        trials: Instants at which writes are tried again.
        news: The state of its writes has changed since it was told last.
    """

    reads: _Failures = field(default_factory=_Failures)
    writes: _Failures = field(default_factory=_Failures)
    wrong: float = 0.0
    for_good: bool = False
    hung: list[Batch] = field(default_factory=list)
    tries: BackOff = field(default_factory=BackOff)
    paused: bool = False
    trials: BackOff = field(default_factory=BackOff)
    news: bool = False

    def of(self, op: Op) -> _Failures:
        return self.reads if op is Op.READ else self.writes

    def writing(self, now: float) -> WriteState:
        if not self.paused:
            return WriteState.OPEN
        return WriteState.TRIAL if now >= self.trials.due else WriteState.PAUSED


class DeviceHealth:
    """Judges the results of I/O batches. Thread-safe; never blocks.

    - A device that misses a deadline is out of use at once: every further request to it would cost
      the same wait. So is one whose reads have failed for :data:`CONDEMN_S`. Both are tried again
      (:class:`~vllm_ssdkv.store.io.device_prober.DeviceProber`), and come back.
    - Writes are judged apart. Where they fail for want of room they are paused at once, where they
      fail for another reason after :data:`CONDEMN_S`; the device is still read. They are tried
      again by the next block that is to be written, after a pause that doubles each time.
    - A device that returned wrong bytes, or whose data file was removed, stays out of use.
    """

    def __init__(
        self,
        paths: Sequence[str],
        deadline_s: float,
        counters: Counters,
        *,
        patience_s: float | None = None,
        absent: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            paths: Of the devices.
            deadline_s: Of requests, for messages.
            counters: Of this rank.
            patience_s: In place of :data:`CONDEMN_S`.
            absent: Devices that are not there, and stay so; may be behind those of ``paths``.
            clock: Monotonic seconds.
        """
        self.paths = tuple(paths)
        self.writes_since = 0
        """Epoch from which on slots may be written: those of older ones are somebody else's."""
        self.clock = clock
        self._deadline_s = deadline_s
        self._patience_s = CONDEMN_S if patience_s is None else patience_s
        self._counters = counters
        self._lock = threading.Lock()
        self._devices = [_Device() for _ in paths]
        devices = max([len(paths), *(device + 1 for device in absent)])
        self._out_of_use = np.isin(np.arange(devices), list(absent))
        for device in absent:
            if device < len(paths):
                self._devices[device].for_good = True
        self.any_out_of_use = bool(self._out_of_use.any())
        """True if any device is: else nobody needs to ask which."""
        self.any_writes_paused = False
        """True if writes to any device are paused, or on trial: likewise."""
        self._accused = False
        """True where anything is held against a device that a success would clear."""
        self._unreadable: dict[int, _Unreadable] = {}
        """Slots that could not be read, the newest last."""
        self.any_unreadable = False
        """True if there are any."""
        self._news: list[int] = []
        self._returned: list[int] = []
        self.on_trouble: list[Callable[[], None]] = []
        """Called, without blocking, when there is a device :meth:`to_probe`."""

    # ---- results ----

    def judge(
        self,
        op: Op,
        devices: NDArray[np.uint16],
        results: NDArray[np.int32],
        wanted: NDArray[np.uint32],
        batch: Batch,
        *,
        again: bool,
    ) -> NDArray[np.bool_]:
        """Mask of a batch's requests that succeeded, shape [n]; failures are counted per device.

        Args:
            op: Direction.
            devices: Device of each request, [n].
            results: Result of each request (bytes, -errno or ``PENDING``), [n].
            wanted: Bytes asked of each request, [n].
            batch: The batch, whose requests may still be under way.
            again: These are tries of requests that have failed before, and were counted then.
        """
        good: NDArray[np.bool_] = results == wanted.astype(np.int64)
        if good.all():
            self.answered(op, np.bincount(devices) > 0)
            return good
        for device in np.unique(devices).tolist():
            mine = devices == device
            self._judge_device(op, device, results[mine], good[mine], batch, again=again)
        return good

    def answered(self, op: Op, devices: NDArray[np.bool_]) -> None:
        """All requests of a batch succeeded; whether each device, by number, had one."""
        if not self._accused:
            return
        open_again = []
        with self._lock:
            for device in np.flatnonzero(devices).tolist():
                if self._clear(op, device):
                    open_again.append(device)
            self._accused = any(d.reads.count or d.writes.count or d.paused for d in self._devices)
        for device in open_again:
            logger.warning("ssdkv: device %s can be written again", self.paths[device])

    def _clear(self, op: Op, device: int) -> bool:
        """A request succeeded; whether writes go on with it. Lock held."""
        mine = self._devices[device]
        on_trial = op is Op.WRITE and mine.writing(self.clock()) is WriteState.TRIAL
        if on_trial:
            mine.paused, mine.news = False, True
            self.any_writes_paused = any(one.paused for one in self._devices)
        if op is Op.READ or not mine.paused:
            mine.of(op).count = 0
        return on_trial

    def _judge_device(
        self,
        op: Op,
        device: int,
        results: NDArray[np.int32],
        good: NDArray[np.bool_],
        batch: Batch,
        *,
        again: bool,
    ) -> None:
        bad, path = results[~good], self.paths[device]
        name = op.name.lower()
        # Fewer bytes than asked for are one kind of failure, however many they are.
        codes = np.where(bad < 0, bad, 0)
        failed = codes[codes != PENDING]
        no_room = op is Op.WRITE and bool(np.isin(failed, NO_ROOM).any())
        if good.any() and not no_room:
            # One success in the batch shows that the device answers: what failed is a bad sector.
            only = np.zeros(device + 1, dtype=np.bool_)
            only[device] = True
            self.answered(op, only)
        late = len(bad) - len(failed)
        if late:
            self._hangs(device, batch, late, name)
        tells = op is Op.READ or self._begins_to_fail(device)
        why = ""
        for code in np.unique(failed).tolist():
            count = int((failed == code).sum())
            kind = _KINDS.get(code, "other") if code else "short"
            why = os.strerror(-code) if code else "fewer bytes than asked for"
            self._counters.add("io_errors", count, device=path, kind=kind)
            if tells:
                logger.error("ssdkv: device %s: %d %s(s) failed: %s", path, count, name, why)
        if no_room:
            self._pause_writes(device, os.strerror(-int(failed[np.isin(failed, NO_ROOM)][0])))
        elif why and not good.any():
            self._failed(op, device, why, again=again)

    def _begins_to_fail(self, device: int) -> bool:
        """Check whether no write to a device has failed since one succeeded: the pause that may
        follow is told as well."""
        with self._lock:
            mine = self._devices[device]
            return not (mine.paused or mine.writes.count)

    def _hangs(self, device: int, batch: Batch, late: int, name: str) -> None:
        """Requests of a batch have missed their deadline."""
        with self._lock:
            known = bool(self._out_of_use[device])
            self._devices[device].hung.append(batch)
        if not known:  # else nobody waited for the deadline of this batch
            self._counters.add("io_deadline_exceeded", 1)
        self._counters.add("io_errors", late, device=self.paths[device], kind="deadline")
        self.quarantine(device, f"a {name} did not end within {self._deadline_s:g} s")

    def _failed(self, op: Op, device: int, why: str, *, again: bool) -> None:
        """No request of a batch succeeded on a device, for a reason that may be the device's."""
        now = self.clock()
        with self._lock:
            mine = self._devices[device]
            self._accused = True
            failures = mine.of(op)
            if not again:
                failures.add(now)
            lasting = failures.last(now, self._patience_s)
            on_trial = mine.paused
            seconds = now - failures.since
        if op is Op.READ and lasting:
            self.quarantine(device, f"its reads have failed for {seconds:.0f} s, at last: {why}")
        elif op is Op.WRITE and (lasting or on_trial):
            self._pause_writes(device, why)

    # ---- writes ----

    def _pause_writes(self, device: int, why: str) -> None:
        """Pause writes to a device, or pause them for longer after a trial. Logged once."""
        now = self.clock()
        with self._lock:
            mine = self._devices[device]
            if mine.writing(now) is WriteState.PAUSED:
                return
            begins, mine.paused = not mine.paused, True
            self.any_writes_paused = self._accused = True
            mine.trials.failed(now)
            mine.news = True
            if begins:
                mine.tries.failed(now)
        if begins:
            for tell in self.on_trouble:
                tell()
            logger.error(
                "ssdkv: writes to device %s are paused: %s; it is read as before, and writes are "
                "tried again by themselves",
                self.paths[device],
                why,
            )

    def writing(self, device: int) -> WriteState:
        """State of the writes to a device now."""
        if not self.any_writes_paused:
            return WriteState.OPEN
        with self._lock:
            return self._devices[device].writing(self.clock())

    def any_avoided(self, op: Op) -> bool:
        """Check whether any device gets no requests of this kind now."""
        return self.any_out_of_use or (op is Op.WRITE and self.any_writes_paused)

    def avoided(self, op: Op, devices: NDArray[np.uint16]) -> NDArray[np.bool_]:
        """Mask of the devices, [n], that get no requests of this kind now."""
        if not self.any_avoided(op):
            return np.zeros(len(devices), dtype=np.bool_)
        if op is Op.READ:
            return self.out_of_use(devices)
        return self.cannot_write(WriteState.PAUSED)[devices]

    def cannot_write(self, least: WriteState) -> NDArray[np.bool_]:
        """Mask of devices, [devices], that are out of use or whose writes are in this state, or a
        worse one."""
        with self._lock:
            found = self._out_of_use.copy()
            if self.any_writes_paused:
                now = self.clock()
                for number, device in enumerate(self._devices):
                    found[number] |= device.writing(now) >= least
            return found

    def next_trial_s(self) -> float | None:
        """Seconds until writes to a device that are paused are tried again; None: none are."""
        if not self.any_writes_paused:
            return None
        with self._lock:
            now = self.clock()
            left = [d.trials.due - now for d in self._devices if d.paused and d.trials.due > now]
            return min(left, default=None)

    def try_writes_now(self) -> None:
        """Have writes that are paused tried at once: there will be no other time."""
        with self._lock:
            for device in self._devices:
                device.trials.due = min(device.trials.due, self.clock())

    def drain_writing(self) -> list[tuple[int, float]]:
        """Devices whose writes were paused, for longer or anew, or go on, since the last call, and
        seconds until they are tried again; 0: they go on."""
        news = []
        with self._lock:
            now = self.clock()
            for number, device in enumerate(self._devices):
                if device.news:
                    device.news = False
                    left = max(device.trials.due - now, 1e-3) if device.paused else 0.0
                    news.append((number, left))
        return news

    # ---- content ----

    def give_up(self, slots: I64, begin: I64, end: I64) -> NDArray[np.bool_]:
        """Mask of slots, [n], that are given up: devices in use could not read them, again and
        again, for :data:`CONDEMN_S`. Each call is one failure of each of them.

        A device that reads nothing is condemned before: that of a slot which is given up reads
        others.

        Args:
            slots: Slots that could not be read; may repeat.
            begin, end: Bytes of each that were asked for, [n].
        """
        with self._lock:
            now = self.clock()
            found = {}
            for slot, first, last in zip(slots.tolist(), begin.tolist(), end.tolist(), strict=True):
                if slot in found:
                    continue
                mine = self._unreadable.pop(slot, None) or _Unreadable(first, last)
                mine.failures.add(now)
                many = mine.failures.count > FAILURES_TO_CONDEMN
                found[slot] = many and mine.failures.last(now, self._patience_s)
                if not found[slot]:
                    self._unreadable[slot] = mine
                if len(self._unreadable) > _MOST_UNREADABLE:
                    del self._unreadable[next(iter(self._unreadable))]
            self.any_unreadable = bool(self._unreadable)
            return np.array([found[slot] for slot in slots.tolist()], dtype=np.bool_)

    def readable(self, slots: I64, begin: I64, end: I64) -> None:
        """These bytes of slots, [n] each, were read: failures of what lies in them are over."""
        with self._lock:
            for which in np.flatnonzero(np.isin(slots, list(self._unreadable))).tolist():
                mine = self._unreadable.get(int(slots[which]))
                if mine is not None and begin[which] <= mine.begin and mine.end <= end[which]:
                    del self._unreadable[int(slots[which])]
            self.any_unreadable = bool(self._unreadable)

    @property
    def content_accused(self) -> bool:
        """Check whether wrong bytes are held against a device; right ones make up for them."""
        with self._lock:
            return any(device.wrong for device in self._devices)

    def judge_content(self, right: NDArray[np.intp], wrong: NDArray[np.intp]) -> None:
        """Take in what checksums said of bytes that were read.

        Args:
            right: Devices of pieces that were as they should be, one entry each.
            wrong: Devices of those that were not.
        """
        devices = len(self.paths)
        good = np.bincount(right, minlength=devices)
        bad = np.bincount(wrong, minlength=devices)
        condemned = []
        with self._lock:
            for number, device in enumerate(self._devices):
                score = device.wrong - good[number] / RIGHT_PER_WRONG
                device.wrong = max(0.0, score) + float(bad[number])
                if device.wrong >= WRONG_TO_QUARANTINE:
                    condemned.append(number)
        for number in condemned:
            reason = "what it returns does not match its checksums"
            self.quarantine(number, reason, for_good=True)

    # ---- out of use, and back ----

    def quarantine(self, device: int, reason: str, *, for_good: bool = False) -> None:
        """Take a device out of use until it is back, or until restart. Logged and counted once."""
        with self._lock:
            mine = self._devices[device]
            known, mine.for_good = bool(self._out_of_use[device]), mine.for_good or for_good
            if known:
                return
            self._out_of_use[device] = self.any_out_of_use = True
            self._news.append(device)
            self._returned = [one for one in self._returned if one != device]
            mine.tries.failed(self.clock())
        self._counters.add("device_lost", 1, device=self.paths[device])
        path = self.paths[device]
        if for_good:
            logger.error(
                "ssdkv: device %s is out of use until restart: %s; what lay nowhere else is "
                "computed again",
                path,
                reason,
            )
            return
        logger.error(
            "ssdkv: device %s is out of use until it is back: %s; what lies nowhere else is "
            "computed again meanwhile",
            path,
            reason,
        )
        for tell in self.on_trouble:
            tell()

    def restore(self, device: int) -> bool:
        """Use a device again that was out of use; False: it was in use, or it is out for good."""
        with self._lock:
            mine = self._devices[device]
            if not self._out_of_use[device] or mine.for_good:
                return False
            self._out_of_use[device] = False
            self.any_out_of_use = bool(self._out_of_use.any())
            mine.reads.count = 0
            mine.hung.clear()
            # Their failures may have been this device's, whose fault is over.
            self._unreadable.clear()
            self.any_unreadable = False
            self._returned.append(device)
        self._counters.add("device_returned", 1, device=self.paths[device])
        logger.warning("ssdkv: device %s is back, and in use again", self.paths[device])
        return True

    def to_probe(self) -> tuple[list[int], float | None]:
        """Devices that are to be read now, and seconds until there may be others, None: all is
        well. They are out of use, and all that hung in them has ended; or their writes are paused:
        whoever avoids a device must see by itself when it fails altogether."""
        if not (self.any_out_of_use or self.any_writes_paused):
            return [], None
        found, pause_s = [], None
        with self._lock:
            now = self.clock()
            for number, device in enumerate(self._devices):
                if device.for_good or not (self._out_of_use[number] or device.paused):
                    continue
                device.hung = [batch for batch in device.hung if not batch.done()]
                left = max(device.tries.due - now, FIRST_RETRY_S if device.hung else 0.0)
                if left <= 0:
                    found.append(number)
                pause_s = left if pause_s is None else min(pause_s, left)
        return found, pause_s

    def probed(self, device: int, *, right: bool) -> None:
        """A device of :meth:`to_probe` was read; whether it is as it should be."""
        with self._lock:
            mine, in_use = self._devices[device], not self._out_of_use[device]
            if in_use or not right:
                mine.tries.failed(self.clock())
            if in_use and right:
                mine.reads.count = 0
        if right:
            self.restore(device)
        elif in_use:
            self._failed(Op.READ, device, "its superblock cannot be read", again=False)

    @property
    def quarantined(self) -> frozenset[int]:
        """Devices out of use."""
        with self._lock:
            return frozenset(np.flatnonzero(self._out_of_use[: len(self.paths)]).tolist())

    def out_of_use(self, devices: NDArray[np.uint16]) -> NDArray[np.bool_]:
        """Mask of the devices, [n], that are out of use."""
        if not self.any_out_of_use:
            return np.zeros(len(devices), dtype=np.bool_)
        with self._lock:
            return self._out_of_use[devices]

    def drain_events(self) -> list[int]:
        """Devices quarantined since the last call."""
        with self._lock:
            news, self._news = self._news, []
            return news

    def drain_returns(self) -> list[int]:
        """Devices that came back since the last call, and are in use."""
        with self._lock:
            returned, self._returned = self._returned, []
            return returned
