"""Copies whole blocks between vLLM's KV cache and frames, all layers at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.connector.kv_layout import layer_offsets
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.tier import FrameMemory

if TYPE_CHECKING:
    from vllm_ssdkv.connector.worker.device_blocks import DeviceBlocks
    from vllm_ssdkv.store.memory.summary_rows import SummaryRows


@dataclass(frozen=True, slots=True, eq=False)
class LeavingBlocks:
    """Blocks on their way from HBM to frames.

    Attributes:
        block_ids: Their numbers in HBM, [n].
        frames: Frames, [n].
        rows: Rows for what selectors must know of them, [n]; None: nothing is kept.
        index: As of ``CopyToDram``; None: tokens keep the order that they have.
    """

    block_ids: NDArray[np.int64]
    frames: NDArray[np.int32]
    rows: SummaryRows | None = None
    index: NDArray[np.int64] | None = None


class BlockPort(Protocol):
    """Way between HBM and frames. Calls return when the bytes are there."""

    def save(self, blocks: LeavingBlocks) -> None:
        """Copy blocks to their frames, and write their rows."""

    def save_layer(self, layer: int, blocks: LeavingBlocks) -> None:
        """Copy one layer, by its place in a slot, of blocks to their frames, and write it in their
        rows. On the calling thread alone, where it is the CPU's."""

    def load(self, frames: NDArray[np.int32], block_ids: NDArray[np.int64]) -> None:
        """Copy frames [n] into HBM blocks [n]."""


def as_it_lies(cache: torch.Tensor) -> torch.Tensor:
    """The same cache, [num_blocks, ...], a block's dimensions in the order of memory: vLLM shows
    one order, [block, head, token, channel], whatever order a backend has asked for."""
    inner = sorted(range(1, cache.dim()), key=cache.stride, reverse=True)
    return cache.permute(0, *inner)


def whole_blocks(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A layer's cache by vLLM's blocks, [num_blocks, ...]: some attention backends have them cut
    into several smaller ones, one after the other.

    Raises:
        UnsupportedError: it has no whole number of them.
    """
    rows = cache.shape[0]
    if rows == num_blocks:
        return cache
    if rows % num_blocks:
        raise UnsupportedError(
            f"a layer's KV cache has {rows} blocks, vLLM hands out {num_blocks}; choose another "
            "--attention-backend"
        )
    return cache.view(num_blocks, rows // num_blocks, *cache.shape[1:])


def blocks_as_bytes(cache: torch.Tensor, num_blocks: int, page_bytes: int) -> torch.Tensor:
    """A layer's cache by vLLM's blocks as bytes, [num_blocks, page_bytes], uint8, with what a block
    has behind its content: layers of other groups may have more there.

    Raises:
        UnsupportedError: a block is not one stretch of memory.
    """
    blocks = as_it_lies(whole_blocks(cache, num_blocks))
    (_,), (step,), (size,) = _blocks_of([blocks])
    if not blocks[0].is_contiguous() or size > page_bytes or step < page_bytes:
        raise UnsupportedError(
            f"a block of the KV cache is not one stretch of {page_bytes} bytes (shape "
            f"{tuple(blocks.shape)}, strides {blocks.stride()}); choose another "
            "--attention-backend"
        )
    raw = torch.empty(0, dtype=torch.uint8, device=cache.device)
    begin = blocks.storage_offset() * blocks.itemsize
    return raw.set_(blocks.untyped_storage(), begin, (num_blocks, page_bytes), (int(step), 1))


def _blocks_of(
    caches: Sequence[torch.Tensor],
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Addresses of block 0 of each layer, and the bytes from block to block and of a block."""
    base = [cache.data_ptr() for cache in caches]
    step = [cache.stride(0) * cache.itemsize for cache in caches]
    size = [cache[0].numel() * cache.itemsize for cache in caches]
    return np.array(base, np.uint64), np.array(step, np.uint64), np.array(size, np.uint64)


def check_overlay(caches: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Raises UnsupportedError unless the layers of another KV cache group, ``others``, lie where
    the first of ``caches`` do: then a block is the same memory whatever its group."""
    for ours, theirs in zip(_blocks_of(caches[: len(others)]), _blocks_of(others), strict=True):
        if not np.array_equal(ours, theirs):
            raise UnsupportedError(
                "the model's KV cache groups do not share their blocks' memory; start with "
                "--disable-hybrid-kv-cache-manager"
            )


def plain_stretches(
    caches: Sequence[torch.Tensor], geometry: SlotGeometry, layer_bytes: Sequence[int] = ()
) -> _io.Stretches | None:
    """Copies of :meth:`OpaquePort.load`, where plain copies in memory are all that it does."""
    if caches[0].device.type != "cpu":
        return None
    page, pieces = geometry.page_bytes, []
    layers = zip(layer_offsets(geometry, layer_bytes), *_blocks_of(caches), strict=True)
    for offset, base, step, size in layers:
        # A page is copied as soon as it is there: where a layer lies in several, so do its pieces.
        first = page - (offset - geometry.header_bytes) % page
        cuts = [0, *range(first, int(size), page), int(size)]
        for begin, end in itertools.pairwise(cuts):
            pieces.append((offset + begin, end - begin, int(base) + begin, int(step)))
    return _io.Stretches(*np.array(pieces, np.uint64).T.copy())


class OpaquePort:
    """Reuse mode: a block's bytes as they lie, layer by layer, whatever the backend made."""

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        geometry: SlotGeometry,
        frames: FrameMemory,
        layer_bytes: Sequence[int] = (),
    ):
        """``layer_bytes``: :attr:`KVLayout.layer_bytes`.

        Raises UnsupportedError when a block is not one stretch of memory, or on another kind of
        device than a CPU or a GPU of CUDA or ROCm."""
        self._caches = [as_it_lies(cache) for cache in caches]
        kind = self._caches[0].device.type
        if kind not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"the KV cache is on a device of type {kind}: use a CPU or a GPU"
            )
        self._frames = frames
        self._offsets = np.array(layer_offsets(geometry, layer_bytes), np.uint64)
        most = layer_bytes or [geometry.payload_bytes] * len(caches)
        for cache, room in zip(self._caches, most, strict=True):
            if not cache[0].is_contiguous():
                raise UnsupportedError(
                    f"a block of the KV cache is not one stretch of memory (shape "
                    f"{tuple(cache.shape)}, strides {cache.stride()}); choose another "
                    "--attention-backend"
                )
            held = cache[0].numel() * cache.itemsize
            if held > room:
                raise UnsupportedError(
                    f"a block of a layer has {held} bytes, its KV cache spec says {room}; this "
                    "attention backend cannot be stored"
                )
        self._base, self._step, self._size = _blocks_of(self._caches)
        self._on_device: tuple[DeviceBlocks, DeviceBlocks] | None = None
        if kind == "cuda":
            from vllm_ssdkv.connector.worker.device_blocks import DeviceBlocks

            # The thread of the forward pass saves, or the one of its layers; the loader's loads.
            begin, places = geometry.header_bytes, self._offsets.tolist()
            shape = [place - begin for place in places], geometry.frame_bytes - begin
            self._on_device = DeviceBlocks(self._caches, *shape), DeviceBlocks(self._caches, *shape)
        self._begin = geometry.header_bytes

    def save(self, blocks: LeavingBlocks) -> None:
        """See :class:`BlockPort`."""
        ids, frames = blocks.block_ids, blocks.frames
        if self._on_device is None:
            _io.copy(self._blocks(ids), self._pages(frames), self._sizes(len(frames)))
        else:
            self._on_device[0].save(torch.from_numpy(ids), self._stretches(frames))

    def save_layer(self, layer: int, blocks: LeavingBlocks) -> None:
        """See :class:`BlockPort`."""
        ids, frames = blocks.block_ids, blocks.frames
        offset, size = int(self._offsets[layer]), int(self._size[layer])
        if self._on_device is None:
            source = self._base[layer] + self._step[layer] * ids.astype(np.uint64)
            pages = self._frames.address(frames) + np.uint64(offset)
            _io.copy(source, pages, size, threads=1)
            return
        views = (self._frames.view(frame)[offset : offset + size] for frame in frames.tolist())
        places = [torch.from_numpy(view) for view in views]
        self._on_device[0].save_layer(layer, torch.from_numpy(ids), places)

    def load(self, frames: NDArray[np.int32], block_ids: NDArray[np.int64]) -> None:
        """See :class:`BlockPort`."""
        if self._on_device is None:
            _io.copy(self._pages(frames), self._blocks(block_ids), self._sizes(len(frames)))
        else:
            self._on_device[1].load(self._stretches(frames), torch.from_numpy(block_ids))

    def _stretches(self, frames: NDArray[np.int32]) -> list[torch.Tensor]:
        """The pages of these frames."""
        views = (self._frames.view(frame)[self._begin :] for frame in frames.tolist())
        return [torch.from_numpy(view) for view in views]

    def _blocks(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        ids = block_ids.astype(np.uint64)
        return (self._base[:, None] + self._step[:, None] * ids[None, :]).ravel()

    def _pages(self, frames: NDArray[np.int32]) -> NDArray[np.uint64]:
        return (self._offsets[:, None] + self._frames.address(frames)[None, :]).ravel()

    def _sizes(self, count: int) -> NDArray[np.uint64]:
        return np.repeat(self._size, count)
