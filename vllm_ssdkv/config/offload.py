"""The ``offload`` group of options: the device that attends to contexts where these lie."""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from vllm_ssdkv.base.registry import Registry
from vllm_ssdkv.base.sizes import SIZE_TEXT, size_or_none
from vllm_ssdkv.config.schema import (
    PATH_TEXT,
    Allowed,
    OptionModel,
    PathText,
    Reason,
    checked_name,
    names_text,
)

MAX_THREADS: Final = 1024
MAX_DRIVES: Final = 8

DEVICES: Final[Registry[Any]] = Registry(
    "offload.kind", "vllm_ssdkv.offload.protocol:ContextDeviceClass"
)
"""Devices that attend, by the names that ``offload.kind`` takes."""
DEVICES.register("host", "vllm_ssdkv.offload.host:HostDevice")
DEVICES.register("fpga", "vllm_ssdkv.offload.fpga:FpgaDevice")
DEVICES.register("node", "vllm_ssdkv.offload.node:NodeDevice")

FpgaBackend: TypeAlias = Literal["csim", "rtlsim", "xrt"]
"""Place where the kernels of an FPGA run: see ``docs/fpga.md``."""

DriveProfile: TypeAlias = Literal["instinfer", "smartssd"]
"""A drive of a paper that attends to what lies on it."""


def _threads(value: int | None) -> int | None:
    cpus = os.cpu_count() or 1
    if value is not None and value > cpus:
        raise ValueError(
            f"this machine has {cpus} CPUs, and a thread attends as fast as a CPU: lower it, or "
            "leave it out"
        )
    return value


def _share(value: object) -> object:
    """One problem for the user, where the types below would make two."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return value
    if value == "auto":
        return value
    raise ValueError("it is a part of the whole")


class OffloadFault(OptionModel):
    """One injected fault of the faulty twin."""

    kind: Annotated[
        Literal["error", "rows", "stall", "hold"],
        Field(
            description="Kind of fault. `error` raises an exception in place of an answer, `rows` "
            "answers with one row too few, `stall` never begins, `hold` begins, and never returns "
            "the pages."
        ),
        Reason("There is no harmless choice to default to."),
    ]
    after: Annotated[
        int,
        Field(ge=0, description="Number of calls that succeed before the fault."),
        Reason("The fault begins at once."),
    ] = 0


class OffloadThrottle(OptionModel):
    """Model of a slow device for the throttled twin."""

    bandwidth: Annotated[
        int | None,
        Field(ge=1, description="Bytes of K and V attended to per second; null is no limit."),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason("null: only the given limits are modelled."),
    ] = None
    latency: Annotated[
        float,
        Field(ge=0, le=60, description="Seconds that are added to every answer."),
        Reason("0: only the given limits are modelled."),
    ] = 0.0
    profile: Annotated[
        DriveProfile | None,
        Field(
            description="Drives of a paper, in place of bandwidth and latency: `instinfer` "
            "attends to 6.7 GB/s of its flash, `smartssd` to 3.0. Each attends to its part of "
            "the pages."
        ),
        Reason("null: only the given limits are modelled."),
    ] = None
    drives: Annotated[
        int,
        Field(ge=1, le=MAX_DRIVES, description="Number of the profile's drives, side by side."),
        Reason("1: the profile describes one."),
    ] = 1
    dilation: Annotated[
        float,
        Field(gt=0, description="Factor by which the drives are slower than the profile's."),
        Reason("1: the numbers are used as they are."),
    ] = 1.0

    @model_validator(mode="after")
    def _one_model(self) -> OffloadThrottle:
        rate, drives = {"bandwidth", "latency"}, {"drives", "dilation"}
        unused = self.model_fields_set & (drives if self.profile is None else rate)
        if unused:
            names = ", ".join(sorted(unused))
            if self.profile is None:
                raise ValueError(f"{names} without a profile: name one, or leave it out")
            raise ValueError(f"{names} beside a profile: leave one of the two out")
        return self


_XRT: Final = frozenset({"xclbin", "card"})
_FPGA: Final = _XRT | {"backend", "kernel_deadline", "peer"}
_LOCAL: Final = _FPGA | {"threads", "share", "x_share", "fault", "throttle"}
"""Options without meaning where nodes attend."""


class OffloadConfig(OptionModel):
    """Attention near storage."""

    kind: Annotated[
        str,
        Allowed(names_text(DEVICES)),
        AfterValidator(partial(checked_name, DEVICES)),
        Field(
            description="Device that attends. `host`: threads of this machine attend to the "
            "contexts in DRAM, and to data as it arrives from the drives. `fpga`: the kernels of "
            "an FPGA attend to the same pages, run by a `backend`; they take float16 and "
            "bfloat16, and heads of 64, 128 or 256 channels. `node`: the storage nodes of `nodes` "
            "attend to the data on their drives. Only queries and partial results travel. "
            "`module:Class` is a class of your own (docs/guests.md)."
        ),
        Reason("host: it needs no other hardware."),
    ] = "host"
    backend: Annotated[
        FpgaBackend,
        Field(
            description="Backend that runs the kernels of `fpga`. `csim`: the HLS kernels, "
            "compiled for this machine. `rtlsim`: the RTL, simulated clock by clock: slow, built "
            "by `make fpga`. `xrt`: a card, by its XRT. No backend is replaced by another."
        ),
        Reason("csim: every installation has it."),
    ] = "csim"
    xclbin: Annotated[
        PathText | None,
        Allowed(PATH_TEXT),
        Field(description="File of kernels that v++ has linked for the card of backend `xrt`."),
        Reason("Only the user knows the card, and the place of its kernels."),
    ] = None
    card: Annotated[
        int,
        Field(
            ge=0,
            le=255,
            description="Index of the card of backend `xrt`, as `xbutil` lists it. With several "
            "workers, each takes the next one.",
        ),
        Reason("0: the first card."),
    ] = 0
    peer: Annotated[
        bool,
        Field(
            description="Drives write pages directly into the memory of the FPGA, if the device "
            "permits it; the kernel computes their checksums, and its answer counts once these "
            "are right. It needs `share` 1, pages of 16 tokens, and a store without encryption. "
            "Chosen pages always come through the host's memory."
        ),
        Reason("false: the host's memory, where pages are verified. This works with any card."),
    ] = False
    kernel_deadline: Annotated[
        float,
        Field(
            gt=0,
            le=600,
            description="Seconds after which a call of a kernel takes the FPGA out of use.",
        ),
        Reason("This is far above a call on a card; a simulation takes longer for a long context."),
    ] = 60.0
    threads: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_THREADS,
            description="Maximum number of threads of each worker that attend; no more than the "
            "machine has CPUs.",
        ),
        AfterValidator(_threads),
        Reason(
            "null: half of the CPUs, shared by the workers. They use up DRAM's bandwidth, and "
            "vLLM needs the other CPUs."
        ),
    ] = None
    share: Annotated[
        Literal["auto"] | Annotated[float, Field(ge=0, le=1)],
        Field(
            description="Share of the context that the device attends to; the accelerator attends "
            "to the rest. `auto` measures both, and divides the work so that they end together. "
            "Blocks that are read from drives stay together, and so do the chosen pages of a "
            "layer, which go to the device from 0.5 on."
        ),
        Allowed('"auto" or a number from 0 to 1'),
        BeforeValidator(_share),
        Reason("auto: at least as fast as the faster of the two."),
    ] = "auto"
    x_share: Annotated[
        Literal["auto"] | Annotated[float, Field(ge=0, le=1)],
        Field(
            description="Share of the contexts whose requests store X, the input of each layer's "
            "QKV projection, in place of K and V. This halves slots, writes and reads of a model "
            "without grouped queries. The accelerator projects X again in every step, while the "
            "device attends to the contexts of other requests. Such a context is never found "
            "again. `auto` balances the two by measured rates (docs/internals/xcache.md)."
        ),
        Allowed('"auto" or a number from 0 to 1'),
        BeforeValidator(_share),
        Reason(
            "0: it costs arithmetic of the accelerator in every step, and prefixes are not found "
            "again."
        ),
    ] = 0.0
    fault: Annotated[
        OffloadFault | None,
        Field(description="A fault to inject, for tests of failure handling."),
        Reason("null: none outside tests."),
    ] = None
    throttle: Annotated[
        OffloadThrottle | None,
        Field(description="Model of a slow device, for repeatable benchmarks."),
        Reason("null: none outside benchmarks."),
    ] = None

    @model_validator(mode="after")
    def _of_its_kind(self) -> OffloadConfig:
        given = self.model_fields_set
        if self.kind == "node" and (unused := sorted(given & _LOCAL)):
            raise ValueError(
                f'{", ".join(unused)} beside kind "node": nodes attend to what they have, with '
                "threads of their own (attend_threads); leave it out"
            )
        if self.kind not in {"fpga", "node"} and (unused := sorted(given & _FPGA)):
            raise ValueError(f'{", ".join(unused)} without kind "fpga": name it, or leave it out')
        if self.kind == "fpga" and "threads" in given:
            raise ValueError('threads beside kind "fpga", whose kernels attend: leave it out')
        unused = sorted(given & _XRT)
        if self.kind == "fpga" and self.backend != "xrt" and unused:
            raise ValueError(f'{", ".join(unused)} without backend "xrt": name it, or leave it out')
        if self.backend == "xrt" and self.xclbin is None:
            raise ValueError('backend "xrt" without xclbin: name the file of the kernels')
        if self.peer and self.share != 1:
            raise ValueError("peer with a share other than 1: whoever attends has to compare")
        if self.x_share == "auto" and self.share == 0:
            raise ValueError(
                'x_share "auto" with share 0: a device that never attends has no rate to choose '
                "by; give x_share a number, or leave share out"
            )
        return self

    def threads_of(self, workers: int) -> int:
        """Threads of each of the engine's ``workers``."""
        return self.threads or max(1, (os.cpu_count() or 1) // 2 // workers)
