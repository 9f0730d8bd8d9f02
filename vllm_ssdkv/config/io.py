"""The ``io`` group of options: the engine, its limits, and the twins that fail or slow down."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.sizes import MIB, SIZE_TEXT, size_or_none
from vllm_ssdkv.config.io_engine import (
    AUTO,
    ENGINES,
    EngineKind,
    EngineOptions,
    FaultRule,
    ThrottleRule,
)
from vllm_ssdkv.config.schema import (
    PATH_TEXT,
    Allowed,
    Condition,
    OptionModel,
    PathText,
    Reason,
    checked_name,
    names_text,
)

MIN_STAGING: Final = 4 * MIB
MIN_SCRUB_RATE: Final = 1 * MIB


_STAGES: Final = Condition(
    lambda config, _: config.stages, 'mode is "page", or encryption is given a key'
)
_LASTS: Final = Condition(
    lambda _, fault: fault.kind in {"latency", "stall"}, 'kind is "latency" or "stall"'
)
_RANDOM: Final = Condition(
    lambda _, fault: fault.probability < 1 or fault.kind == "corrupt",
    'probability is below 1, or kind "corrupt"',
)


class FaultConfig(OptionModel):
    """One injected fault of the faulty twin engine, a ``FaultRule``."""

    kind: Annotated[
        Literal["eio", "enospc", "short", "stall", "corrupt", "latency", "dead"],
        Field(
            description="Kind of fault. `eio` and `enospc` fail the request with that error, "
            "`short` transfers half of it, `corrupt` flips bits of the data read, `latency` "
            "delays the request, `stall` stops the device, `dead` fails every request on it."
        ),
        Reason("There is no harmless choice to default to."),
    ]
    device: Annotated[
        int | None,
        Field(ge=0, description="Position of the device in `devices`; null is every device."),
        Reason("Every device, like a fault of the controller."),
    ] = None
    op: Annotated[
        Literal["read", "write"] | None,
        Field(description="Direction of the affected requests; null is both."),
        Reason("A broken device breaks both."),
    ] = None
    after: Annotated[
        int,
        Field(ge=0, description="Number of matching requests that pass before the rule begins."),
        Reason("The rule begins at once."),
    ] = 0
    count: Annotated[
        int | None,
        Field(ge=1, description="Number of requests that the rule affects; null is no limit."),
        Reason("A fault stays until it is removed."),
    ] = None
    probability: Annotated[
        float,
        Field(gt=0, le=1, description="Probability that a matching request is affected."),
        Reason("Certain faults make tests repeatable."),
    ] = 1.0
    seconds: Annotated[
        float,
        Field(
            ge=0,
            le=86400,
            description="Duration of `latency` and `stall` in seconds; 0 is no end (stall).",
        ),
        Reason("The other kinds take no time."),
        _LASTS,
    ] = 0.0
    seed: Annotated[
        int,
        Field(ge=0, description="Seed of the random numbers behind `probability` and `corrupt`."),
        Reason("The same faults in every run."),
        _RANDOM,
    ] = 0

    @model_validator(mode="after")
    def _has_a_meaning(self) -> FaultConfig:
        try:
            self.rule()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    def rule(self) -> FaultRule:
        """The same as the engine's own dataclass.

        Raises:
            ConfigError: the fields contradict each other.
        """
        return FaultRule(**dict(self))


class ThrottleConfig(OptionModel):
    """Model of a slow device for the throttled twin engine, a ``ThrottleRule``."""

    device: Annotated[
        int | None,
        Field(ge=0, description="Position of the device in `devices`; null is every device."),
        Reason("Equal devices are the common case."),
    ] = None
    bandwidth: Annotated[
        int | None,
        Field(ge=1, description="Bytes per second, reads and writes together; null is no limit."),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason("null: only the given limits are modelled."),
    ] = None
    iops: Annotated[
        float | None,
        Field(gt=0, description="Requests per second; null is no limit."),
        Reason("null: only the given limits are modelled."),
    ] = None
    latency: Annotated[
        float,
        Field(ge=0, le=60, description="Seconds that are added to every request."),
        Reason("0: only the given limits are modelled."),
    ] = 0.0
    dilation: Annotated[
        float,
        Field(gt=0, description="Factor by which the device is slower than the other fields say."),
        Reason("1: the numbers are used as they are."),
    ] = 1.0

    def rule(self) -> ThrottleRule:
        """The same as the engine's own dataclass."""
        return ThrottleRule(
            device=self.device,
            bandwidth=None if self.bandwidth is None else float(self.bandwidth),
            iops=self.iops,
            latency_s=self.latency,
            dilation=self.dilation,
        )


class IoConfig(OptionModel):
    """Transfer of bytes between the devices and memory."""

    engine: Annotated[
        EngineKind,
        Allowed(names_text(ENGINES, AUTO)),
        AfterValidator(partial(checked_name, ENGINES, other=AUTO)),
        Field(
            description="I/O engine. `auto` is `uring` (io_uring) if the kernel has it, else "
            "`threads` (the native thread pool). `kvikio` and `aiofiles` use those packages, for "
            "comparison; `noop` completes every request without touching a device, to benchmark "
            "everything else. `module:Class` is a class of your own (docs/guests.md)."
        ),
        Reason(
            "auto takes the fastest engine that runs here; the choice and its reason are logged, "
            "and exported in vllm:ssdkv_info."
        ),
    ] = "auto"
    queue_depth: Annotated[
        int,
        Field(ge=1, le=256, description="Number of requests in flight per device."),
        Reason(
            "16: requests of 512 KiB make 8 MiB in flight, ten times the bandwidth-delay product "
            "of a PCIe 4 NVMe drive (7 GB/s at 0.1 ms); more only wait longer."
        ),
    ] = 16
    deadline: Annotated[
        float,
        Field(
            ge=0.1,
            le=600,
            description="Seconds after which an unfinished request counts as failed.",
        ),
        Reason(
            "10: a healthy drive answers in milliseconds, one that resets itself in seconds; "
            "longer than 10 s is a fault that users should see."
        ),
    ] = 10.0
    staging: Annotated[
        int | None,
        Field(
            ge=MIN_STAGING,
            description="Read buffer per worker, part of dram_gib. Page mode reads contexts "
            "through it that are not in DRAM; reuse mode does not use it. An eighth of it holds "
            "the selectors' data. With `encryption`, half as much again holds slots on their way "
            "to the devices.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason(
            "null: 64MiB, or a quarter of the DRAM if that is less. Writes wait in frames: for a "
            "larger write buffer, raise dram_gib."
        ),
        _STAGES,
    ] = None
    direct: Annotated[
        Literal["auto", "on", "off"],
        Field(description="O_DIRECT. `on` makes it an error if a file system refuses it."),
        Reason(
            "auto bypasses the page cache, which would hold every byte a second time, and falls "
            "back with a warning if the file system cannot."
        ),
    ] = "auto"
    verify: Annotated[
        Literal["all", "sampled"],
        Field(
            description="Pages of a read whose checksums are verified. `sampled` verifies one of "
            "16 and the header of every slot; wrong bytes in the others reach the model."
        ),
        Reason(
            "all: only bytes that ssdkv wrote are ever attended to. This costs 0.39 us of CPU per "
            "page of 8 KiB (21 GB/s per core, measured); a sample costs 0.10 us."
        ),
    ] = "all"
    scrub_rate: Annotated[
        int | None,
        Field(
            ge=MIN_SCRUB_RATE,
            description="Maximum number of bytes per second and worker at which stored blocks are "
            "read again and verified while nothing else uses the store; null is never.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason(
            "null: every read is verified, so a scrub changes no result. It finds a failing drive "
            "before a request does, but then drives never rest."
        ),
    ] = None
    faults: Annotated[
        tuple[FaultConfig, ...],
        Field(strict=False, description="Faults to inject, for tests of failure handling."),
        Reason("None outside tests."),
    ] = ()
    fault_file: Annotated[
        PathText | None,
        Allowed(PATH_TEXT),
        Field(description="JSON file with a list of such faults, read again whenever it changes."),
        Reason("None outside tests."),
    ] = None
    throttle: Annotated[
        tuple[ThrottleConfig, ...],
        Field(strict=False, description="Models of slow devices, for repeatable benchmarks."),
        Reason("None outside benchmarks."),
    ] = ()

    def engine_options(self) -> EngineOptions:
        """The same settings as the engine's own dataclass."""
        return EngineOptions(
            engine=self.engine,
            queue_depth=self.queue_depth,
            faults=tuple(fault.rule() for fault in self.faults),
            fault_file=self.fault_file,
            throttle=tuple(throttle.rule() for throttle in self.throttle),
        )
