"""One slot header as bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.format.slot_header import SlotHeader
from vllm_ssdkv.store.format.slot_header_batch import HeaderFormat, key_rows

U8 = NDArray[np.uint8]


def encoded(
    header: SlotHeader,
    geometry: SlotGeometry,
    digest: bytes,
    authenticate: Callable[[U8], U8] | None = None,
) -> U8:
    """The bytes of a header, [header_bytes]; without ``authenticate`` no salt and no tags."""
    sealed = authenticate is not None
    return HeaderFormat(geometry, digest, header.rank).encode(
        np.array([header.slot], dtype=np.uint64),
        np.array([header.epoch], dtype=np.uint64),
        key_rows([header.key]),
        header.checksums[None, :],
        salts=np.frombuffer(header.salt, dtype=np.uint8)[None, :] if sealed else None,
        tags=header.tags[None, :] if sealed else None,
        authenticate=authenticate,
    )[0]
