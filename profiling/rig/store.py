"""A rank's store without an engine: opened, filled with blocks, loaded from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.store.context_store import ContextStore
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.open import StorePlace, open_rank
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome

I64 = NDArray[np.int64]
Fill = Callable[[I64, NDArray[np.int32]], None]
"""Fills the frames of slots."""

PATIENCE_S: Final = 120.0
BLOCK_TOKENS: Final = 16
"""Tokens of a block, where nothing depends on their number."""


class Hbm:
    """Memory that stands for HBM, with blocks that are numbered from 1, and copies into it."""

    def __init__(self, geometry: SlotGeometry, blocks: int):
        self._geometry = geometry
        self._block = geometry.payload_bytes * geometry.pages
        self._bytes = np.zeros(blocks * self._block, dtype=np.uint8)
        self._pages = np.arange(geometry.pages, dtype=np.uint64)

    def copy(self, frames: NDArray[np.uint64], blocks: I64) -> None:
        """Copy frames at these addresses into blocks."""
        geometry = self._geometry
        place = np.uint64(self._bytes.ctypes.data) + (blocks - 1).astype(np.uint64) * np.uint64(
            self._block
        )
        source = (frames + np.uint64(geometry.header_bytes))[:, None]
        source = source + self._pages * np.uint64(geometry.page_bytes)
        target = place[:, None] + self._pages * np.uint64(geometry.payload_bytes)
        _io.copy(source.ravel(), target.ravel(), geometry.payload_bytes)

    def stretches(self) -> _io.Stretches:
        """The copies, for the store's native code."""
        geometry, count = self._geometry, self._geometry.pages
        base = self._bytes.ctypes.data - self._block  # of block 0, which stands for none
        return _io.Stretches(
            np.uint64(geometry.header_bytes) + self._pages * np.uint64(geometry.page_bytes),
            np.full(count, geometry.payload_bytes, dtype=np.uint64),
            np.uint64(base) + self._pages * np.uint64(geometry.payload_bytes),
            np.full(count, self._block, dtype=np.uint64),
        )


class StoreRig:
    """A store of its own, with so many blocks in its first slots. One thread calls all methods.

    Closing it ends the store; its files stay.

    Example:
        rig = StoreRig(store_config([directory], geometry, 64, dram=64 * MIB), geometry, 64)
        rig.write()
        rig.load()

    Attributes:
        opened, store: What the store is made of.
        slots, keys: Of the blocks.
        epoch: Number of times that they were written.
    """

    def __init__(
        self,
        config: SSDKVConfig,
        geometry: SlotGeometry,
        blocks: int,
        *,
        hbm: Hbm | None = None,
        block_tokens: int = BLOCK_TOKENS,
        name: str | int = "",
        **more: Any,  # noqa: ANN401 - of ContextStore
    ):
        """Open it.

        Args:
            config: Options.
            geometry: Of a slot.
            blocks: Number of them.
            hbm: What blocks are loaded into; nothing is copied without.
            block_tokens: Tokens of a block.
            name: A store with another one is another store.
            more: Keyword arguments of :class:`ContextStore`, and its ``copy_in``.

        Raises:
            BenchError: it has fewer slots than blocks.
        """
        self.geometry, self.epoch = geometry, 0
        place = StorePlace(config, [geometry], Fingerprint({"bench": name}))
        self.opened = open_rank(place, 0, Counters())
        if self.opened.num_slots < blocks:
            raise BenchError(f"the store has {self.opened.num_slots} slots, not {blocks}")

        def copy_in(frames: NDArray[np.int32], block_ids: I64) -> None:
            if hbm is not None:
                hbm.copy(self.store.frames.address(frames), block_ids)

        self.store = ContextStore(
            self.opened.files,
            self.opened.arena,
            self.opened.plan,
            self.opened.num_slots,
            block_tokens,
            more.pop("copy_in", copy_in),
            **more,
        )
        self.slots = np.arange(blocks, dtype=np.int64)
        self.keys = [slot.to_bytes(32, "little") for slot in range(blocks)]

    def epochs(self, count: int) -> I64:
        """Epochs of so many slots."""
        return np.full(count, self.epoch, dtype=np.int64)

    def write(self, fill: Fill | None = None, at_once: int | None = None) -> None:
        """Write every block, and wait until all are on the devices.

        Args:
            fill: Fills their frames; without, what lies there is written.
            at_once: Blocks that are held before they are written; None: as many as there is room.

        Raises:
            BenchError: a block was not written.
        """
        self.epoch += 1
        done = 0
        while done < len(self.slots):
            wanted = self.slots[done:][:at_once]
            frames = self.store.reserve_frames(wanted, wait=True)
            if len(frames) == 0:
                raise BenchError("no frame became free")
            part = slice(done, done + len(frames))
            if fill is not None:
                fill(self.slots[part], frames)
            self.store.flush(self.slots[part], self.epochs(len(frames)), self.keys[part])
            done += len(frames)
        if not self.store.drain(PATIENCE_S) or self.store.take_write_results()[1]:
            raise BenchError("a block was not written")

    def load(
        self, blocks: int | None = None, to: I64 | None = None, name: str = "r"
    ) -> LoadOutcome:
        """Load the first so many blocks, or all.

        ``to``: numbers of blocks of HBM; 1 and so on, if missing; none: into frames only.

        Raises:
            BenchError: one could not be read.
        """
        slots = self.slots[:blocks]
        into = slots + 1 if to is None else to
        keys = tuple(self.keys[: len(slots)])
        self.store.load(LoadJob(name, slots, self.epochs(len(slots)), keys, into))
        outcomes = self.store.take_load_outcomes(PATIENCE_S)
        if not outcomes or not outcomes[0].complete:
            raise BenchError("a load failed, or did not end in time")
        return outcomes[0]

    def forget(self) -> None:
        """DRAM holds no block any more."""
        self.store.frames.forget(self.slots)

    def close(self) -> None:
        """End the store, with what is in flight."""
        self.store.close()
        self.opened.close()


def store_config(
    directories: Sequence[Path],
    geometry: SlotGeometry,
    blocks: int,
    *,
    dram: int,
    **options: object,
) -> SSDKVConfig:
    """Options of a store with room for the blocks, and for some more on each device."""
    capacity = (blocks + 8 * len(directories)) * geometry.slot_bytes * 9 // 8 // len(directories)
    devices: list[Mapping[str, object]] = [
        {"path": str(path), "capacity": capacity + 32 * MIB} for path in directories
    ]
    return SSDKVConfig.from_extra_config({"devices": devices, "dram_gib": dram / 2**30, **options})
