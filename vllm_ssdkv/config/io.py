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
            description="`eio` and `enospc` fail the request with that error, `short` moves half "
            "of it, `corrupt` flips bits of what was read, `latency` delays the request, `stall` "
            "stops the device, `dead` fails everything on it."
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
        Field(description="Direction of the requests that are hit; null is both."),
        Reason("A broken device breaks both."),
    ] = None
    after: Annotated[
        int,
        Field(ge=0, description="Matching requests that pass before the rule begins."),
        Reason("The rule begins at once."),
    ] = 0
    count: Annotated[
        int | None,
        Field(ge=1, description="Requests the rule hits before it is used up; null is no end."),
        Reason("A fault stays until it is taken away."),
    ] = None
    probability: Annotated[
        float,
        Field(gt=0, le=1, description="Chance that a matching request is hit."),
        Reason("Certain faults make tests repeatable."),
    ] = 1.0
    seconds: Annotated[
        float,
        Field(
            ge=0, le=86400, description="Duration of `latency` and `stall`; 0 is no end (stall)."
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
        Field(
            ge=1, description="Bytes per second, of reads and writes together; null is no limit."
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason("Only what is named is modelled."),
    ] = None
    iops: Annotated[
        float | None,
        Field(gt=0, description="Requests per second; null is no limit."),
        Reason("Only what is named is modelled."),
    ] = None
    latency: Annotated[
        float,
        Field(ge=0, le=60, description="Seconds that every request takes longer."),
        Reason("Only what is named is modelled."),
    ] = 0.0
    dilation: Annotated[
        float,
        Field(gt=0, description="Factor by which the device is slower than the other fields say."),
        Reason("The numbers mean what they say."),
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
            description="I/O engine. `auto` is `uring` (io_uring) where the kernel has it, else "
            "`threads` (the native thread pool). `kvikio` and `aiofiles` go through those "
            "packages, to compare with; `noop` completes every request without touching a device "
            "(for benchmarks of everything else). A class of your own is given as `module:Class` "
            "(docs/guests.md)."
        ),
        Reason(
            "auto takes the fastest engine that runs here; the choice, and why, is logged, and "
            "exported in vllm:ssdkv_info."
        ),
    ] = "auto"
    queue_depth: Annotated[
        int,
        Field(ge=1, le=256, description="Requests in flight per device."),
        Reason(
            "16 requests of 512 KiB are 8 MiB in flight, ten times the bandwidth times latency "
            "of a PCIe 4 NVMe drive (7 GB/s at 0.1 ms); more only wait longer."
        ),
    ] = 16
    deadline: Annotated[
        float,
        Field(
            ge=0.1,
            le=600,
            description="Seconds until a request that has not completed counts as failed.",
        ),
        Reason(
            "A healthy drive answers in milliseconds, one that resets itself in seconds; "
            "longer than 10 s is a fault that users should see."
        ),
    ] = 10.0
    staging: Annotated[
        int | None,
        Field(
            ge=MIN_STAGING,
            description="Bytes per worker, a part of dram_gib, through which page mode reads what "
            "requests attend to and DRAM has no room for. An eighth of it is for what selectors "
            "keep beside KV; reuse mode does without. With `encryption`, half as much again "
            "holds slots on their way to the devices, in either mode.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason(
            "null: 64MiB, or less where that is more than a quarter of the DRAM. "
            "A quarter of it is under way from several devices while the next one is attended to. "
            "What is written waits in frames: a larger write buffer is a larger dram_gib."
        ),
        _STAGES,
    ] = None
    direct: Annotated[
        Literal["auto", "on", "off"],
        Field(description="O_DIRECT. `on` makes a file system that refuses it an error."),
        Reason(
            "auto bypasses the page cache, which would hold every byte a second time, and falls "
            "back, with a warning, where the file system cannot."
        ),
    ] = "auto"
    verify: Annotated[
        Literal["all", "sampled"],
        Field(
            description="Which pages of a read from a device are checked against their checksums. "
            "`sampled`: one of 16, beside every slot's header; wrong bytes in the others reach the "
            "model."
        ),
        Reason(
            "all: nothing that we did not write is ever attended to. That costs 0.39 us of CPU per "
            "page of 8 KiB (21 GB/s per core, measured); a sample costs 0.10 us."
        ),
    ] = "all"
    scrub_rate: Annotated[
        int | None,
        Field(
            ge=MIN_SCRUB_RATE,
            description="Bytes per second and worker, at most, at which stored blocks are read "
            "again and verified while nothing else uses the store; null is never.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason(
            "null: every read is verified, so a scrub changes no result. It finds a failing drive "
            "before a request does, at the price of drives that never rest."
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
