"""Stored blocks that are written anew into other slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_ssdkv.store.format.slot_geometry import I64


@dataclass(frozen=True, slots=True)
class Move:
    """What every rank is to write anew, from its frames in DRAM.

    A rank that has no frame of a block, or no room for another one, says that its write failed.

    Attributes:
        old: Slots that hold the blocks, [n].
        old_epochs: Of these, [n].
        new: Slots to write them into, [n].
        new_epochs: Of these, [n].
        keys: The blocks, [n].
    """

    old: I64
    old_epochs: I64
    new: I64
    new_epochs: I64
    keys: tuple[bytes, ...]


_NONE = np.zeros(0, dtype=np.int64)

NO_MOVE: Final = Move(_NONE, _NONE, _NONE, _NONE, ())
"""As in most steps."""
