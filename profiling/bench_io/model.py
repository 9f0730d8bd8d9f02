"""The drive that emulated devices behave like, and what it can do at best."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm_ssdkv.config.io_engine import ThrottleRule


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A drive, slowed down in proportion so that many of them fit one machine.

    Attributes:
        bandwidth: Bytes per second, reads and writes together.
        latency_s: Seconds from the end of a transfer to the end of its request.
        iops: Requests per second.
        dilation: How many times slower than that it is.
    """

    bandwidth: float = 7e9
    latency_s: float = 80e-6
    iops: float = 1e6
    dilation: float = 47.0

    def slower(self, factor: float) -> DeviceModel:
        """The same drive, ``factor`` times slower."""
        return DeviceModel(self.bandwidth, self.latency_s, self.iops, self.dilation * factor)

    def rule(self, device: int | None = None) -> ThrottleRule:
        """Throttle rule for one device in this process, or for all."""
        return ThrottleRule(
            device=device,
            bandwidth=self.bandwidth,
            latency_s=self.latency_s,
            iops=self.iops,
            dilation=self.dilation,
        )

    def bytes_per_s(self, nbytes: int, depth: int | None = None) -> float:
        """Best that one device can do with requests of ``nbytes``.

        A request occupies the device for the transfer and then waits for the latency, so fewer
        than some requests in flight leave it idle; None is as many as it takes.
        """
        transfer = max(nbytes / self.bandwidth, 1 / self.iops)
        busy = 1.0 if depth is None else depth * transfer / (transfer + self.latency_s)
        return nbytes / transfer * min(1.0, busy) / self.dilation

    def plain(self) -> dict[str, Any]:
        """Values for JSON."""
        return asdict(self)


GEN4 = DeviceModel()
"""A PCIe 4 drive 47 times slower: 149 MB/s, 3.76 ms, 21,277 IOPS. Eight need 1.2 GB/s."""
