"""The store of a rank in page mode: contexts of running requests, streamed or chosen from."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.store.cache.dram_balancer import DramBalancer
from vllm_ssdkv.store.cache.frames import NO_FRAME
from vllm_ssdkv.store.cache.selected_pages import SelectedPageCache
from vllm_ssdkv.store.cache.summaries import SummaryTable
from vllm_ssdkv.store.integrity.checksum_table import ChecksumTable
from vllm_ssdkv.store.io.buffer_pool import BufferPool
from vllm_ssdkv.store.memory.device_memory import DeviceMemory
from vllm_ssdkv.store.memory.memory_plan import MemoryPlan, PageEvictionPolicy
from vllm_ssdkv.store.memory.summary_rows import SummaryRows
from vllm_ssdkv.store.read.context_frames import NO_SLOTS
from vllm_ssdkv.store.read.context_stream import ContextStream
from vllm_ssdkv.store.read.gpu_pages import GpuPageCache
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome
from vllm_ssdkv.store.read.miss_answers import MissAnswers
from vllm_ssdkv.store.read.page_fetcher import PageFetcher
from vllm_ssdkv.store.read.peer_path import ReadPath
from vllm_ssdkv.store.read.selected_context import SelectedContexts
from vllm_ssdkv.store.tiered_store import TieredStore
from vllm_ssdkv.store.write.summary_builder import SummaryBuilder

_SLOT_BITS: Final = 30
"""Bits of a slot's number in an identity."""

_FILLINGS: Final = 1 << 24
"""Numbers of fillings of a slot that identities tell apart."""

_LEAST_ROOM = 8
"""Frames that must be free for running contexts' blocks to be brought in, unless fewer do."""


class ContextStore(TieredStore):
    """A :class:`TieredStore` whose running requests attend to what it holds: their contexts.

    All that it has beside a :class:`TieredStore` belongs to the thread that runs the forward pass.
    :meth:`choose` blocks, with a deadline.
    """

    def _divide(self, plan: MemoryPlan, num_slots: int, summarizer: SummaryBuilder | None) -> None:
        """Take staging buffers, and where queries choose pages, memory for these and summaries."""
        geometry = self.files.geometry
        places = np.arange(plan.tails, dtype=np.uint64) * np.uint64(geometry.tail_bytes)
        self._tails = np.uint64(self.arena.address + plan.tail_offset) + places
        """Absolute addresses of memory for tails, [n]; none where slots have no tail."""
        self._contexts: dict[str, NDArray[np.int64]] = {}
        self._before: dict[str, NDArray[np.int64]] = {}
        """First slots of each of them, as :meth:`contexts` was asked for last."""
        self._chosen: SelectedContexts | None = None
        self._stream: ContextStream | None = None
        self._x_stream: ContextStream | None = None
        self._staging = BufferPool(0, geometry.layer_bytes, plan.staging_pieces)
        self._staging_pieces = plan.staging_pieces
        self._x_staging: BufferPool | None = None
        self._x_pages = 0
        self._pages: SelectedPageCache | None = None
        self._balancer: DramBalancer | None = None
        self._hot: GpuPageCache | None = None
        self._filled = np.zeros(num_slots, dtype=np.int64)
        """Number of times that each slot got other content."""
        self._policy: PageEvictionPolicy = "lru"
        self._num_slots = num_slots
        self._summaries: SummaryTable | None = None
        self._summarizer = summarizer
        if plan.choice is None:
            return
        self._policy = plan.choice.page_policy
        self._pages = SelectedPageCache(
            self.arena,
            plan.page_offset,
            geometry,
            plan.page_places,
            num_slots,
            self._policy,
        )
        self._summaries = SummaryTable(
            self.arena,
            plan.summary_offset,
            geometry,
            plan.choice.page_tokens,
            plan.summary_rows,
            num_slots,
            channels=plan.choice.channels == "dram",
            records_on_device=plan.summaries_on_device,
        )
        self._fetcher = PageFetcher(self.files, self._seals, self._pages)
        self._balancer = DramBalancer(
            geometry,
            plan,
            self.frames,
            self._pages,
            self._summaries,
            self.busy,
            self.files.deadline_s,
        )

    def keep_hot_pages(self, memory: DeviceMemory) -> None:
        """Chosen pages are kept in this memory, too, which must live as long as the store.

        Raises:
            ValueError: the slots of this store have no summaries, so that nothing can be chosen.
        """
        if self._pages is None:
            raise ValueError("slots without summaries: nothing can be chosen")
        geometry = self.files.geometry
        self._hot = GpuPageCache(memory, self._fetcher, geometry, self._num_slots, self._policy)

    def take_hot_memory(self) -> DeviceMemory | None:
        """Hand over the memory of :meth:`keep_hot_pages`, which the caller manages from now on,
        before the first step; None: there is none."""
        hot, self._hot = self._hot, None
        return None if hot is None else hot.memory

    def identities(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """A number for what each of these slots holds, [n], positive, which stands for nothing
        else."""
        found: NDArray[np.int64] = (self._filled[slots] % _FILLINGS << _SLOT_BITS) + slots
        return found

    def divide_staging(self, pages: int) -> None:
        """Give :meth:`stream_x` half of the staging buffer, in pieces of so many pages of a layer.
        Page mode, before the first step."""
        theirs = self._staging_pieces // 2
        geometry, own = self.files.geometry, self._staging_pieces - theirs
        nbytes = pages * geometry.page_bytes
        self._staging = BufferPool(0, geometry.layer_bytes, own)
        count = theirs * geometry.layer_bytes // nbytes
        self._x_staging = BufferPool(own * geometry.layer_bytes, nbytes, count)
        self._x_pages = pages

    @property
    def device_places(self) -> int:
        """Pages that :meth:`keep_on_device` needs memory for."""
        return 0 if self._summaries is None else self._summaries.device_places

    @property
    def record_bytes(self) -> int:
        """Bytes from a block's records of a layer to those of the next layer; 0: there are none."""
        return 0 if self._summaries is None else self._summaries.layer_bytes

    def keep_on_device(self, memory: DeviceMemory) -> None:
        """Summaries, where the plan says so, are kept in this memory, before any are kept at all.

        Raises:
            ValueError: the slots have none, DRAM has them, or the memory is too small.
        """
        if self._summaries is None:
            raise ValueError("slots without summaries: nothing can be chosen")
        self._summaries.keep_on_device(memory)

    def streamed(
        self, contexts: Sequence[NDArray[np.int64]], most: float
    ) -> list[NDArray[np.int64]]:
        """Positions of blocks of these contexts that DRAM does not have and has room for, without
        taking any from running contexts: of each context, ascending, in all ``most`` of the blocks
        that are missing. Nothing, where room is for next to none."""
        found = [np.flatnonzero(self.frames.frames_of(slots) == NO_FRAME) for slots in contexts]
        missing = sum(map(len, found))
        room = self.frames.spare() + (0 if self._balancer is None else self._balancer.spare)
        if room < min(missing, _LEAST_ROOM):
            return [positions[:0] for positions in found]
        left = min(room, max(_LEAST_ROOM, int(most * missing)))
        seen = np.zeros(0, dtype=np.int64)
        for i, positions in enumerate(found):
            new = positions[~np.isin(contexts[i][positions], seen)]
            _, first = np.unique(contexts[i][new], return_index=True)  # X of several shares a slot
            new = new[np.sort(first)][:left]
            seen = np.concatenate([seen, contexts[i][new]])
            left -= len(new)
            found[i] = new
        return found

    def extend_context(self, request_id: str, start: int, slots: NDArray[np.int64]) -> None:
        """Slots of a request's blocks ``start``, ``start + 1``, ...; ``start`` 0 begins anew.

        Raises:
            ValueError: ``start`` is not where the known blocks end.
        """
        if start == 0:
            self.drop_context(request_id)
        known = self._contexts.get(request_id, NO_SLOTS)
        if start != len(known):
            raise ValueError(
                f"blocks of request {request_id} from {start} on cannot follow {len(known)}"
            )
        self._contexts[request_id] = np.concatenate([known, slots])
        self.frames.retain(slots)

    def drop_context(self, request_id: str) -> None:
        """The request does not run any more."""
        self._before.pop(request_id, None)
        slots = self._contexts.pop(request_id, None)
        if slots is not None:
            self._seals.release(self.frames.release_references(slots))

    def context_from(self, request_id: str, block: int) -> NDArray[np.int64]:
        """Slots of a request's blocks from ``block`` on, as far as they are known."""
        return self._contexts.get(request_id, NO_SLOTS)[block:]

    def contexts(
        self, request_ids: Sequence[str], blocks: Sequence[int]
    ) -> list[NDArray[np.int64]]:
        """Slots of the first ``blocks`` of these requests, or of fewer, as far as they are known.
        The same arrays as in the step before, for as long as the slots are the same."""
        found: list[NDArray[np.int64]] = []
        for request_id, count in zip(request_ids, blocks, strict=True):
            known = self._before.get(request_id, NO_SLOTS)
            if len(known) != count:
                whole = self._contexts.get(request_id, NO_SLOTS)
                known = whole[:count]
                if len(known) == count:  # else there will be more
                    self._before[request_id] = known
            found.append(known)
        return found

    def whole_contexts(self, request_ids: Sequence[str]) -> list[NDArray[np.int64]]:
        """Slots of all blocks of these requests, as far as they are known."""
        return [self._contexts.get(request_id, NO_SLOTS) for request_id in request_ids]

    def stream(
        self,
        contexts: Sequence[NDArray[np.int64]],
        chosen: Collection[int] = (),
        dense_layers: int = 0,
        layers: Sequence[int] | None = None,
        peer: ReadPath | None = None,
        *,
        elsewhere: bool = False,
    ) -> ContextStream:
        """Walk over the contexts of one step's rows in these ``layers``, ascending (default: in
        all); starts reading at once, unless they are attended to ``elsewhere``.

        Rows in ``chosen`` take part in the first ``dense_layers`` of them only.
        """
        self._used = time.monotonic()
        self._stream = ContextStream(
            self.files,
            self.frames,
            self._seals,
            self._staging,
            self._verifier,
            contexts,
            chosen,
            dense_layers,
            layers,
            peer=peer,
            latest=self._stream,
            elsewhere=elsewhere,
        )
        return self._stream

    @property
    def page_places(self) -> int:
        """Single pages that DRAM may hold; 0: nothing is chosen."""
        return 0 if self._pages is None else self._pages.places

    def answer_misses(self, mail: _io.Mailbox) -> MissAnswers:
        """Answer a device that lacks chosen pages, and asks for them by this memory.

        Raises:
            ValueError: the slots of this store have no summaries, so that nothing is chosen.
        """
        if self._pages is None:
            raise ValueError("slots without summaries: nothing can be chosen")
        return MissAnswers(self.files, self._seals, self._pages, self._fetcher, self.arena, mail)

    @property
    def checksums(self) -> ChecksumTable:
        """Digests of the pages of running contexts."""
        return self._seals

    def stream_x(
        self, contexts: Sequence[NDArray[np.int64]], layers: Sequence[int]
    ) -> ContextStream:
        """As :meth:`stream`, of blocks that hold X: the first pages of each layer are read.

        It has staging buffers of its own, so that one thread may use it while another one uses that
        of :meth:`stream`.

        Raises:
            ValueError: :meth:`divide_staging` was not called.
        """
        if self._x_staging is None:
            raise ValueError("the staging buffer was not divided: there is none for X")
        self._x_stream = ContextStream(
            self.files,
            self.frames,
            self._seals,
            self._x_staging,
            self._verifier,
            contexts,
            layers=layers,
            pages=self._x_pages,
            latest=self._x_stream,
        )
        return self._x_stream

    def rebalance_dram(
        self,
        contexts: Sequence[NDArray[np.int64]],
        choosing: Collection[int],
        later: Collection[int] = (),
    ) -> None:
        """A step has ended, with these slots of its rows, some of which chose, and others will
        ``later``: DRAM may be divided anew."""
        if self._balancer is not None:
            self._balancer.rebalance(contexts, choosing, later)

    def choose(
        self, contexts: Sequence[NDArray[np.int64]], rows: Sequence[int]
    ) -> SelectedContexts:
        """The contexts of rows whose queries choose pages. Blocks while summaries are read, and
        while frames are in use whose memory these need.

        Raises:
            ValueError: the slots of this store have no summaries.
        """
        if self._pages is None or self._summaries is None or self._summarizer is None:
            raise ValueError("slots without summaries: nothing can be chosen")
        if self._balancer is not None:
            self._balancer.choose(contexts, rows)
        self._used = time.monotonic()
        self._pages.step(self.files.speed.rates())
        if self._hot is not None:
            self._hot.step()
        self._chosen = SelectedContexts(
            self.files.geometry,
            self.frames,
            self._summaries,
            self._summarizer,
            self._tails,
            self._fetcher,
            contexts,
            rows,
            self._hot,
            self._chosen,
        )
        return self._chosen

    # ---- what a store does, with contexts ----

    @property
    def open_frames(self) -> int:
        """Frames that DRAM has now; the least it ever has is ``frames.frames``."""
        return self.frames.frames + (0 if self._balancer is None else self._balancer.lent)

    def _make_room(self, slots: NDArray[np.int64]) -> None:
        if self._balancer is not None:
            self._balancer.make_room(slots)

    def _forget_content(self, slots: NDArray[np.int64]) -> None:
        super()._forget_content(slots)
        if self._pages is not None and self._summaries is not None:
            self._pages.forget(slots)
            self._summaries.forget(slots)
        if self._hot is not None:
            self._hot.forget(slots)
        self._filled[slots] += 1

    def summary_rows(self, slots: NDArray[np.int64]) -> SummaryRows | None:
        """Rows for what selectors must know of slots, [n], whose frames from :meth:`reserve_frames`
        are being filled; None: nothing is kept. What the step reads must have been begun before,
        since rows are taken that nobody uses."""
        return None if self._summaries is None else self._summaries.reserve(slots)

    def filled(self, slots: NDArray[np.int64]) -> None:
        """The frames of these slots, and their :meth:`summary_rows`, are filled."""
        if self._summaries is not None:
            self._summaries.keep(slots)

    def load(self, job: LoadJob, *, whole: bool = False) -> None:
        """See :class:`TieredStore`."""
        if self._balancer is not None and whole:
            self._balancer.expect(job.request_id, job.slots)
        elif self._balancer is not None:
            self._balancer.reserve(len(job.slots))
        super().load(job, whole=whole)

    def take_load_outcomes(self, patience_s: float = 0.0) -> list[LoadOutcome]:
        """See :class:`TieredStore`."""
        outcomes = super().take_load_outcomes(patience_s)
        if self._balancer is not None:
            for outcome in outcomes:
                self._balancer.arrived(outcome.request_id)
        return outcomes

    def idle(self) -> bool:
        """See :class:`TieredStore`."""
        streams = (self._stream, self._x_stream)
        streaming = any(stream is not None and not stream.closed for stream in streams)
        return not streaming and super().idle()

    def gauges(self) -> dict[str, int]:
        """See :class:`TieredStore`."""
        hot, pages, summaries = self._hot, self._pages, self._summaries
        found = super().gauges()
        if hot is not None:
            found |= {"hot_pages_places": hot.places, "hot_pages_held": hot.held()}
        if pages is not None:
            found |= {"page_cache_places": pages.open_places, "page_cache_pages": pages.held()}
        if summaries is not None:
            found |= {"summaries_places": summaries.open_rows, "summaries_held": summaries.held()}
        return found
