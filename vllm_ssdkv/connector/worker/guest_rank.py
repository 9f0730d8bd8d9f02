"""A rank's way to a tier that a user brings."""

from __future__ import annotations

from typing import Final

import torch

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.worker.pinning import pin_arena
from vllm_ssdkv.connector.worker.rank_store import StoreWork
from vllm_ssdkv.store.guest_tier import GuestStore


class GuestRank:
    """A :class:`RankAccess` without devices.

    Example:
        access = GuestRank(store, counters, rank=0)
        access.start(work)
    """

    own: Final = None

    def __init__(self, store: GuestStore, counters: Counters, rank: int):
        """``store`` is closed by the worker, or by :meth:`close`."""
        self.counters, self.rank = counters, rank
        self._store = store

    def start(self, work: StoreWork) -> GuestStore:
        """See :class:`RankAccess`."""
        self._store.start(work.copy_in, work.block_tokens)
        return self._store

    def pin(self, device: torch.device) -> None:
        """See :class:`RankAccess`."""
        pin_arena(self._store.save_frames.arena, device)

    def close(self) -> None:
        """Close the store, should the worker not have begun to use it."""
        self._store.close()
