"""Pages in memory against the checksums in their slot's header: one native call for many pages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.checksum import wrong_checksums
from vllm_ssdkv.store.layout import SlotGeometry


def wrong_pages(
    geometry: SlotGeometry, base: NDArray[np.uint64], expected: NDArray[np.uint64]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Pages whose payload is not what their checksum says. Releases the GIL. Any thread.

    Args:
        geometry: Shape of the slots.
        base: Address of the first of the consecutive pages of each row, [n].
        expected: Their checksums, [n, pages].

    Returns:
        Row and page of each wrong one, both [k], ascending.
    """
    pages = expected.shape[1]
    step = np.arange(pages, dtype=np.uint64) * np.uint64(geometry.page_bytes)
    addresses = (base[:, None] + step[None, :]).ravel()
    wrong = wrong_checksums(
        addresses, np.ascontiguousarray(expected).ravel(), geometry.payload_bytes
    )
    row, page = np.divmod(wrong, max(1, pages))
    return row.astype(np.intp), page.astype(np.intp)
