"""Settings of an I/O engine and of the twins around it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottleRule:
    """Model of one device, or of all. The first rule that fits a device counts.

    Raises:
        ConfigError: a value is not a positive number.
    """

    device: int | None = None
    """Position of the device; None is every device."""
    bandwidth: float | None = None
    """Bytes per second, of reads and writes together; None is no limit."""
    iops: float | None = None
    """Requests per second; None is no limit."""
    latency_s: float = 0.0
    """Seconds from the end of the transfer to the end of the request."""
    dilation: float = 1.0
    """Factor by which this device is slower than the numbers above."""

    def __post_init__(self) -> None:
        for field in ("bandwidth", "iops", "latency_s", "dilation"):
            value = getattr(self, field)
            if value is None and field in {"bandwidth", "iops"}:
                continue
            low_ok = value >= 0 if field == "latency_s" else value > 0
            if not (low_ok and math.isfinite(value)):
                raise ConfigError(f"throttle rule: {field} is {value!r}, not a positive number")
        if self.device is not None and self.device < 0:
            raise ConfigError(f"throttle rule: device is {self.device}")


FaultKind: TypeAlias = Literal["eio", "enospc", "short", "stall", "corrupt", "latency", "dead"]


FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


MAX_FAULT_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRule:
    """One way to fail, for the requests it matches; the first rule that hits one has it.

    Kinds: ``eio`` and ``enospc`` end a request with that errno; ``short`` moves about half of it;
    ``corrupt`` flips bits of one byte of what was read; ``latency`` delays each request by
    ``seconds``; ``stall`` stops the whole device for ``seconds`` (0: until the rule is taken
    away), and what was held then takes place late; ``dead`` ends every request of the device with
    ENODEV until the rule is taken away.

    Raises:
        ConfigError: a value is of the wrong type, out of range, or has no meaning for the kind.
    """

    kind: FaultKind
    device: int | None = None
    """Position of the device; None is every device."""
    op: Literal["read", "write"] | None = None
    """None is both."""
    after: int = 0
    """Matching requests that pass first."""
    count: int | None = None
    """Requests that are hit before the rule is used up; None is no end."""
    probability: float = 1.0
    """Chance of a matching request to be hit, in (0, 1]."""
    seconds: float = 0.0
    """Duration of ``stall`` and ``latency``."""
    seed: int = 0
    """Seed of the generator behind ``probability`` and ``corrupt``."""

    def __post_init__(self) -> None:
        def number(value: object, low: float, high: float, *, whole: bool) -> bool:
            types = (int,) if whole else (int, float)
            return isinstance(value, types) and not isinstance(value, bool) and low <= value <= high

        def refuse(field: str, expected: str) -> ConfigError:
            return ConfigError(f"fault rule: {field} is {getattr(self, field)!r}, not {expected}")

        if self.kind not in FAULT_KINDS:
            raise refuse("kind", "one of " + ", ".join(FAULT_KINDS))
        if self.op not in {None, "read", "write"}:
            raise refuse("op", '"read", "write" or null')
        if self.device is not None and not number(self.device, 0, 65_534, whole=True):
            raise refuse("device", "the position of a device or null")
        if self.count is not None and not number(self.count, 1, math.inf, whole=True):
            raise refuse("count", "a positive integer or null")
        for field in ("after", "seed"):
            if not number(getattr(self, field), 0, math.inf, whole=True):
                raise refuse(field, "a non-negative integer")
        if not number(self.probability, 0, 1, whole=False) or self.probability == 0:
            raise refuse("probability", "in (0, 1]")
        if not number(self.seconds, 0, MAX_FAULT_SECONDS, whole=False):
            raise refuse("seconds", f"in 0..{MAX_FAULT_SECONDS:.0f}")
        if self.kind == "latency" and self.seconds == 0:
            raise refuse("seconds", "positive, which latency needs")
        if self.kind == "corrupt" and self.op == "write":
            raise refuse("op", "one that corrupt works on: it changes what was read")
        if self.kind == "dead" and (self.op, self.count, self.probability) != (None, None, 1.0):
            raise ConfigError("fault rule: dead takes no op, count or probability: all fails")


EngineKind: TypeAlias = str
"""``auto``, a name of :data:`ENGINES`, or ``module:Class``."""

AUTO: Final = "auto"
"""The fastest one that runs here."""

ENGINES: Final[Registry[Any]] = Registry(
    "io.engine", "vllm_ssdkv.store.io.engines.protocol:EngineClass"
)
for _name in ("uring", "threads", "kvikio", "aiofiles"):
    ENGINES.register(_name, f"vllm_ssdkv.store.io.engines.{_name}:{_name.capitalize()}Engine")
ENGINES.register("noop", "vllm_ssdkv.store.io.testing.noop:NoopEngine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Everything an engine can be told."""

    engine: EngineKind = AUTO
    queue_depth: int = 16
    """Requests in flight per device."""
    faults: tuple[FaultRule, ...] = ()
    fault_file: str | None = None
    """File with more rules, read again whenever it changes."""
    throttle: tuple[ThrottleRule, ...] = ()
