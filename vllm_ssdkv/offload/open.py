"""Choice of the device that attends: the one place that turns options into one."""

from __future__ import annotations

import logging

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.offload import OffloadConfig
from vllm_ssdkv.fpga_offload.backend import Backend
from vllm_ssdkv.fpga_offload.csim import CsimBackend
from vllm_ssdkv.fpga_offload.description import KernelShape
from vllm_ssdkv.fpga_offload.rtlsim import RtlsimBackend
from vllm_ssdkv.fpga_offload.xrt.backend import XrtBackend
from vllm_ssdkv.offload.fpga import FpgaDevice, SharedBackend
from vllm_ssdkv.offload.host import HostDevice
from vllm_ssdkv.offload.offloader import Offloader
from vllm_ssdkv.offload.protocol import ContextDevice
from vllm_ssdkv.offload.testing.drive_timing import DRIVES
from vllm_ssdkv.offload.testing.faulty import FaultyDevice
from vllm_ssdkv.offload.testing.throttled import ThrottledDevice
from vllm_ssdkv.offload.testing.throttled_drives import ThrottledDrives

logger = logging.getLogger(__name__)


def open_fpga(config: OffloadConfig, shape: KernelShape, rank: int) -> Backend:
    """Open the backend that the options ask for; none stands in for another.

    Args:
        config: The options, of kind "fpga".
        shape: Of the model's kernels.
        rank: Of the worker: each has its own card.

    Raises:
        FpgaError: there is no such backend here, or its kernels do not load; the text says why.
    """
    backend: Backend
    if config.backend == "csim":
        backend = CsimBackend(shape)
    elif config.backend == "rtlsim":
        backend = RtlsimBackend(shape)
    else:
        if config.xclbin is None:
            raise ValueError("the options have checked that there is an xclbin")
        backend = XrtBackend.open(config.xclbin, config.card + rank, shape, config.kernel_deadline)
    logger.info("ssdkv: offload: the FPGA is %s, kernels of %s", backend.name, shape)
    return SharedBackend(backend, config.kernel_deadline)


def open_offloader(
    config: OffloadConfig,
    workers: int,
    deadline_s: float,
    counters: Counters,
    fpga: Backend | None = None,
) -> Offloader:
    """Start the device that the options ask for, inside the twins that they ask for.

    Args:
        config: The options.
        workers: Of the engine, which share the machine.
        deadline_s: See :class:`Offloader`. That of an FPGA's kernel comes on top.
        counters: Of the rank.
        fpga: Of :func:`open_fpga`, with kind "fpga".

    Raises:
        UnsupportedError: the native kernels do not load.
    """
    threads = 1 if fpga is not None else config.threads_of(workers)
    device: ContextDevice
    if fpga is not None:
        deadline_s += config.kernel_deadline
        device = FpgaDevice(fpga, counters)
    else:
        device = HostDevice(threads)
    throttle = config.throttle
    if throttle is not None and throttle.profile is not None:
        timing = DRIVES[throttle.profile]
        device = ThrottledDrives(device, timing, throttle.drives, throttle.dilation)
    elif throttle is not None:
        bandwidth = None if throttle.bandwidth is None else float(throttle.bandwidth)
        device = ThrottledDevice(device, bandwidth, throttle.latency)
    if config.fault is not None:
        device = FaultyDevice(device, config.fault)
    logger.info("ssdkv: offload: contexts are attended to by %s, %d threads", device.name, threads)
    return Offloader(device, deadline_s, counters, config.share)
