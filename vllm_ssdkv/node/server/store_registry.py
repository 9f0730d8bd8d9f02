"""All stores of a node: who shares one, and how memory and drives are divided."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.protocol.messages import StoreSpec
from vllm_ssdkv.node.server.hosted_store import HostedStore
from vllm_ssdkv.node.server.store_options import directory_of

logger = logging.getLogger(__name__)

OpenStore = Callable[[StoreSpec], HostedStore]
"""Opens the store that an engine asks for. Blocks on I/O."""

_ROUNDING = 1e-9


@dataclass(slots=True, eq=False)
class _Entry:
    """A store that is open, or is being opened or closed."""

    share: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever opens or closes it."""
    store: HostedStore | None = None
    users: int = 0
    idle_since: float = 0.0


class StoreRegistry:
    """Stores by what engines say of them. Any thread may call; opening and closing block.

    A store stays open, and its DRAM warm, when its last user has gone, until another one needs its
    share.
    """

    def __init__(self, config: NodeConfig, open_store: OpenStore):
        self._config, self._open = config, open_store
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}

    def take(self, spec: StoreSpec) -> HostedStore:
        """The store that an engine asks for, which is opened if need be; :meth:`give_back` it.

        Raises:
            ConfigError: its share is not to be had, or it is open with slots of another shape.
            SSDKVError: it cannot be opened.
        """
        name = directory_of(spec)
        entry = self._entry(name, spec)
        try:
            with entry.lock:
                if entry.store is None:
                    entry.store = self._open(spec)
                    logger.info("ssdkv node: %s", entry.store.describe())
                _check_same(entry.store.spec, spec)
                return entry.store
        except BaseException:
            self._leave(name, entry)
            raise

    def _entry(self, name: str, spec: StoreSpec) -> _Entry:
        """The entry of a store, with one more user."""
        share = self._config.share_of(spec.model)
        while True:
            with self._lock:
                entry = self._entries.get(name)
                if entry is None and self._left() + _ROUNDING >= share:
                    entry = self._entries[name] = _Entry(share)
                if entry is not None:
                    entry.users += 1
                    return entry
                idle = self._take_idle(share, spec.model)
            self._close(*idle)

    def _left(self) -> float:
        return 1.0 - sum(entry.share for entry in self._entries.values())

    def _take_idle(self, share: float, model: str) -> tuple[str, _Entry]:
        """The store that was unused for longest, for which its closer is now responsible. Lock
        held."""
        idle = [(e.idle_since, name) for name, e in self._entries.items() if not e.users]
        if not idle:
            raise ConfigError(
                f"the node has no share of {share:g} left for a store of {model}: "
                f"{len(self._entries)} stores are in use; give the node smaller shares "
                "(store_share, shares), or stop an engine of another model"
            )
        name = min(idle)[1]
        entry = self._entries[name]
        entry.users = 1
        return name, entry

    def _close(self, name: str, entry: _Entry) -> None:
        with entry.lock:
            if entry.store is not None:
                logger.info("ssdkv node: a store of %s gives up its share", entry.store.spec.model)
                entry.store.close()
                entry.store = None
        self._leave(name, entry)

    def _leave(self, name: str, entry: _Entry) -> None:
        with self._lock:
            entry.users -= 1
            entry.idle_since = time.monotonic()
            if not entry.users and entry.store is None:
                del self._entries[name]

    def give_back(self, store: HostedStore) -> None:
        """A user of a store has gone."""
        name = directory_of(store.spec)
        self._leave(name, self._entries[name])

    def stores(self) -> list[HostedStore]:
        """Stores that are open."""
        with self._lock:
            return [entry.store for entry in self._entries.values() if entry.store is not None]

    def names(self) -> list[str]:
        """Directories of stores that are open, or are being opened or closed."""
        with self._lock:
            return list(self._entries)

    def close(self, drain_s: float) -> bool:
        """Close all stores, which nobody uses any more; False when writes did not end in time."""
        deadline = time.monotonic() + drain_s
        drained = True
        for store in self.stores():
            drained = store.drain(max(0.0, deadline - time.monotonic())) and drained
            store.close()
        return drained


def _check_same(known: StoreSpec, asked: StoreSpec) -> None:
    """Check that two engines mean one store.

    Raises:
        ConfigError: they do not.
    """
    if msgspec.structs.replace(asked, model=known.model) != known:
        raise ConfigError(
            f"the store of {known.model} is open with slots of {known.layers} layers of "
            f"{known.payload_bytes} bytes and {known.block_tokens} tokens, and an engine asks for "
            f"{asked.layers} layers of {asked.payload_bytes} bytes and {asked.block_tokens} tokens"
        )
