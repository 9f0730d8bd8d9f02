"""A store of computed blocks beside an engine: what it has, and the time of loads and writes.

Which blocks exist and which are evicted is decided by the product's own index
(:mod:`vllm_ssdkv.store.index.slot_index`). Loads and writes take what decode steps leave of the
drives, loads first, as in the product's queues. A block is found as soon as it is computed, and
comes from DRAM while its frame is there. Where more waits to be written than frames hold, a
prompt's blocks are not stored.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.sizes import format_size
from vllm_ssdkv.profiling.simulation.hardware import IoPath, Machine, find, node_costs
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape
from vllm_ssdkv.profiling.simulation.storage import Storage
from vllm_ssdkv.store.index.slot_index import SlotIndex

READ_BYTES: Final = 512 * 1024
"""Of one request: a stripe unit."""

Keys: TypeAlias = tuple[bytes, ...]
I64: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StoreShape:
    """Size of a store.

    Example:
        StoreShape(nbytes=4e12, block=256, frames=8e9)

    Attributes:
        nbytes: That blocks may take on drives.
        block: Tokens of a block.
        frames: Bytes that may wait to be written.
        path: Name of the software that reads and writes blocks. None: ours.
        cache: Bytes of DRAM for blocks that are on drives, too, the newest ones.
        node: Kind of socket to a node that has the store, "unix" or "tcp". None: it is the engine's
            own.
    """

    nbytes: float
    block: int = 256
    frames: float = 8e9
    path: str | None = None
    cache: float = 0.0
    node: str | None = None

    def __post_init__(self) -> None:
        """Check sizes. Raises ConfigError."""
        if self.block < 1 or self.nbytes <= 0 or min(self.frames, self.cache) < 0:
            raise ConfigError(f"store: got {self}; bytes above 0, and blocks of a token or more")


class ReuseStore:
    """Blocks that were computed once, by the product's index.

    Example:
        store = ReuseStore(StoreShape(1e9), model)
        store.order(store.missing("manual", 4000))
        store.find("manual", 4000)

    Attributes:
        evicted: Blocks that made room.
        block_bytes: Of one block.
    """

    def __init__(self, shape: StoreShape, model: ModelShape) -> None:
        """Raises ConfigError: it does not hold one block."""
        self.shape = shape
        self.block_bytes = float(shape.block * model.kv_bytes_per_token())
        slots = int(shape.nbytes // self.block_bytes)
        if slots < 1:
            raise ConfigError(
                f"store: nbytes: got {format_size(int(shape.nbytes))}; a block of {shape.block} "
                f"tokens takes {format_size(int(self.block_bytes))}"
            )
        self._index = SlotIndex(slots, None)
        self._ordered: deque[list[tuple[int, bytes]]] = deque()
        self._writing: set[bytes] = set()
        self._pinned: dict[int, I64] = {}
        # Blocks in DRAM that are written, too; the least recently used first.
        self._clean: OrderedDict[bytes, None] = OrderedDict()
        self.evicted = 0

    def find(self, context: str, shared: int) -> int:
        """Tokens of a text, from its head, that are stored."""
        return len(self._lookup(context, shared)) * self.shape.block

    def _lookup(self, context: str, tokens: int) -> I64:
        return self._index.lookup(_keys(context, tokens // self.shape.block))

    def on_drives(self, context: str, tokens: int) -> int:
        """Tokens, of these of a text, which are stored, that are not in DRAM."""
        keys = _keys(context, tokens // self.shape.block)
        here = sum(key in self._clean or key in self._writing for key in keys)
        return (len(keys) - here) * self.shape.block

    def pin(self, request: int, context: str, tokens: int) -> None:
        """Keep these tokens of a text, which are stored, while a request loads them."""
        self._pinned[request] = self._lookup(context, tokens)
        self._index.pin(self._pinned[request])
        for key in _keys(context, tokens // self.shape.block):
            if key not in self._writing:
                self._keep(key)

    def _keep(self, key: bytes) -> None:
        """Note that a block is in DRAM, and was used now."""
        self._clean[key] = None
        self._clean.move_to_end(key)
        while len(self._clean) * self.block_bytes > self.shape.cache:
            self._clean.popitem(last=False)

    def unpin(self, request: int) -> None:
        """A load ended: what was loaded counts as used now."""
        self._index.unpin(self._pinned.pop(request))

    def missing(self, context: str, shared: int) -> list[bytes]:
        """Keys of blocks of a text that are not stored, no more than fit."""
        keys = _keys(context, shared // self.shape.block)
        new = [key for key in keys if self._index.find(key) is None]
        return new[: self._index.available()]

    def order(self, keys: list[bytes]) -> None:
        """Take slots for blocks that will be written; the least recently used ones go.

        They are found from now on.
        """
        before = len(self._index.free_slots())
        slots = self._index.allocate(len(keys))
        self.evicted += max(0, len(keys) - before)
        for slot, key in zip(slots.tolist(), keys, strict=True):
            self._index.publish(slot, key)
        self._writing.update(keys)
        self._ordered.append(list(zip(slots.tolist(), keys, strict=True)))

    def written(self, jobs: int) -> None:
        """So many orders, the oldest first, are on the drives."""
        for _ in range(jobs):
            pairs = self._ordered.popleft()
            for _, key in pairs:
                self._writing.discard(key)
                self._keep(key)
            slots = np.array([slot for slot, _ in pairs], dtype=np.int64)
            self._index.durable(slots)
            self._index.unpin(slots)


@cache
def _keys(context: str, blocks: int) -> Keys:
    """Keys of the first blocks of a text."""
    return tuple(
        hashlib.sha256(f"{context} {number}".encode()).digest() for number in range(blocks)
    )


class Background:
    """Loads and writes of a store, in the time that steps leave of the drives.

    Attributes:
        loaded_bytes: That were loaded.
        from_dram_bytes: Of loads that were asked for, those that were in DRAM.
        stored_bytes: That were written.
        skipped_bytes: That were not, because too much waited.
    """

    def __init__(
        self,
        machine: Machine,
        storage: Storage,
        block_bytes: float,
        path: str | None = None,
        node: str | None = None,
    ) -> None:
        """``path``: name of its description; None: ours, with enough in flight. ``node``: see
        :class:`StoreShape`.

        Raises:
            ConfigError: no such path or socket.
        """
        self._node = None if node is None else node_costs(node)
        self._machine, self._storage, self._block_bytes = machine, storage, block_bytes
        self._path = None if path is None else find(IoPath, path)
        self._loads: deque[list[float]] = deque()
        self._writes: deque[list[float]] = deque()
        self._waiting = 0.0
        self._written = 0
        self.loaded_bytes = self.stored_bytes = self.skipped_bytes = 0.0
        self.from_dram_bytes = 0.0

    def load_s(self, nbytes: float, from_dram: float = 0.0) -> float:
        """Seconds of a load, behind those that wait, with nothing else on the drives.

        ``from_dram``: bytes of it that are in DRAM.
        """
        return sum(load[0] for load in self._loads) + self._alone_s(nbytes, from_dram)

    def _alone_s(self, whole: float, from_dram: float) -> float:
        blocks = -int(-whole // self._block_bytes)
        node_s = 0.0 if self._node is None else self._node.load_s(blocks, whole)
        return node_s + self._moved_s(whole, from_dram)

    def _moved_s(self, whole: float, from_dram: float) -> float:
        storage, machine = self._storage, self._machine
        nbytes = whole - from_dram
        if not nbytes:
            return whole / machine.gpu_link
        drives = max(
            device.read_s(share * nbytes, -int(-share * nbytes // READ_BYTES))
            for device, share in zip(storage.devices, storage.shares, strict=True)
        )
        drives = max(drives, nbytes / machine.drives_link)
        latency = max(device.latency_s for device in storage.devices)
        to_gpu = whole / machine.gpu_link
        if self._path is None:
            return latency + max(drives, to_gpu)
        blocks = -int(-nbytes // self._block_bytes)
        drives = max(drives, blocks * (self._path.request_s or 0.0))
        if self._path.in_flight is not None:
            # A block lies on all drives, or on one: a file system's stripe.
            one = latency + self._block_bytes / sum(device.rate for device in storage.devices)
            drives = max(drives, blocks * one / self._path.in_flight)
        return latency + (drives + to_gpu if self._path.relayed else max(drives, to_gpu))

    def load(self, nbytes: float, from_dram: float = 0.0) -> None:
        """Begin a load, behind the others."""
        self._loads.append([self._alone_s(nbytes, from_dram), nbytes])
        self.from_dram_bytes += from_dram

    def store(self, shape: StoreShape, keys: list[bytes], block_bytes: float) -> bool:
        """Begin writes of blocks; False: too much waits already, and these are left out."""
        nbytes = len(keys) * block_bytes
        if self._waiting + nbytes > shape.frames:
            self.skipped_bytes += nbytes
            return False
        storage = self._storage
        seconds = max(
            device.prompt_s(share * nbytes)
            for device, share in zip(storage.devices, storage.written, strict=True)
        )
        self._waiting += nbytes
        self._writes.append([max(seconds, nbytes / self._machine.drives_link), nbytes])
        return True

    def next_end_s(self) -> float:
        """Seconds to the end of the next load, with nothing else on the drives."""
        return self._loads[0][0]

    def advance(self, seconds: float) -> int:
        """So much time of the drives has passed; loads that ended in it."""
        ended = 0
        while self._loads and seconds >= self._loads[0][0] * (1 - 1e-12):
            taken, nbytes = self._loads.popleft()
            seconds -= taken
            self.loaded_bytes += nbytes
            ended += 1
        if self._loads:
            self._loads[0][0] -= seconds
            return ended
        while self._writes and seconds >= self._writes[0][0]:
            taken, nbytes = self._writes.popleft()
            seconds -= taken
            self._waiting -= nbytes
            self.stored_bytes += nbytes
            self._written += 1
        if self._writes:
            self._writes[0][0] -= max(0.0, seconds)
        return ended

    def take_written(self) -> int:
        """Orders of writes that ended since the last call."""
        count, self._written = self._written, 0
        return count
