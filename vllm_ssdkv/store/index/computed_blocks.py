"""Blocks that a request has computed, as an index of several nodes places them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

RUN_BLOCKS: Final = 16
"""Blocks of a run: those from a multiple of this in a request on. A run lies on one node, so that
what is left of a prefix without a node is a beginning; and a prefix lies on several."""


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """Origin of the blocks of one claim.

    Attributes:
        request: Id of the request.
        runs: Key of the first block of the run that each block belongs to.
    """

    request: str
    runs: Sequence[bytes]
