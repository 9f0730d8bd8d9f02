"""Timing of drives that attend to what lies on them, and those of the papers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from vllm_ssdkv.config.offload import DriveProfile


@dataclass(frozen=True, slots=True)
class DriveTiming:
    """Timing of one drive.

    Pages of flash are dealt to the channels, each of which brings one after the other. The drive
    attends to pages as they come, so that the slower of both is its rate.

    Attributes:
        channels: Beside each other.
        flash_bandwidth: Bytes/s that all of them together reach.
        page_bytes: Of a page of flash; less is never read.
        latency_s: Seconds to the first page of a piece of work. It occupies nobody.
        attend_bandwidth: Bytes/s of K and V that the drive attends to; None: no limit.
        write_bandwidth: Bytes/s of whole pages that are written.
        link_bandwidth: Bytes/s from the drive to the accelerator.
    """

    channels: int
    flash_bandwidth: float
    page_bytes: int
    latency_s: float
    attend_bandwidth: float | None
    write_bandwidth: float
    link_bandwidth: float

    @property
    def page_s(self) -> float:
        """Seconds for which a page occupies its channel."""
        return self.channels * self.page_bytes / self.flash_bandwidth

    @property
    def read_bandwidth(self) -> float:
        """Bytes/s of K and V that the drive attends to at best."""
        limit = self.flash_bandwidth
        return limit if self.attend_bandwidth is None else min(limit, self.attend_bandwidth)

    def flash_pages(self, nbytes: int) -> int:
        """Pages of flash under so many bytes that begin with a page."""
        return -(-nbytes // self.page_bytes)

    def attend_s(self, pages: int) -> float:
        """Seconds for which attention to pages of flash occupies the drive."""
        flash = -(-pages // self.channels) * self.page_s
        if self.attend_bandwidth is None:
            return flash
        return max(flash, pages * self.page_bytes / self.attend_bandwidth)

    def write_s(self, pages: int) -> float:
        """Seconds for which writing pages of flash occupies the drive."""
        return pages * self.page_bytes / self.write_bandwidth


FLASH_LATENCY_S: Final = 40e-6 + 21.5e-6
"""Latency of reading a page, and of a drive's firmware."""

DRIVES: Final[Mapping[DriveProfile, DriveTiming]] = MappingProxyType(
    {
        # InstInfer: eight channels of 1.4 GB/s, of which it reads 7.66 GB/s; 2.15 GB/s are written
        # while it decodes. As a plain drive it would be a 980 PRO.
        "instinfer": DriveTiming(
            channels=8,
            flash_bandwidth=7.66e9,
            page_bytes=4096,
            latency_s=FLASH_LATENCY_S,
            attend_bandwidth=None,
            write_bandwidth=2.15e9,
            link_bandwidth=7.0e9,
        ),
        # HILOS: flash to the FPGA's memory at 3.0 GB/s, which its kernel reads at 11.3; a page is
        # programmed in 185 us, on 16 dies beside each other. Sixteen share a link of 16 GB/s.
        "smartssd": DriveTiming(
            channels=1,
            flash_bandwidth=3.0e9,
            page_bytes=4096,
            latency_s=FLASH_LATENCY_S,
            attend_bandwidth=11.3e9,
            write_bandwidth=16 * 4096 / 185e-6,
            link_bandwidth=1.0e9,
        ),
    }
)
"""Drives of the papers, by the name of their profile."""
