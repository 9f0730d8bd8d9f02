"""Messages between scheduler and workers, once per step each way.

Everything is plain dataclasses and numpy arrays. vLLM's own types of them are in ``metadata.py``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.config.request import RequestOptions
from vllm_ssdkv.store.format.segment import Segment

if TYPE_CHECKING:
    from vllm_ssdkv.offload.xcache.x_rule import XRates

SlotArray = NDArray[np.int64]


def _no_slots() -> SlotArray:
    return np.zeros(0, dtype=np.int64)


PROBE = "ssdkv probe"
"""Name of loads that measure what reads take. vLLM's own names have no space."""

PROMOTION = "ssdkv promotion"
"""Name of loads of what running requests read from the devices in every step."""

FETCH = "ssdkv fetch"
"""Name of loads of what is to be rewritten from frames."""

COMPARED = "ssdkv compared"
"""Name of loads of a block that a request computes meanwhile, to compare the two."""

INTO_DRAM = frozenset({PROMOTION, FETCH, COMPARED})
"""Loads that bring whole blocks into DRAM, and share the devices with every step meanwhile."""

BACKGROUND = INTO_DRAM | {PROBE}
"""Loads that no request waits for."""


@dataclass(frozen=True, slots=True)
class CopyToDram:
    """Copy blocks that this step completes from HBM into DRAM frames. Arrays of one length.

    ``index``: place of each block in its context; -1: its tokens keep the order that they have.
    """

    slots: SlotArray
    epochs: NDArray[np.int64]
    block_ids: NDArray[np.int64]
    index: NDArray[np.int64]

    @classmethod
    def of(cls, items: Sequence[tuple[int, int, int, int]]) -> CopyToDram:
        """Build from (slot, epoch, block id, index) of each."""
        if not items:  # as in most steps
            return _NO_SAVE
        columns = np.array(items, dtype=np.int64).reshape(-1, 4).T.copy()
        return cls(columns[0], columns[1], columns[2], columns[3])

    def part(self, which: NDArray[np.bool_]) -> CopyToDram:
        """Select ``which``, [n]."""
        return CopyToDram(
            self.slots[which], self.epochs[which], self.block_ids[which], self.index[which]
        )


@dataclass(frozen=True, slots=True)
class Flush:
    """Write held slots to the devices: their block hashes are known now."""

    slots: SlotArray
    epochs: NDArray[np.int64]
    keys: tuple[bytes, ...]
    bound: bool = True
    """False: the keys are nobody's."""

    @classmethod
    def of(cls, items: Sequence[tuple[int, int, bytes]]) -> Flush:
        """Build from (slot, epoch, key) triples."""
        if not items:
            return _NO_COMMIT
        slots = np.array([item[0] for item in items], dtype=np.int64)
        epochs = np.array([item[1] for item in items], dtype=np.int64)
        return cls(slots, epochs, tuple(item[2] for item in items))

    def under_keys_of_nobody(self) -> Flush:
        """The same with random keys: nobody finds what these slots hold."""
        keys = tuple(os.urandom(len(key)) for key in self.keys)
        return Flush(self.slots, self.epochs, keys, bound=False)


_NONE = np.zeros(0, dtype=np.int64)
_NO_SAVE = CopyToDram(_NONE, _NONE, _NONE, _NONE)
_NO_COMMIT = Flush(_NONE, _NONE, ())


@dataclass(frozen=True, slots=True)
class CopyFrames:
    """Page mode: rewrite blocks that are in DRAM and not in HBM. Arrays of one length.

    Each rank copies the frames of ``old`` slots and writes the copies into ``new`` ones. A rank
    without such a frame, or without one to spare, reports a failed write.
    """

    old: SlotArray
    old_epochs: NDArray[np.int64]
    new: SlotArray
    epochs: NDArray[np.int64]
    keys: tuple[bytes, ...]

    @classmethod
    def of(cls, items: Sequence[tuple[int, int, int, int, bytes]]) -> CopyFrames:
        """Build from (old slot, its epoch, new slot, its epoch, key) of each."""
        table = np.array([item[:4] for item in items], dtype=np.int64).reshape(-1, 4)
        columns = table.T.copy()
        return cls(columns[0], columns[1], columns[2], columns[3], tuple(i[4] for i in items))


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter by vLLM's number, with its digest on each rank."""

    number: int
    digests: tuple[bytes, ...]
    changes: tuple[int, ...]
    """Changes of adapters that each rank had seen when it reported this one."""


@dataclass(frozen=True, slots=True)
class Load:
    """Bring a request's hit from the store before it may be scheduled.

    ``slots`` are verified against ``keys`` and ``epochs``; the last ``len(block_ids)`` of them are
    copied into those HBM blocks (reuse mode: all; page mode: the window). A block id of 0, vLLM's
    null block, means that vLLM keeps no block there. The first ``chain`` are the tokens of the
    hit, but for ``behind`` blocks behind the window of a model that has no other layers; the others
    are what layers of other KV cache groups have of the same tokens. ``whole``: the request will
    attend to all of it in every step. ``compared``: the last slot is for a :class:`Comparison`.
    """

    request_id: str
    slots: SlotArray
    epochs: NDArray[np.int64]
    keys: tuple[bytes, ...]
    block_ids: NDArray[np.int64]
    chain: int
    behind: int = 0
    whole: bool = False
    adapter: Adapter | None = None
    """Adapter with which the KV was computed; None: with the base model."""
    compared: bool = False
    others: SlotArray = field(default_factory=_no_slots)
    other_epochs: NDArray[np.int64] = field(default_factory=_no_slots)
    """Slots with the same blocks on other nodes, -1: none; both empty: there are none at all."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A block that was computed although it is stored: compare the two.

    Attributes:
        request_id: Whose block it is.
        slot, epoch: Where it is stored.
        block_id: HBM block, complete when the step ends.
        load: Name of the load that brought the stored one.
        fence_block: HBM block from which on the request is computed again where they differ; 0: it
            cannot be.
    """

    request_id: str
    slot: int
    epoch: int
    block_id: int
    load: str
    fence_block: int


@dataclass(frozen=True, slots=True)
class LoadTime:
    """Time of one rank for a load, by part, in seconds. No tokens: the load failed.

    ``queued_s`` was spent behind other loads, the others on what the tokens came from. What is in
    DRAM is copied while the devices read: that time is in both.
    """

    request_id: str
    tokens_from_dram: int
    tokens_from_ssd: int
    queued_s: float
    dram_s: float
    ssd_s: float

    @property
    def failed(self) -> bool:
        """Check whether it did not bring everything."""
        return not (self.tokens_from_dram or self.tokens_from_ssd)

    @property
    def loading_s(self) -> float:
        """Time from the beginning of the load to its end."""
        return max(self.dram_s, self.ssd_s)


@dataclass(frozen=True, slots=True)
class Row:
    """Page mode: one scheduled request of this step.

    ``write_block`` is the HBM block of its first query token, unique per request: attention
    metadata carries no request ids. ``fence_block`` is a live HBM block before it, reported as
    invalid when the context cannot be read. Tokens before ``hbm_start`` (a block index) are read
    from the store.
    """

    request_id: str
    write_block: int
    fence_block: int
    first_position: int
    hbm_start: int
    tokens: int = 1
    """Query tokens."""
    asked: RequestOptions | None = None
    """Options that the request sets for itself; None: none."""
    of_prompt: bool = False
    """The first query token belongs to the prompt, which is attended to exactly: a prompt of which
    all but the last token was found must not get another answer than one that was computed."""
    as_x: bool = False
    """Its context is stored as X (``docs/internals/xcache.md``)."""

    @property
    def may_choose(self) -> bool:
        """Check whether its query is a single token that was sampled, with a context to choose
        from."""
        return self.tokens == 1 and not self.of_prompt and self.hbm_start > 0


@dataclass(frozen=True, slots=True)
class ContextDelta:
    """Page mode: slots of a request's blocks from block index ``start`` on.

    ``start`` 0 begins a new context (after admission or preemption).
    """

    request_id: str
    start: int
    slots: SlotArray


@dataclass
class StepPlan:
    """Scheduler to worker, every step."""

    step: int
    changes: tuple[int, ...] = ()
    """Changes of weights that each rank has reported: the keys in this plan are bound to the
    weights of then."""
    resets: int = 0
    """Resets of the cache after which a rank must have digested its weights: where it has not, it
    does so in this step."""
    awake: bool = False
    """vLLM computes, or is about to: weights can be read."""
    adapters: dict[int, Adapter] = field(default_factory=dict)
    """Adapters of requests in this step that keys are bound to, by number."""
    save: CopyToDram = field(default_factory=lambda: CopyToDram.of(()))
    x_slots: dict[int, list[int]] = field(default_factory=dict)
    """Slots of ``save`` that get X in place of K and V, with the HBM blocks that it is of. The
    last one is complete when the step ends, and the others are still in the window."""
    commit: Flush = field(default_factory=lambda: Flush.of(()))
    copy_frames: CopyFrames | None = None
    loads: list[Load] = field(default_factory=list)
    compare: list[Comparison] = field(default_factory=list)
    invalid: list[int] = field(default_factory=list)
    """HBM blocks whose content must not be used, nor what was computed from it."""
    rows: list[Row] = field(default_factory=list)
    contexts: list[ContextDelta] = field(default_factory=list)
    forget: list[str] = field(default_factory=list)
    """Requests whose contexts the worker drops, before the deltas above are applied."""
    discard: list[int] = field(default_factory=list)
    """Slots whose frames are worthless: dropped, or never to be committed."""
    segments: tuple[Segment, ...] | None = None
    """Segments with the slots of this and later plans; None: as before."""
    believed: list[tuple[int, int]] = field(default_factory=list)
    """(slot, epoch) pairs that are or were stored, of those that were said to be bad or mended."""
    trim: SlotArray | None = None
    """Slots that hold nothing any more, after many were dropped at once."""
    timed: bool = False
    """Report how long the forward pass of this step takes."""
    idle: bool = False
    """Nothing is computed in this step."""
    settled: bool = False
    """Nor does anything wait or write: no step may follow for long."""


@dataclass
class RankReport:
    """One worker to the scheduler. Slot lists hold (slot, epoch) pairs."""

    durable: list[tuple[int, int]] = field(default_factory=list)
    failed_writes: list[tuple[int, int]] = field(default_factory=list)
    skipped: list[tuple[int, int]] = field(default_factory=list)
    """Saves that found no frame (reuse mode)."""
    bad: list[tuple[int, int]] = field(default_factory=list)
    """Slots whose bytes are wrong, or that could not be read for so long that they are given up."""
    unread: list[tuple[int, int]] = field(default_factory=list)
    """Slots that could not be read, and may be later."""
    mended: list[tuple[int, int]] = field(default_factory=list)
    """Slots of which one copy was wrong, found by the scrub."""
    poisoned: list[str] = field(default_factory=list)
    """Requests whose context could not be read this step; they must be computed again."""
    lost_devices: list[int] = field(default_factory=list)
    returned_devices: list[int] = field(default_factory=list)
    """Devices that are in use again; comes behind ``lost_devices``."""
    writing: list[tuple[int, float]] = field(default_factory=list)
    """Devices whose writes are paused, and seconds until they are tried again; 0: they go on."""
    speeds: list[tuple[int, float]] = field(default_factory=list)
    """Devices, and the share of its weight that each of them is worth from now on."""
    loads: list[LoadTime] = field(default_factory=list)
    """Loads that ended."""
    steps: list[tuple[int, float]] = field(default_factory=list)
    """(step, seconds of its forward pass) of steps that were to be timed."""
    written: list[tuple[int, int]] = field(default_factory=list)
    """(device, bytes written to it) since the last report."""
    frames: int = 0
    """Frames of DRAM; 0: as before."""
    weights: bytes = b""
    """Digest of the weights, which have changed; empty: they have not."""
    changes: int = 0
    """Number of changes of the weights, all together."""
    unseen: bool = False
    """True if only a digest has shown that the weights have changed, and no look between
    digests."""
    resets: int = 0
    """Resets after the last of which the rank has digested its weights; 0: as before."""
    adapters: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    """Adapters that were loaded, by vLLM's number: digest, empty for one that is gone, and how many
    changes of adapters the rank has seen."""
    unbound: list[tuple[int, int]] = field(default_factory=list)
    """Slots that were committed for weights or adapters that the rank does not have: it has
    written them under keys of nobody."""
    compared: list[tuple[str, float, bool]] = field(default_factory=list)
    """Requests, how far a block that was computed is from the stored one (NaN: no copy of
    that was kept), and whether it is too far."""
    streamed: list[tuple[str, SlotArray]] = field(default_factory=list)
    """Blocks of requests that are read from the devices in every step, and for which there is room
    in DRAM now."""
    x_rates: XRates | None = None
    """Rates that say how many contexts are best stored as X; None: as before."""
    gained: dict[str, float] = field(default_factory=dict)
    """Counters, as in :meth:`vllm_ssdkv.base.metrics.Counters.take_gained`."""
    gauges: dict[str, float] = field(default_factory=dict)
    """Gauges whose value differs from the last report."""

    def empty(self) -> bool:
        """Check whether there is nothing to say."""
        return not (
            self.durable
            or self.failed_writes
            or self.skipped
            or self.bad
            or self.unread
            or self.mended
            or self.poisoned
            or self.lost_devices
            or self.returned_devices
            or self.writing
            or self.speeds
            or self.loads
            or self.steps
            or self.written
            or self.frames
            or self.weights
            or self.resets
            or self.adapters
            or self.unbound
            or self.compared
            or self.streamed
            or self.x_rates is not None
            or self.gained
            or self.gauges
        )
