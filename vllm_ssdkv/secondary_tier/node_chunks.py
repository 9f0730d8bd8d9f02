"""Chunks in nodes, which several engines share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.kv_offload.base import OffloadingEvent, get_offload_group_idx
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from vllm_ssdkv.connector.node_startup import open_remote_index, open_remote_store
from vllm_ssdkv.secondary_tier.chunk_keys import ChunkKeys
from vllm_ssdkv.secondary_tier.node_jobs import NodeChunk, NodeHalves, NodeJob, NodeJobs
from vllm_ssdkv.secondary_tier.node_lookups import NodeLookups
from vllm_ssdkv.secondary_tier.tier_store import ChunkSpace

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext


class NodeChunks:
    """See :class:`~vllm_ssdkv.secondary_tier.tier.Chunks`. vLLM's thread waits for no node:
    look-ups and jobs have a thread each, which ask the nodes."""

    def __init__(self, space: ChunkSpace, keys: ChunkKeys, halves: NodeHalves, offset: int):
        """``offset``: of the chunk in a frame."""
        self.keys, self.counters = keys, space.place.counters
        self.deadline_s = space.config.io.deadline
        self._halves, self._chunk_bytes = halves, space.pool.row_bytes
        self._jobs = NodeJobs(halves, space.pool, offset, self.deadline_s, self.counters)
        self._heads: dict[str, bytes] = {}
        """Key of the first block of each request that has looked something up."""
        self._lookups = NodeLookups(
            halves.found,
            lambda request, keys: halves.awaits(request, keys, self._heads),
            self.counters,
        )
        self._open = 0
        """Jobs that have not ended, as far as vLLM knows."""
        self._done: list[JobResult] = []

    def found(self, key: bytes, name: OffloadKey, context: ReqContext) -> bool | None:
        """Check whether a chunk is stored; None: no node has answered yet, or another request is
        computing it."""
        self._heads.setdefault(context.req_id, self.keys.head(context))
        group, end = get_offload_group_idx(name), context.get_offload_key_position(name) or 0
        return self._lookups.found(key, context.req_id, group, end)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark chunks, head first, as just used."""
        self._jobs.touch(keys)

    def store(self, job: TransferJob) -> None:
        """Store chunks of vLLM's pool, in the background."""
        made = self._begin(job, loads=False)
        unknown = made.wanted - len(made.chunks)
        if unknown:
            self.counters.add("stores_skipped", unknown, cause="unknown")

    def load(self, job: TransferJob) -> None:
        """Load chunks into vLLM's pool, in the background."""
        self._begin(job, loads=True)

    def _begin(self, job: TransferJob, *, loads: bool) -> NodeJob:
        chunks = [
            NodeChunk(name, key, int(row))
            for name, row in zip(job.keys, job.chunk_ids, strict=True)
            if (key := self.keys.of(name, job.req_context)) is not None
        ]
        made = NodeJob(job.job_id, job.req_context.req_id, chunks, len(job.keys), loads)
        self._open += 1
        self._jobs.begin(made)
        return made

    @property
    def under_way(self) -> bool:
        """Check whether any job is under way."""
        return self._open > 0

    @property
    def pending(self) -> bool:
        """Check whether any job is under way, or has ended unnoticed."""
        return self.under_way or bool(self._done)

    def take_done(self) -> list[JobResult]:
        """Jobs that ended since the last call."""
        done, self._done = self._done, []
        return done

    def poll(self) -> None:
        """Take in jobs that have ended. A request does not find a chunk again that a load did not
        bring: vLLM would load it for ever."""
        for job in self._jobs.take_done():
            self._open -= 1
            self._lookups.missed(job.missing, job.request)
            self._done.append(job.result(self._chunk_bytes))

    def step_ended(self) -> None:
        """Ask for what was looked up in this step."""
        self._lookups.ask()

    def request_ended(self, request_id: str) -> None:
        """Forget what a request has asked for. It computes nothing more."""
        self._lookups.forget(request_id)
        self._heads.pop(request_id, None)
        self._jobs.leave(request_id)

    def renewed(self) -> None:
        """Nothing: other keys are asked for from now on."""

    def take_events(self) -> list[OffloadingEvent]:
        """None: this engine does not see what others store, and what the nodes evict."""
        return []

    def update_gauges(self) -> None:
        """Nothing: the nodes have gauges of their own."""

    def close(self) -> None:
        """Wait until the nodes have what was sent, and end the sessions."""
        with ExitStack() as stack:  # the last one first, and each whatever others raise
            stack.callback(self._halves.index.close)
            stack.callback(self._halves.store.close)
            stack.callback(self._jobs.close)
            stack.callback(self._lookups.close)


def open_node_chunks(space: ChunkSpace) -> NodeChunks:
    """Open a store in the nodes that the options name.

    Raises:
        ConfigError: the file that the option ``node_keys`` names has no keys.
        StoreError: no node answers, or one refuses.
    """
    place, pool = space.place, space.pool
    with ExitStack() as stack:
        store, geometry = open_remote_store(space.config, place, space.tokens, 0, place.counters)
        stack.callback(store.leave)
        store.tell_weights(space.weights)
        index, weights = open_remote_index(space.config, place, space.tokens, stack)
        space.started("node", (), store.describe())
        offset = np.uint64(geometry.layer_offset(0))

        def copy_in(frames: NDArray[np.int32], blocks: NDArray[np.int64]) -> None:
            pool.fill(store.load_frames.address(frames) + offset, blocks)

        store.start(copy_in)
        keys = space.keys(weights, index.name_key)
        chunks = NodeChunks(space, keys, NodeHalves(index, store), int(offset))
        stack.pop_all()
    return chunks
