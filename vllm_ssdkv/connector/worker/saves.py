"""Blocks of this rank that leave HBM: copied to frames of the store, and committed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.messages import CopyFrames, CopyToDram, Flush, RankReport, SlotArray
from vllm_ssdkv.connector.worker.block_copy import BlockPort, LeavingBlocks
from vllm_ssdkv.connector.worker.layer_copy import LayerCopier
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.tier import TierStore
from vllm_ssdkv.store.tiered_store import TieredStore

if TYPE_CHECKING:
    from vllm_ssdkv.connector.worker.page_mode import PageMode
    from vllm_ssdkv.store.memory.summary_rows import SummaryRows


class Saves:
    """Copies blocks out of HBM and has the store write them. Used by the worker's thread."""

    def __init__(
        self,
        store: TierStore,
        port: BlockPort,
        layers: LayerCopier,
        geometry: SlotGeometry,
        counters: Counters,
        paged: PageMode | None,
        *,
        writes: bool,
    ):
        """
        Args:
            store: Where blocks go.
            port: Copies whole blocks.
            layers: Copies layers while others compute.
            geometry: Geometry of slots.
            counters: Counters of this rank.
            paged: Page mode of this rank; None: the mode is ``reuse``.
            writes: This rank writes. Another one does where it has the same KV: then this one
                forgets what slots held before.
        """
        self._store, self._port, self._layers = store, port, layers
        self._geometry, self._counters = geometry, counters
        self._paged, self._writes = paged, writes

    def drop(self) -> None:
        """Let go of what a step that failed has copied."""
        if len(dropped := self._layers.drop()):
            self._store.abandon(dropped)

    def begin(self, save: CopyToDram, *, has_inputs: bool) -> None:
        """Reserve frames for the blocks that a step will fill, as far as there are any.

        ``has_inputs``: some of them get X."""
        if not self._writes:
            self._store.abandon(save.slots)
            return
        self._layers.begin(save, self._reserve_early, self._reserve_rows, has_inputs=has_inputs)

    def _reserve_early(self, slots: SlotArray) -> NDArray[np.int32]:
        """Frames for the first of these slots, before the step that fills them."""
        frames = self._store.reserve_frames(slots, wait=False, spare_contexts=True)
        self._reclaim(slots[: len(frames)])
        return frames

    def _reserve_rows(self, slots: SlotArray) -> SummaryRows | None:
        """Rows for what selectors must know of these slots."""
        return None if self._paged is None else self._paged.store.summary_rows(slots)

    def end(
        self,
        save: CopyToDram,
        commit: Flush,
        spoiled: Sequence[int],
        x_slots: Mapping[int, Sequence[int]],
        report: RankReport,
    ) -> None:
        """Copy what a step has filled, and commit.

        Args:
            save: Blocks that the step has filled.
            commit: Blocks that get their keys.
            spoiled: Slots of blocks that are not to be stored.
            x_slots: Slots that get X, with the HBM blocks that it is of.
            report: Told of what is not stored.
        """
        if not self._writes:
            return
        if len(commit.slots):
            # Older blocks first: their writes free the frames that this step's blocks need.
            self._commit(commit, ~_among(commit.slots, save.slots.tolist()))
        if len(save.slots):
            early = np.arange(len(save.slots)) < self._layers.end()
            lost = _among(save.slots, spoiled)
            if lost.any():
                self._store.abandon(save.slots[early & lost])
                _skip(save.part(lost), report)
            kept = save.slots[early & ~lost]
            self._keep(kept, commit, len(kept))
            self._copy(save.part(~(early | lost)), commit, x_slots, report)
        x_cache = None if self._paged is None else self._paged.x_cache
        if x_slots and x_cache is not None:
            x_cache.release([block for blocks in x_slots.values() for block in blocks])

    def _copy(
        self,
        save: CopyToDram,
        commit: Flush,
        x_slots: Mapping[int, Sequence[int]],
        report: RankReport,
    ) -> None:
        """Copy blocks to frames, and commit each at once: the frames may be too few for all.

        ``x_slots`` get X."""
        done = 0
        store, paged = self._store, self._paged
        while done < len(save.slots):
            wanted = save.slots[done:]
            frames = store.reserve_frames(wanted, wait=paged is not None)
            if len(frames) == 0:
                break
            part = slice(done, done + len(frames))
            as_x = _among(save.slots[part], x_slots)
            self._reclaim(wanted[: len(frames)])
            blocks, index = save.block_ids[part], save.index[part]
            if paged is not None and paged.x_cache is not None and as_x.any():
                of_x = [x_slots[slot] for slot in save.slots[part][as_x].tolist()]
                paged.x_cache.save(of_x, frames[as_x], paged.store.frames)
            if not as_x.all():
                rows = self._reserve_rows(save.slots[part][~as_x])
                leaving = LeavingBlocks(blocks[~as_x], frames[~as_x], rows, index[~as_x])
                self._port.save(leaving)
            self._keep(save.slots[part], commit, int(np.count_nonzero(~as_x)))
            done += len(frames)
        if done < len(save.slots):
            _skip(save.part(np.arange(len(save.slots)) >= done), report)
        self._counters.add("stores_skipped", len(save.slots) - done, cause="write_buffer")

    def _reclaim(self, slots: SlotArray) -> None:
        """Tell the device that attends that these slots get other bytes."""
        if self._paged is not None and self._paged.offloader is not None:
            self._paged.offloader.reclaim(slots)

    def _keep(self, slots: SlotArray, commit: Flush, with_kv: int) -> None:
        """Commit slots whose frames and rows are filled, ``with_kv`` of them by K and V."""
        if not len(slots):
            return
        if self._paged is not None and self._paged.offloader is not None:
            nbytes = with_kv * self._geometry.kv_pages * self._geometry.payload_bytes
            self._paged.offloader.count_stored(nbytes)
        if self._paged is not None:
            self._paged.store.filled(slots)
        self._commit(commit, _among(commit.slots, slots.tolist()))

    def _commit(self, commit: Flush, which: NDArray[np.bool_]) -> None:
        if which.any():
            keys = [key for key, wanted in zip(commit.keys, which.tolist(), strict=True) if wanted]
            slots, epochs = commit.slots[which], commit.epochs[which]
            self._store.flush(slots, epochs, keys, bound=commit.bound)

    def copy_frames(self, plan: CopyFrames, store: TieredStore, report: RankReport) -> None:
        """Write copies of frames of a ``store`` in this process into other slots."""
        if not self._writes:
            store.abandon(plan.new)
            return
        self._reclaim(plan.new)
        copied, wrong = store.copy(plan.old, plan.old_epochs, plan.new, plan.keys)
        self._commit(Flush(plan.new, plan.epochs, plan.keys), copied)
        new = zip(plan.new[~copied].tolist(), plan.epochs[~copied].tolist(), strict=True)
        report.failed_writes.extend(new)
        old = zip(plan.old[wrong].tolist(), plan.old_epochs[wrong].tolist(), strict=True)
        report.bad.extend(old)


def _skip(save: CopyToDram, report: RankReport) -> None:
    """Report blocks that are not stored."""
    report.skipped.extend(zip(save.slots.tolist(), save.epochs.tolist(), strict=True))


def _among(slots: NDArray[np.int64], others: Collection[int]) -> NDArray[np.bool_]:
    """Mask of these slots that are among the others, [n]; a few of either, as a step saves."""
    known = set(others)
    return np.array([slot in known for slot in slots.tolist()], dtype=np.bool_)
