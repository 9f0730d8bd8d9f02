"""Health of devices: consecutive failures and missed deadlines take one out of use."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.io.engines.protocol import PENDING

logger = logging.getLogger(__name__)

_KINDS = {-errno.EIO: "eio", -errno.ENOSPC: "enospc"}

FAILURES_TO_QUARANTINE = 3
"""Batches in a row of which a device completed no request; they condemn it."""


WRONG_TO_QUARANTINE = 8
RIGHT_PER_WRONG = 16
"""Pieces with wrong bytes that condemn a device; so many right ones make up for a wrong one. A few
flipped bits on a large drive do not, a drive or cable that garbles what passes does."""


class DeviceHealth:
    """Judges the results of I/O batches. Thread-safe; never blocks.

    A device that misses a deadline is quarantined at once: every further request to it would cost
    the same wait. A quarantined device stays out of use until the engine is restarted; one of a
    node that was gone may come back (:meth:`restore`), unless what it returned was wrong.
    """

    def __init__(
        self,
        paths: Sequence[str],
        deadline_s: float,
        counters: Counters,
        *,
        failures_to_quarantine: int = FAILURES_TO_QUARANTINE,
        absent: Collection[int] = (),
        returning: bool = False,
    ):
        """``absent``: devices that are not there, and stay so; may be behind those of ``paths``.
        ``returning``: devices may come back."""
        self.paths = tuple(paths)
        self._deadline_s = deadline_s
        self._failures_to_quarantine = failures_to_quarantine
        self._counters = counters
        self._lock = threading.Lock()
        self._in_a_row = [0] * len(paths)
        self._wrong = [0.0] * len(paths)
        devices = max([len(paths), *(device + 1 for device in absent)])
        self._out_of_use = np.isin(np.arange(devices), list(absent))
        self.any_out_of_use = bool(self._out_of_use.any())
        """True if any device is: else nobody needs to ask which."""
        self._news: list[int] = []
        self._returning = returning
        self._returned: list[int] = []
        self._condemned: set[int] = set()
        """Devices that do not come back, for what they returned was wrong."""

    def judge(
        self,
        devices: NDArray[np.uint16],
        results: NDArray[np.int32],
        wanted: NDArray[np.uint32],
        operation: str,
    ) -> NDArray[np.bool_]:
        """Mask of a batch's requests that succeeded, shape [n]; failures are counted per device.

        Args:
            devices: Device of each request, [n].
            results: Result of each request (bytes, -errno or ``PENDING``), [n].
            wanted: Bytes asked of each request, [n].
            operation: ``read`` or ``write``, for the log.
        """
        good: NDArray[np.bool_] = results == wanted.astype(np.int64)
        if good.all():
            self.answered(np.bincount(devices) > 0)
            return good
        for device in np.unique(devices).tolist():
            mine = devices == device
            self._judge_device(device, results[mine], good[mine], operation)
        return good

    def answered(self, devices: NDArray[np.bool_]) -> None:
        """All requests of a batch succeeded; whether each device, by number, had one."""
        with self._lock:
            if any(self._in_a_row):
                for device in np.flatnonzero(devices).tolist():
                    self._in_a_row[device] = 0

    def _judge_device(
        self,
        device: int,
        results: NDArray[np.int32],
        good: NDArray[np.bool_],
        operation: str,
    ) -> None:
        bad, path = results[~good], self.paths[device]
        with self._lock:
            # One success in the batch shows that the device answers: what failed is a bad sector.
            self._in_a_row[device] = 0 if good.any() else self._in_a_row[device] + 1
            failures = self._in_a_row[device]
            known = bool(self._out_of_use[device])
        why = ""
        late = int((bad == PENDING).sum())
        if late:
            if not known:  # else nobody waited for the deadline of this batch
                self._counters.add("io_deadline_exceeded", 1)
            self._counters.add("io_errors", late, device=path, kind="deadline")
            self.quarantine(device, f"a {operation} did not end within {self._deadline_s:g} s")
        # Fewer bytes than asked for are one kind of failure, however many they are.
        codes = np.where(bad < 0, bad, 0)
        for code in np.unique(codes[codes != PENDING]).tolist():
            count = int((codes == code).sum())
            kind = _KINDS.get(code, "other") if code else "short"
            why = os.strerror(-code) if code else "fewer bytes than asked for"
            self._counters.add("io_errors", count, device=path, kind=kind)
            logger.error("ssdkv: device %s: %d %s(s) failed: %s", path, count, operation, why)
        if why and failures >= self._failures_to_quarantine:
            self.quarantine(device, f"{failures} failures in a row, the last one: {why}")

    @property
    def content_accused(self) -> bool:
        """Check whether wrong bytes are held against a device; right ones make up for them."""
        with self._lock:
            return any(self._wrong)

    def judge_content(self, right: NDArray[np.intp], wrong: NDArray[np.intp]) -> None:
        """Take in what checksums said of bytes that were read.

        Args:
            right: Devices of pieces that were as they should be, one entry each.
            wrong: Devices of those that were not.
        """
        devices = len(self.paths)
        good = np.bincount(right, minlength=devices)
        bad = np.bincount(wrong, minlength=devices)
        with self._lock:
            for device in range(devices):
                score = self._wrong[device] - good[device] / RIGHT_PER_WRONG
                self._wrong[device] = max(0.0, score) + float(bad[device])
            condemned = [d for d in range(devices) if self._wrong[d] >= WRONG_TO_QUARANTINE]
            self._condemned.update(condemned)
        for device in condemned:
            self.quarantine(device, "what it returns does not match its checksums")

    def quarantine(self, device: int, reason: str) -> None:
        """Take a device out of use until restart, or until it is back. Logged and counted once."""
        with self._lock:
            if self._out_of_use[device]:
                return
            self._out_of_use[device] = self.any_out_of_use = True
            self._news.append(device)
            self._returned = [one for one in self._returned if one != device]
            back = self._returning and device not in self._condemned
        self._counters.add("device_lost", 1, device=self.paths[device])
        path = self.paths[device]
        if back:
            logger.error(
                "ssdkv: device %s is out of use until it is back: %s; what lay nowhere else is "
                "computed again",
                path,
                reason,
            )
        else:
            logger.error(
                "ssdkv: device %s is out of use until restart: %s; what lay nowhere else is "
                "computed again",
                path,
                reason,
            )

    def restore(self, device: int) -> bool:
        """Use a device again that was out of use for it did not answer; False: it was in use, or
        what it returned was wrong."""
        with self._lock:
            if not self._out_of_use[device] or device in self._condemned:
                return False
            self._out_of_use[device] = False
            self.any_out_of_use = bool(self._out_of_use.any())
            self._in_a_row[device] = 0
            self._returned.append(device)
        self._counters.add("device_returned", 1, device=self.paths[device])
        logger.warning("ssdkv: device %s is back, and in use again", self.paths[device])
        return True

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
