"""The host as a device: native kernels attend, on a team of threads."""

from __future__ import annotations

from vllm_ssdkv.kernels.dense import CpuKernels
from vllm_ssdkv.kernels.paged import CpuPageKernels
from vllm_ssdkv.offload.kernel_device import KernelDevice
from vllm_ssdkv.offload.protocol import ContextKernels, DeviceSetup


class HostDevice(KernelDevice):
    """See ``ContextDevice``. The thread that takes tickets is one of the team.

    Example:
        device = HostDevice(threads=8)
        ticket = device.submit(ContextWork(query, pages, scale))
    """

    def __init__(self, threads: int):
        """Start its threads, ``threads`` at most.

        Raises:
            UnsupportedError: the native kernels do not load.
        """
        super().__init__("host", ContextKernels(CpuKernels(threads), CpuPageKernels(threads)))

    @classmethod
    def open(cls, setup: DeviceSetup) -> HostDevice:
        """See ``ContextDeviceClass``.

        Raises:
            UnsupportedError: the native kernels do not load.
        """
        return cls(setup.options.threads_of(setup.workers))
