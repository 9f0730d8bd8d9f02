"""Bytes written to each device over the store's life and today: ``wear.json``.

Workers count what they write; the scheduler adds it up here. A thread writes the file, at most
every :data:`SAVE_INTERVAL_S` and at the end, so a crash loses no more than that. Days are those of
UTC. What counts are the slots: the journal is less than a hundredth of them.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from vllm_ssdkv.base.checksum import NO_DIGITS, check_seal, sealed
from vllm_ssdkv.base.durable_file import read_regular, replace_file
from vllm_ssdkv.base.metrics import Counters

logger = logging.getLogger(__name__)

NAME = "wear.json"
VERSION = 2
_WITHOUT_CHECKSUM = 1
"""Version of the file before it had one; it is read."""
SAVE_INTERVAL_S = 30.0

MAX_DEVICES = 256
"""Devices that the file remembers; of those that the store does not use any more the oldest go."""


class DeviceWear(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Bytes written to one device."""

    written: int = 0
    """Bytes over the store's life, all ranks."""
    day: int = 0
    """Days since 1970-01-01 UTC."""
    today: int = 0
    """Bytes on that day."""


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    version: int = VERSION
    devices: dict[str, DeviceWear] = {}
    checksum: str | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def decode(cls, data: bytes, today: int) -> _File:
        """Counts that a file has; ``today``: days since 1970.

        Raises:
            ValueError: it is damaged, or of another version.
        """
        found = msgspec.json.decode(data, type=cls)
        if found.version != _WITHOUT_CHECKSUM:
            check_seal(data)
        if found.version not in (_WITHOUT_CHECKSUM, VERSION):
            raise ValueError(f"version {found.version}")
        for name, wear in found.devices.items():
            unsure = found.version == _WITHOUT_CHECKSUM and wear.day > today + 1
            if unsure or not 0 <= wear.today <= wear.written or wear.day < 0:
                raise ValueError(f"{name}: {wear}")
        return found


class WearLedger:
    """Adds up what was written. Thread-safe; nothing but :meth:`close` blocks."""

    def __init__(
        self,
        state: Path | None,
        names: Sequence[str],
        counters: Counters,
        *,
        clock: Callable[[], float] = time.time,
        interval_s: float = SAVE_INTERVAL_S,
    ):
        """Read what is known and start the thread. Blocks on I/O. A file that cannot be read is
        logged and counted, and counting begins anew.

        Args:
            state: The state directory; None: nothing survives this process.
            names: Lasting name of each device, such as the UUID of its first data file.
            counters: For ``wear_file_errors``.
            clock: Seconds since 1970.
            interval_s: Time between two writes of the file.
        """
        self._path = None if state is None else state / NAME
        self._names = tuple(names)
        self._counters = counters
        self._clock = clock
        self._interval_s = interval_s
        self._lock = threading.Lock()
        known = self._read()
        self._devices = {name: known.pop(name, DeviceWear()) for name in self._names}
        self._others = dict(list(known.items())[-MAX_DEVICES:])
        self._changed = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ssdkv-wear", daemon=True)
        if self._path is not None:
            self._thread.start()

    def _read(self) -> dict[str, DeviceWear]:
        if self._path is None:
            return {}
        try:
            found = _File.decode(read_regular(self._path), self.day())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._counters.add("wear_file_errors")
            logger.warning(
                "ssdkv: %s cannot be read (%s): bytes written are counted anew", self._path, error
            )
            return {}
        return found.devices

    def add(self, device: int, nbytes: int) -> None:
        """So many bytes were written to a device."""
        today = self.day()
        with self._lock:
            wear = self._devices[self._names[device]]
            if today > wear.day:  # a clock that is set back does not end the day
                wear.day, wear.today = today, 0
            wear.written += nbytes
            wear.today += nbytes
            self._changed = True

    def written(self, device: int) -> int:
        """Bytes written to a device over the store's life."""
        with self._lock:
            return self._devices[self._names[device]].written

    def today(self, device: int) -> int:
        """Bytes written to a device since midnight UTC."""
        today = self.day()
        with self._lock:
            wear = self._devices[self._names[device]]
            return wear.today if wear.day >= today else 0

    def day(self) -> int:
        """Today, in days since 1970-01-01 UTC."""
        now = datetime.datetime.fromtimestamp(self._clock(), tz=datetime.UTC)
        return (now.date() - datetime.date(1970, 1, 1)).days

    def close(self, timeout_s: float = 10.0) -> bool:
        """Write the file and end the thread. Blocks; False when that took too long."""
        self._end.set()
        if self._path is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- the thread ----

    def _run(self) -> None:
        ending = False
        while self._path is not None and not ending:
            ending = self._end.wait(self._interval_s)
            with self._lock:
                changed, self._changed = self._changed, False
                now = _File(devices=self._others | self._devices, checksum=NO_DIGITS)
                data = msgspec.json.encode(now)
            if not changed:
                continue
            try:
                replace_file(self._path, sealed(msgspec.json.format(data, indent=1) + b"\n"))
            except Exception as error:  # noqa: BLE001 - whatever it is, the next one may go well
                self._counters.add("wear_file_errors")
                logger.warning("ssdkv: %s cannot be written: %s", self._path, error)
                with self._lock:
                    self._changed = True
