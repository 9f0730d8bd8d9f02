"""Choice of the device that attends: the one place that turns options into one."""

from __future__ import annotations

import logging

from vllm_ssdkv.config.offload import DEVICES
from vllm_ssdkv.offload.offloader import Offloader
from vllm_ssdkv.offload.protocol import ContextDevice, ContextDeviceClass, DeviceSetup

logger = logging.getLogger(__name__)


def open_offloader(setup: DeviceSetup, deadline_s: float) -> Offloader:
    """Open the device that the options name, inside the twins that they ask for.

    Args:
        setup: See :class:`DeviceSetup`.
        deadline_s: See :class:`Offloader`.

    Raises:
        SSDKVError: the device cannot be opened.
    """
    options = setup.options
    found: type[ContextDeviceClass] = DEVICES.resolve(options.kind)
    device = _inside_twins(found.open(setup), setup)
    logger.info("ssdkv: offload: contexts are attended to by %s", device.name)
    return Offloader(device, deadline_s, setup.counters, options.share)


def _inside_twins(device: ContextDevice, setup: DeviceSetup) -> ContextDevice:
    options = setup.options
    throttle = options.throttle
    if throttle is not None and throttle.profile is not None:
        from vllm_ssdkv.offload.testing.drive_timing import DRIVES
        from vllm_ssdkv.offload.testing.throttled_drives import ThrottledDrives

        device = ThrottledDrives(
            device,
            DRIVES[throttle.profile],
            throttle.drives,
            throttle.dilation,
            slot_bytes=setup.opened.files.geometry.slot_bytes,
        )
    elif throttle is not None:
        from vllm_ssdkv.offload.testing.throttled import ThrottledDevice

        bandwidth = None if throttle.bandwidth is None else float(throttle.bandwidth)
        device = ThrottledDevice(device, bandwidth, throttle.latency)
    if options.fault is not None:
        from vllm_ssdkv.offload.testing.faulty import FaultyDevice

        device = FaultyDevice(device, options.fault)
    return device
