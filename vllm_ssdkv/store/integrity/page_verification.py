"""Pages in memory against the checksums in their slot's header: one native call for many pages.

Pages are checked where they are read, all by ``store/io/verified_read.py``: of hits, streamed
contexts, selected pages and the scrubber. ``store/io/async_verifier.py`` does it beside the reads,
and ``store/maintenance/slot_check.py`` for ``ssdkv fsck``.
"""

from __future__ import annotations

import random
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.checksum import wrong_checksums
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

VerifyMode: TypeAlias = Literal["all", "sampled"]

SAMPLE = 16
"""Pages of a read per verified one in mode ``sampled``."""


def wrong_pages(
    geometry: SlotGeometry,
    base: NDArray[np.uint64],
    expected: NDArray[np.uint64],
    which: slice = slice(None),
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Pages whose payload is not what their checksum says. Releases the GIL. Any thread.

    Args:
        geometry: Shape of the slots.
        base: Address of the first of the consecutive pages of each row, [n].
        expected: Their checksums, [n, pages].
        which: The pages that are looked at, all rows one after the other.

    Returns:
        Row and page of each wrong one, both [k], ascending.
    """
    pages = expected.shape[1]
    if pages == 1 and which == slice(None):
        wrong = wrong_checksums(base, np.ascontiguousarray(expected[:, 0]), geometry.payload_bytes)
        return wrong, np.zeros_like(wrong)
    step = np.arange(pages, dtype=np.uint64) * np.uint64(geometry.page_bytes)
    addresses = (base[:, None] + step[None, :]).ravel()
    looked = np.ascontiguousarray(addresses[which])
    sums = np.ascontiguousarray(expected.ravel()[which])
    wrong = wrong_checksums(looked, sums, geometry.payload_bytes)
    if not len(wrong):
        return wrong, wrong
    row, page = np.divmod(np.arange(addresses.size, dtype=np.intp)[which][wrong], max(1, pages))
    return row, page


class PageSampler:
    """Sample of the pages of a read from a device that are checked. Any thread may use it.

    A sample begins at a random page: a fixed order could meet the order of reads in such a way that
    some page never has its turn.
    """

    def __init__(self, mode: VerifyMode = "all") -> None:
        self.mode = mode

    def choose(self) -> slice:
        """Choose pages for :func:`wrong_pages`, once per read."""
        if self.mode == "all":
            return slice(None)
        return slice(random.randrange(SAMPLE), None, SAMPLE)
