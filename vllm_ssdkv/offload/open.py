"""Choice of the device that attends: the one place that turns options into one."""

from __future__ import annotations

import logging

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.offload import OffloadConfig
from vllm_ssdkv.offload.host import HostDevice
from vllm_ssdkv.offload.offloader import Offloader
from vllm_ssdkv.offload.protocol import ContextDevice
from vllm_ssdkv.offload.testing.drive_timing import DRIVES
from vllm_ssdkv.offload.testing.faulty import FaultyDevice
from vllm_ssdkv.offload.testing.throttled import ThrottledDevice
from vllm_ssdkv.offload.testing.throttled_drives import ThrottledDrives

logger = logging.getLogger(__name__)


def open_offloader(
    config: OffloadConfig, workers: int, deadline_s: float, counters: Counters
) -> Offloader:
    """Start the device that the options ask for, inside the twins that they ask for.

    Args:
        config: The options.
        workers: Of the engine, which share the machine.
        deadline_s: See :class:`Offloader`.
        counters: Of the rank.

    Raises:
        UnsupportedError: the native kernels do not load.
    """
    threads = config.threads_of(workers)
    device: ContextDevice = HostDevice(threads)
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
