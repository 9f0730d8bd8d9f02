"""Twin that slows devices down to a model of bandwidth, IOPS and latency.

Data moves at once; only the report waits for the model, so that ratios between devices and
between access patterns hold on any machine that is faster than the model. Each device has a
virtual clock: a request occupies it for max(bytes / bandwidth, 1 / IOPS), one after the other, and
ends ``latency_s`` later. ``dilation`` slows everything in proportion: a drive of 7 GB/s, 80 us and
1 M IOPS dilated 47 times is one of 150 MB/s, 3.75 ms and 21 k IOPS with the same behaviour.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.io_engine import ThrottleRule
from vllm_ssdkv.store.io.engines.protocol import I32, PENDING, U16, U32, U64, Batch, IoEngine, Op


class _ThrottledBatch:
    def __init__(self, inner: Batch, due: NDArray[np.float64], clock: Callable[[], float]) -> None:
        self._inner = inner
        self._due = due
        self._last = float(due.max(initial=-math.inf))
        self._clock = clock

    def done(self) -> bool:
        return self._clock() >= self._last and self._inner.done()

    def wait(self, timeout_s: float) -> bool:
        deadline = self._clock() + max(timeout_s, 0.0)
        if not self._inner.wait(timeout_s):
            return False
        pause = min(deadline, self._last) - self._clock()
        if pause > 0:
            time.sleep(pause)
        return self.done()

    def results(self) -> I32:
        results = self._inner.results()
        results[self._due > self._clock()] = PENDING
        return results


class _Costs:
    """Seconds per byte, per request and behind the transfer, each [devices]."""

    def __init__(self, devices: int, rules: Sequence[ThrottleRule]) -> None:
        self.per_byte = np.zeros(devices)
        self.per_request = np.zeros(devices)
        self.latency = np.zeros(devices)
        for rule in reversed(rules):
            if rule.device is not None and rule.device >= devices:
                raise ConfigError(f"throttle rule: device {rule.device} of {devices}")
            which = slice(None) if rule.device is None else rule.device
            slow = rule.dilation
            self.per_byte[which] = slow / rule.bandwidth if rule.bandwidth else 0.0
            self.per_request[which] = slow / rule.iops if rule.iops else 0.0
            self.latency[which] = slow * rule.latency_s


class ThrottledEngine:
    """See :class:`vllm_ssdkv.store.io.engines.protocol.IoEngine`; wraps any engine.

    Args:
        inner: Engine that does the I/O; closed with this one.
        devices: Number of its devices.
        rules: Models; a device that none fits is not slowed.
        clock: Monotonic seconds; default: the system's.

    Raises:
        ConfigError: a rule names a device that does not exist.
    """

    def __init__(
        self,
        inner: IoEngine,
        devices: int,
        rules: Sequence[ThrottleRule],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._inner = inner
        self._clock = clock or time.monotonic
        self._lock = threading.Lock()
        self._free_at = np.full(devices, -math.inf)
        self._busy_s = np.zeros(devices)
        self._costs = _Costs(devices, rules)

    def change(self, rules: Sequence[ThrottleRule]) -> None:
        """Let requests that are submitted from now on take as long as these rules say.

        Raises:
            ConfigError: a rule names a device that does not exist; nothing is changed.
        """
        self._costs = _Costs(len(self._free_at), rules)

    @property
    def name(self) -> str:
        """``throttled(<inner>)``."""
        return f"throttled({self._inner.name})"

    def submit(self, op: Op, device: U16, offset: U64, length: U32, buffer: U64) -> Batch:
        """See the protocol."""
        inner = self._inner.submit(op, device, offset, length, buffer)
        costs = self._costs
        cost = np.maximum(costs.per_byte[device] * length, costs.per_request[device])
        due = np.empty(len(cost))
        with self._lock:
            now = self._clock()
            for index in np.unique(device):
                mine = device == index
                ends = max(now, float(self._free_at[index])) + np.cumsum(cost[mine])
                self._free_at[index] = ends[-1]
                self._busy_s[index] += cost[mine].sum()
                due[mine] = ends + costs.latency[index]
        return _ThrottledBatch(inner, due, self._clock)

    def busy_s(self) -> NDArray[np.float64]:
        """Seconds of work that each device was given since the start, [devices]; latencies, which
        occupy nobody, left out. A copy."""
        with self._lock:
            return self._busy_s.copy()

    def statistics(self) -> Mapping[str, int]:
        """See the protocol; those of the wrapped engine."""
        return self._inner.statistics()

    def close(self, timeout_s: float) -> bool:
        """See the protocol; does not wait for the model, because no memory depends on it."""
        return self._inner.close(timeout_s)
