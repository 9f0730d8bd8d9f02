"""Timing of drives that attend to what lies on them, and those of the papers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from vllm_ssdkv.config.offload import DriveProfile
from vllm_ssdkv.offload.testing.flash import FlashTiming


@dataclass(frozen=True, slots=True)
class DriveTiming:
    """Timing of one drive.

    The drive attends to pages of flash as they come, so that the slower of both is its rate.

    Attributes:
        flash: Times of its flash.
        latency_s: Seconds to the first page of a piece of work. It occupies nobody.
        attend_bandwidth: Bytes/s of K and V that the drive attends to; None: no limit.
        write_bandwidth: Bytes/s of whole pages that are written.
        link_bandwidth: Bytes/s from the drive to the accelerator.
    """

    flash: FlashTiming
    latency_s: float
    attend_bandwidth: float | None
    write_bandwidth: float
    link_bandwidth: float

    @property
    def read_bandwidth(self) -> float:
        """Bytes/s of K and V that the drive attends to at best."""
        limit = self.flash.bandwidth
        return limit if self.attend_bandwidth is None else min(limit, self.attend_bandwidth)

    def flash_pages(self, nbytes: int) -> int:
        """Pages of flash under so many bytes that begin with a page."""
        return -(-nbytes // self.flash.page_bytes)

    def attend_s(self, pages: int) -> float:
        """Seconds for which attention to pages of flash occupies the drive, if these are dealt to
        the channels in turn."""
        return self._attend_s(-(-pages // self.flash.channels), pages)

    def attend_pages_s(self, pages: ArrayLike) -> float:
        """Seconds of the same for ``pages`` [channels], as they lie on each channel."""
        return self._attend_s(pages, float(np.sum(pages)))

    def _attend_s(self, by_channel: ArrayLike, pages: float) -> float:
        flash = self.flash.read_pages_s(by_channel)
        if self.attend_bandwidth is None:
            return flash
        return max(flash, pages * self.flash.page_bytes / self.attend_bandwidth)

    def write_s(self, pages: int) -> float:
        """Seconds for which writing pages of flash occupies the drive."""
        return pages * self.flash.page_bytes / self.write_bandwidth


PAGE_READ_S: Final = 36e-6
"""Seconds in which a die reads a page: the middle of 30 to 42 us, by public models of drives of the
970 PRO class."""
FIRMWARE_S: Final = 21.5e-6
"""Seconds of a drive's firmware for a request, by the same models."""
FLASH_LATENCY_S: Final = PAGE_READ_S + FIRMWARE_S
"""Latency of reading a page."""

DRIVES: Final[Mapping[DriveProfile, DriveTiming]] = MappingProxyType(
    {
        # InstInfer prints eight channels of 1.4 GB/s, pages of 4 KiB, and 2.15 GB/s that are
        # written while it decodes. It prints no dies and no times of a page: eight dies a channel
        # are those of OpenSSD's boards, on one of which it was built. As a plain drive it would be
        # a 980 PRO.
        "instinfer": DriveTiming(
            FlashTiming(
                channels=8,
                dies=8,
                page_bytes=4096,
                read_s=PAGE_READ_S,
                channel_bandwidth=1.4e9,
            ),
            latency_s=FLASH_LATENCY_S,
            attend_bandwidth=None,
            write_bandwidth=2.15e9,
            link_bandwidth=7.0e9,
        ),
        # HILOS prints 3.0 GB/s from flash to the FPGA's memory: a link, which is the one channel
        # here, as the flash behind it is faster. Its kernel reads that memory at 11.3; a page is
        # programmed in 185 us, on 16 dies beside each other. Sixteen share a link of 16 GB/s.
        "smartssd": DriveTiming(
            FlashTiming(channels=1, dies=1, page_bytes=4096, read_s=0.0, channel_bandwidth=3.0e9),
            latency_s=FLASH_LATENCY_S,
            attend_bandwidth=11.3e9,
            write_bandwidth=16 * 4096 / 185e-6,
            link_bandwidth=1.0e9,
        ),
    }
)
"""Drives of the papers, by the name of their profile."""
