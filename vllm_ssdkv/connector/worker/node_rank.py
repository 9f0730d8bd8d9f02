"""A rank's way to a store that a node has."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Final

import torch

from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.worker.pinning import pin_memory, unpin_memory
from vllm_ssdkv.connector.worker.rank_store import StoreWork
from vllm_ssdkv.node.client.remote_store import RemoteStore

logger = logging.getLogger(__name__)


def _pin(device: torch.device, address: int, nbytes: int, *, writable: bool) -> Callable[[], bool]:
    """Register memory; that which is the node's need not be. See ``PinMemory``."""
    try:
        pin_memory(address, nbytes, writable=writable, device=device)
    except StoreError as error:
        if writable:
            raise
        logger.warning("ssdkv: the arena of the node is not pinned: %s", error)
        return lambda: True

    def unpin() -> bool:
        try:
            unpin_memory(address, nbytes, device=device)
        except StoreError as error:
            logger.warning("ssdkv: memory of a session with the node stays: %s", error)
            return False
        return True

    return unpin


class NodeRank:
    """A :class:`RankAccess` without devices: they are the node's.

    Example:
        access = NodeRank(store, counters, rank=0)
        access.start(work)
    """

    own: Final = None

    def __init__(self, store: RemoteStore, counters: Counters, rank: int):
        """``store`` was opened; the worker closes it."""
        self.counters, self.rank = counters, rank
        self._store = store

    def tell_weights(self, digest: bytes) -> None:
        """Tell the node what weights this rank holds.

        Raises:
            StoreError: the node is gone.
        """
        self._store.tell_weights(digest)

    def start(self, work: StoreWork) -> RemoteStore:
        """Let the node's blocks come."""
        self._store.start(work.copy_in)
        return self._store

    def pin(self, device: torch.device) -> None:
        """Register the memory of this session and of later ones with a GPU."""
        self._store.pin_with(functools.partial(_pin, device))

    def close(self) -> None:
        """End the session, should the worker not have begun to use it."""
        self._store.leave()
