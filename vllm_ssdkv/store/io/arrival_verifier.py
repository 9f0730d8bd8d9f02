"""Native check and copy of the slots of a read as they arrive, without the interpreter."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.store.io.engines.protocol import U64
from vllm_ssdkv.store.io.slot_request import SlotRequest

RIGHT: Final = 1
WRONG_HEADER: Final = 2
WRONG_PAGE: Final = 3
"""States of a verifier's slots, beside 0, not there."""


def make_arrival_verifier(
    batch: SlotRequest,
    epochs: NDArray[np.int64],
    keys: NDArray[np.uint8],
    addresses: U64,
    blocks: U64,
    stretches: _io.Stretches,
) -> _io.ArrivalVerifier | None:
    """Make the native checker and copier of the n slots of a batch that reads them whole; for
    :meth:`SlotRequest.feed`. None: it takes more than checksums. Any thread.

    Args:
        batch: Its memory must stay until it was fed.
        epochs: Of each slot's allocation, [n].
        keys: Block each slot holds, [n, 32].
        addresses: Where each is read to, absolute, [n].
        blocks: HBM block each goes to, [n]; 0 is none.
        stretches: What is copied.
    """
    plain = batch.files.codec.plain_check(batch.slots, epochs, keys)
    if plain is None:
        return None
    return _io.ArrivalVerifier(
        plain.shape,
        addresses,
        plain.beginnings.ravel(),
        blocks,
        *batch.parts(),
        stretches,
        plain.first,
        plain.step,
    )
