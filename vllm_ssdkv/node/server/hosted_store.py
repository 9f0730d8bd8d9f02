"""One store of a node: its index and all of its ranks, shared by engines.

The parts are those of an engine's own store. What is added here is who may rely on what: a slot is
found by others when all ranks of the engine that claimed it have its block, and what a session has
pinned or claimed goes with the session.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import NodeRefusedError, StoreFullError
from vllm_ssdkv.base.metrics import TELL_INTERVAL_S, Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.node.protocol.messages import (
    NO_ROOM,
    NOT_ADMITTED,
    OVER_BUDGET,
    PAUSED,
    TAKEN,
    StoreSpec,
)
from vllm_ssdkv.node.server.claims import Claim
from vllm_ssdkv.node.server.existence import Existence
from vllm_ssdkv.node.server.hosted_rank import HostedRank, RankResults
from vllm_ssdkv.node.server.leases import Lease, pairs_of, slots_of
from vllm_ssdkv.node.server.store_options import geometry_of
from vllm_ssdkv.store.device_weights import DeviceWeights
from vllm_ssdkv.store.devices.health import WriteState
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_geometry import I64
from vllm_ssdkv.store.index.slot_index import SlotState
from vllm_ssdkv.store.index_metrics import IndexMetrics
from vllm_ssdkv.store.open import StorePlace, open_index
from vllm_ssdkv.store.unread_slots import UnreadSlots
from vllm_ssdkv.store.write_pauses import WritePauses
from vllm_ssdkv.store.write_policy import open_write_policy

logger = logging.getLogger(__name__)

Fill = Callable[[HostedRank, I64, NDArray[np.int32]], None]
"""Fills frames, [k], with the blocks at positions, [k], of a save, all that have a frame; may
raise."""

WriteEnd = Callable[[int, str, list[tuple[int, int]], bool], None]
"""Hears of the writes of a rank for a run that ended: rank, run, (slot, epoch) pairs, whether they
are on the devices."""

_SLOW_CLOSE_S = 10.0

_LOOK_S = 0.5
"""Pause between looks whether an engine that waits for weights is still there, in seconds."""


class HostedStore(Existence):
    """Store of one model and number of ranks. Any thread may call; one lock guards all numbers.

    Attributes:
        spec: What engines say of it.
        ranks: Its ranks.
        counters: Of its index; each rank has its own.
    """

    def __init__(self, spec: StoreSpec, config: SSDKVConfig, node: str, tell: WriteEnd):
        """Open the store. Blocks on I/O.

        Args:
            spec: What the first engine says of it.
            config: Its options.
            node: Name of this start of the node.
            tell: Hears of ended writes.

        Raises:
            SSDKVError: it cannot be opened; the text names the way out.
        """
        super().__init__()
        self.spec = spec
        self._tell = tell
        geometry = geometry_of(spec, encrypted=config.encryption is not None)
        place = StorePlace(
            config,
            [geometry] * spec.ranks,
            Fingerprint(spec.fingerprint),
            model=spec.model,
            run=node,
            name=spec.name,
        )
        self.geometry = geometry
        self.counters: Counters = place.counters
        self.path = str(place.state)
        self._orphans: list[tuple[int, str, tuple[int, int]]] = []
        """Rank, run, and slot with epoch of blocks that were given up, to be told as failed."""
        self._weights: dict[str, list[bytes]] = {}
        self._gauges_due = 0.0
        with ExitStack() as stack:
            self.ranks: list[HostedRank] = []
            for rank in range(spec.ranks):
                self.ranks.append(HostedRank(place, rank, spec.block_tokens))
                stack.callback(self.ranks[-1].close)
            self._index, self._rebalancer = open_index(place, self.counters)
            stack.callback(self._index.close)
            stack.callback(self._rebalancer.close)
            placement = self._rebalancer.placement
            self._policy = open_write_policy(place, placement, self._index.num_slots, self.counters)
            stack.pop_all()
        self._device_weights = DeviceWeights(
            self._rebalancer, [device.path for device in place.stored().devices]
        )
        self._pauses = WritePauses(placement, self._device_weights, whole=False)
        self._unread = UnreadSlots(self._index, self._rebalancer, self.counters)
        self._metrics = IndexMetrics(self._index, self._rebalancer, self.counters)
        self.name_key = place.name_key()
        self._pass_on_segments()
        for host in self.ranks:
            host.start(self._take_results)

    def describe(self) -> str:
        """The store, for the log."""
        lines = [f"store of {self.spec.model} in {self.path}", *self.ranks[0].describe()]
        return "\n  ".join(lines)

    # ---- weights ----

    def tell_weights(self, run: str, rank: int, digest: bytes) -> None:
        """A rank of a run says what it computes with."""
        with self._lock:
            told = self._weights.setdefault(run, [b""] * self.spec.ranks)
            if told[rank] not in (b"", digest):
                raise NodeRefusedError(
                    f"rank {rank} of {run} has told of other weights: two engines have one "
                    "engine_id; give each its own"
                )
            told[rank] = digest
            self._lock.notify_all()

    def weights(self, run: str, patience_s: float, gone: Callable[[], bool]) -> list[bytes]:
        """Digest of each rank's weights. Blocks until all ranks of the run have told.

        Raises:
            NodeRefusedError: they have not until the time ran out, or who asks is ``gone``.
        """
        deadline = time.monotonic() + patience_s
        with self._lock:
            told = self._weights.setdefault(run, [b""] * self.spec.ranks)
            while not all(told):
                left = deadline - time.monotonic()
                if left <= 0 or gone():
                    missing = [rank for rank, digest in enumerate(told) if not digest]
                    raise NodeRefusedError(f"ranks {missing} of {run} have not told their weights")
                self._lock.wait(min(left, _LOOK_S))
            return list(told)

    def forget_run(self, run: str) -> None:
        """No session of a run is left."""
        with self._lock:
            self._weights.pop(run, None)

    # ---- claims ----

    def _look(self) -> None:
        self._unread.step()

    def claim(self, lease: Lease, keys: Sequence[bytes], *, first: bool) -> tuple[I64, I64]:
        """A slot for each key, [n], or why there is none, and their epochs, [n]."""
        slots = np.zeros(len(keys), dtype=np.int64)
        epochs = np.zeros(len(keys), dtype=np.int64)
        with self._lock:
            self._step()
            if first:
                self._policy.record_access(keys)
            admitted = self._policy.admitted(keys).tolist()
            now = time.monotonic()
            for i, key in enumerate(keys):
                self._chains.claimed(key, now)
                slots[i] = found = self._claim(lease, key, admitted=admitted[i])
                if found >= 0:
                    epochs[i] = self._index.epoch(found)
        return slots, epochs

    def _claim(self, lease: Lease, key: bytes, *, admitted: bool) -> int:
        found = self._index.find(key)
        if self._claims.with_key(key) is not None:
            return TAKEN
        if found is not None and self._is_there(lease, found):
            return TAKEN
        if not admitted:
            return NOT_ADMITTED
        if self._policy.used_up(len(self._claims)):
            return OVER_BUDGET
        writing = self._pauses.state
        if writing is WriteState.PAUSED or (writing is WriteState.TRIAL and self._claims):
            return PAUSED  # on trial, one block at a time shows whether there is room again
        if found is not None:  # this session has computed it anew: from here on for everybody
            self._drop([(found, self._index.epoch(found))], "engine")
        try:
            slot = int(self._index.allocate(1)[0])
        except StoreFullError:
            return NO_ROOM
        epoch = self._index.epoch(slot)
        # Beside the session's pin, which may go while a rank copies or writes.
        self._index.pin(slots_of([(slot, epoch)]))
        self._claims.add(Claim(slot, epoch, key, lease.run))
        lease.add([(slot, epoch)])
        return slot

    def _give_up(self, claim: Claim) -> None:
        """A claimed block will not be stored, or not be found any more."""
        claim.given_up = True
        if claim.saving:
            return  # whoever copies it now does the rest
        self._claims.remove(claim)
        # Their writes may never be reported, and their workers wait for an end.
        waiting = claim.kept - claim.written
        self._orphans += [(rank, claim.run, (claim.slot, claim.epoch)) for rank in waiting]
        if self._index.holds(claim.slot, claim.epoch):
            self._index.drop(claim.slot)
        slots = np.array([claim.slot], dtype=np.int64)
        for rank in self.ranks:
            rank.store.abandon(slots)
        self._index.unpin(slots)

    def _discard(self, slots: Sequence[int]) -> None:
        """Forget frames of those slots that are free now: they hold nothing that is read again."""
        gone = (SlotState.FREE, SlotState.LOST)
        free = np.array([s for s in slots if self._index.state(s) in gone], dtype=np.int64)
        if len(free):
            for rank in self.ranks:
                rank.store.abandon(free)

    def gauges(self) -> tuple[dict[str, int], dict[str, int]]:
        """Gauges and counters of the index."""
        with self._lock:
            gauges = self._index.gauges()
            gauges["free"] += self._rebalancer.slots_to_come
            return gauges, dict(self._index.counters)

    # ---- saves ----

    def save(
        self, run: str, rank: int, slots: I64, epochs: I64, keys: Sequence[bytes], fill: Fill
    ) -> list[int]:
        """Take a rank's blocks of claimed slots into DRAM, and have them written.

        Args:
            run: Who saves.
            rank: Its rank.
            slots, epochs, keys: Of each block, [n].
            fill: Brings the bytes. Called once, also where no block has a frame.

        Returns:
            Positions of blocks that are not stored: nobody has claimed them so, or DRAM has no
            room.
        """
        host = self.ranks[rank]
        claims = self._begin_save(run, rank, pairs_of(slots, epochs), keys)
        taken: list[int] = []
        try:
            wanted = [i for i, claim in enumerate(claims) if claim is not None]
            with host.saving:
                frames = host.store.reserve_frames(slots[wanted], wait=False)
            places = np.array(wanted[: len(frames)], dtype=np.int64)
            # Without a lock: the bytes may come from a client that stands still.
            fill(host, places, frames)
            taken = places.tolist()
        finally:
            kept = self._end_save(host, claims, set(taken))
        self.counters.add("stores_skipped", len(wanted) - len(taken), cause="write_buffer")
        return [i for i in range(len(slots)) if i not in kept]

    def _begin_save(
        self, run: str, rank: int, pairs: Sequence[tuple[int, int]], keys: Sequence[bytes]
    ) -> list[Claim | None]:
        found: list[Claim | None] = []
        with self._lock:
            for (slot, epoch), key in zip(pairs, keys, strict=True):
                claim = self._claims.find(slot, epoch)
                fits = (
                    claim is not None
                    and (claim.run, claim.key) == (run, key)
                    and not claim.given_up
                    and rank not in claim.kept
                    and rank not in claim.saving
                )
                found.append(claim if fits else None)
                if fits and claim is not None:
                    claim.saving.add(rank)
        return found

    def _end_save(
        self, host: HostedRank, claims: Sequence[Claim | None], taken: set[int]
    ) -> set[int]:
        """Publish what all ranks have, and have written what was ``taken``; positions of blocks
        that are stored or of which the end will be told."""
        flushed: dict[int, Claim] = {}
        with self._lock:
            for i, claim in enumerate(claims):
                if claim is None:
                    continue
                claim.saving.discard(host.rank)
                if i not in taken:
                    host.store.abandon(slots_of([(claim.slot, claim.epoch)]))
                elif not claim.given_up:
                    claim.kept.add(host.rank)
                    flushed[i] = claim
                    if len(claim.kept) == len(self.ranks):
                        claim.published = self._index.publish(claim.slot, claim.key)
                        claim.given_up = not claim.published
                if claim.given_up:
                    self._give_up(claim)
            kept = [claim for claim in flushed.values() if not claim.given_up]
            host.store.flush(
                np.array([claim.slot for claim in kept], dtype=np.int64),
                np.array([claim.epoch for claim in kept], dtype=np.int64),
                [claim.key for claim in kept],
            )
        return set(flushed)

    def discard(self, run: str, slots: I64, epochs: I64) -> None:
        """Nobody needs these blocks of a run, which are being stored."""
        with self._lock:
            for slot, epoch in pairs_of(slots, epochs):
                claim = self._claims.find(slot, epoch)
                if claim is not None and claim.run == run and not claim.published:
                    self._give_up(claim)

    # ---- loads ----

    def begin_load(self, slots: I64, epochs: I64, keys: Sequence[bytes]) -> I64:
        """Pin the slots of a load, if all of them hold these blocks; positions of those that do
        not, and then nothing is pinned."""
        with self._lock:
            found = self._index.lookup(keys)
            if len(found) == len(slots):  # as nearly always: few calls, while somebody waits
                good = (found == slots) & (self._index.epochs(found) == epochs)
                if good.all():
                    self._index.pin(found)
                    return found[:0]
            # Each by itself: what lies behind a block that is gone may be right.
            held = [self._index.find(key) for key in keys]
            right = [
                slot is not None and slot == wanted and self._index.epoch(slot) == epoch
                for slot, wanted, epoch in zip(held, slots.tolist(), epochs.tolist(), strict=True)
            ]
            return np.flatnonzero(~np.array(right, dtype=np.bool_))

    def end_load(
        self,
        slots: I64,
        bad: Sequence[tuple[int, int]] = (),
        unread: Sequence[tuple[int, int]] = (),
    ) -> None:
        """A load is over; ``bad`` and ``unread`` are as in ``LoadOutcome``."""
        with self._lock:
            self._drop(bad, "read_error")
            self._unread.failed(unread)
            self._index.unpin(slots)
            self._discard(slots.tolist())

    # ---- what the ranks' threads have done ----

    def _take_results(self, rank: int, results: RankResults) -> None:
        """Take in what a rank has finished. In its thread."""
        written, failed = [], []
        with self._lock:
            for device, nbytes in results.bytes_written:
                self._policy.wrote([(device, nbytes)])
            for device in results.lost_devices:
                self._device_weights.mark_lost(device, rank)
            for device in results.returned_devices:
                self._device_weights.mark_returned(device, rank)
            self._pauses.told(rank, results.writing)
            self._device_weights.update(rank, results.speeds)
            known = [p for p in (*results.bad, *results.mended) if self._index.holds(*p)]
            self.ranks[rank].store.confirm(known)
            self._drop(results.bad, "read_error")
            written = self._with_claims(results.written)
            failed = self._with_claims(results.failed)
            self._written(rank, [claim for claim, _ in written])
            for claim, pair in failed:
                claim.kept.discard(rank)
                self._drop([pair], "write_error")
                if not claim.given_up:
                    self._give_up(claim)
            self._step()
            self._update_gauges()
            over = [(run, pair) for of, run, pair in self._orphans if of == rank]
            self._orphans = [orphan for orphan in self._orphans if orphan[0] != rank]
        over += [(claim.run, pair) for claim, pair in failed]
        done = [(claim.run, pair) for claim, pair in written]
        for ended, good in ((done, True), (over, False)):
            for run in {run for run, _ in ended}:
                self._tell(rank, run, [pair for of, pair in ended if of == run], good)

    def _with_claims(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[Claim, tuple[int, int]]]:
        found = ((self._claims.find(*pair), pair) for pair in pairs)
        return [(claim, pair) for claim, pair in found if claim is not None]

    def _written(self, rank: int, claims: Sequence[Claim]) -> None:
        """One write into the journal for all that no rank has to write any more."""
        done = []
        for claim in claims:
            claim.written.add(rank)
            if claim.published and len(claim.written) == len(self.ranks):
                done.append(claim)
        if not done:
            return
        self._index.durable(np.array([claim.slot for claim in done], dtype=np.int64))
        for claim in done:  # not as a chain: these are of any requests
            self._claims.remove(claim)
            self._index.unpin(slots_of([(claim.slot, claim.epoch)]))

    def _step(self) -> None:
        """Go on with what segments need. Lock held."""
        self._rebalancer.step()
        self._pass_on_segments()

    def _pass_on_segments(self) -> None:
        segments = self._rebalancer.take_segments()
        if segments is not None:
            for rank in self.ranks:
                rank.change_placement(segments)

    def _update_gauges(self) -> None:
        if time.monotonic() < self._gauges_due:
            return
        self._gauges_due = time.monotonic() + TELL_INTERVAL_S
        weights, paths = self._rebalancer.weights, self._device_weights.paths
        for path, weight in zip(paths, weights, strict=True):
            share = weight / sum(weights) if weight else 0.0
            self.counters.set("device_share", share, device=path)
        self._policy.update_gauges(paths)
        self._metrics.update()

    # ---- the end ----

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that was saved is written; False when the time ran out."""
        deadline = time.monotonic() + timeout_s
        ended = [rank.store.drain(max(0.0, deadline - time.monotonic())) for rank in self.ranks]
        return all(ended)

    def close(self) -> None:
        """Write what was saved, make the journal durable, and give everything back. Blocks."""
        for rank in self.ranks:
            rank.close()
            self._take_results(rank.rank, RankResults(*rank.store.take_write_results()))
        with self._lock:
            self._rebalancer.close()
            self._index.close(_SLOW_CLOSE_S)
            self._policy.close()
