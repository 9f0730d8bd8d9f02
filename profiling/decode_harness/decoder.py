"""A decoder of paged contexts: the worker of page mode under a Hugging Face model.

What vLLM's scheduler and block manager do for the worker is done here: which blocks are in HBM,
which slots hold what has left it, and the plan of each step.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from vllm_ssdkv.attention.exact import RowBatch
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.request import RequestOptions
from vllm_ssdkv.connector.graphs import piecewise_reason
from vllm_ssdkv.connector.identity.loaded_model import LoadedModel
from vllm_ssdkv.connector.kv_layout import KVLayout, paged_geometry
from vllm_ssdkv.connector.messages import ContextDelta, CopyToDram, Flush, Row, StepPlan
from vllm_ssdkv.connector.worker.binding import Binding
from vllm_ssdkv.connector.worker.device_decode import DeviceDecode
from vllm_ssdkv.connector.worker.device_memory import held_for_summaries, hold_summary_memory
from vllm_ssdkv.connector.worker.page_mode import ContextLayers, PageMode
from vllm_ssdkv.connector.worker.paged_attention import attend_layer, rows_of_step, store_new
from vllm_ssdkv.connector.worker.rank_store import EmbeddedRank
from vllm_ssdkv.connector.worker.worker import SSDKVWorker
from vllm_ssdkv.kernels.step_clock import AttentionClock
from vllm_ssdkv.profiling.decode_harness.attention import Attention, layer_of, timed
from vllm_ssdkv.profiling.decode_harness.forward import Forward, events_of
from vllm_ssdkv.profiling.decode_harness.models import head_size, kv_heads
from vllm_ssdkv.profiling.decode_harness.part_clock import AttentionTimer, PartClock
from vllm_ssdkv.store.context_store import ContextStore
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_header import KEY_BYTES
from vllm_ssdkv.store.open import StorePlace, open_rank
from vllm_ssdkv.store.open_store import OpenStore

FILL_BLOCKS: Final = 64
"""HBM blocks beside the windows, through which contexts pass on their way into the store."""

Source = Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]]
"""K and V [count, Hkv, D] of a layer's tokens: (layer, first token, count)."""


@dataclass(frozen=True, slots=True)
class Room:
    """Sizes of a decoder.

    Attributes:
        requests: At a time.
        longest: Tokens of a request, at most.
        block_tokens: Tokens of a block, which are written at once. Below ``page_tokens`` a page is
            a block: a size that engines refuse, to compare with.
        chunk: Tokens of a prompt that are computed in one step.
    """

    requests: int
    longest: int
    block_tokens: int = 16
    chunk: int = 256

    @property
    def blocks(self) -> int:
        """Number of blocks of all requests."""
        return self.requests * (-(-self.longest // self.block_tokens) + 1)


@dataclass(slots=True)
class _Request:
    """A running request.

    Attributes:
        prompt: Tokens that are attended from exactly.
        tokens: Tokens that have KV.
        hbm: HBM block of each block; 0: it has left.
        slots: Of the blocks that the store has, from the first on.
    """

    asked: RequestOptions | None
    prompt: int
    tokens: int = 0
    hbm: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


if TYPE_CHECKING:
    from vllm_ssdkv.node.client.node_drives import NodeDrives


def within_blocks(config: SSDKVConfig, block_tokens: int) -> SSDKVConfig:
    """Options with pages that are no longer than a block."""
    page_tokens = min(config.page_tokens, block_tokens)
    return config.model_copy(update={"page_tokens": page_tokens})


def _on_nodes(
    config: SSDKVConfig, directory: Path
) -> tuple[SSDKVConfig, Callable[[Counters], NodeDrives]]:
    """Options whose devices are the drives of nodes, and what connects to these."""
    # Not for those who name no nodes: it imports vLLM, which decoding does without.
    from vllm_ssdkv.connector.node_startup import volume_peers
    from vllm_ssdkv.node.client import node_drives

    peers = volume_peers(config, f"decoder {os.getpid()}", 0)
    drives = node_drives.find_drives(peers, "decoder", directory)
    connect = functools.partial(
        node_drives.NodeDrives, peers, drives, "decoder", deadline_s=config.io.deadline
    )
    return node_drives.with_node_drives(config, drives, peers), connect


class PagedDecoder:
    """Decodes requests whose contexts are in the store. Used by one thread.

    Example::

        with PagedDecoder(model, config, Room(1, 4096), directory) as decoder:
            decoder.prefill("a", prompt)
            logits = decoder.step(["a"], prompt[-1:])
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - transformers' model
        config: SSDKVConfig,
        room: Room,
        directory: Path,
        *,
        durable: bool = True,
    ) -> None:
        """Open a store of its own below ``directory``.

        Args:
            model: On the device that attends.
            config: Page mode's options but for ``devices``, which is ``directory``; with ``nodes``
                that has the state.
            room: Sizes.
            directory: Is made.
            durable: Write contexts to the drive; else they stay in DRAM, which must hold them.

        Raises:
            SSDKVError: the store cannot be opened.
        """
        self.model, self.device, self.room = model, model.device, room
        self.durable, self.passes = durable, Forward(model)
        self.timer: AttentionTimer | None = None
        self._parts: PartClock | None = None
        shape = model.config
        self._layers = int(shape.num_hidden_layers)
        names = tuple(f"layers.{i}" for i in range(self._layers))
        heads, size, block = kv_heads(shape), head_size(shape), room.block_tokens
        config = within_blocks(config, block)
        geometry = paged_geometry(config, self._layers, heads, size, block, model.dtype)
        self.window = config.window_tokens
        self.pages = self.window < room.longest
        """True if anything ever leaves HBM."""
        held = min(room.longest, self.window + room.chunk) // block + 2
        num_blocks = 1 + room.requests * held + FILL_BLOCKS
        queries = int(shape.num_attention_heads)
        self.layout = KVLayout(
            names, block, heads, size, model.dtype, geometry, 1, num_blocks, query_heads=queries
        )
        directory.mkdir(parents=True, exist_ok=True)
        identity = Fingerprint({"model": type(model).__name__, "layers": self._layers})
        make = functools.partial(StorePlace, geometries=[geometry], fingerprint=identity)
        needed = make(config).capacity_for(room.blocks if self.pages else 1)
        where: dict[str, object] = {"state_dir": str(directory)}
        if not config.nodes:
            where = {"devices": [{"path": str(directory), "capacity": max(needed, 16 << 20)}]}
        given = config.model_dump(mode="json", exclude_unset=True, exclude={"page_tokens"})
        whole = SSDKVConfig.from_extra_config({**given, **where})
        self.config = within_blocks(whole, block)
        connect = None
        if config.nodes:
            self.config, connect = _on_nodes(self.config, directory)
        place = make(self.config)
        contexts = room.blocks if self.pages else 0
        drives = None if connect is None else connect(place.counters)
        opened = self.opened = self._open(place, contexts, drives)
        self._free_slots = list(range(opened.num_slots))[::-1]
        self._free_blocks = list(range(num_blocks))[:0:-1]  # block 0 is vLLM's null block
        modules = [m for m in model.modules() if getattr(m, "layer_idx", None) is not None]
        access = EmbeddedRank(opened, ContextStore, drives)
        layers = ContextLayers(range(self._layers))
        page_mode = functools.partial(PageMode.open, self.config, self.layout, access, layers)
        tell_weights = functools.partial(place.tell_weights, 0)
        binding = Binding(LoadedModel(modules, lambda: ""), 0, tell_weights)
        self.worker = SSDKVWorker(self.config, self.layout, access, page_mode, binding)
        self._caches: list[torch.Tensor] = []
        try:
            for _ in names:
                blocks = num_blocks, heads * block * 2 * size
                self._caches.append(torch.zeros(blocks, dtype=model.dtype, device=self.device))
            self.worker.register(dict(zip(names, self._caches, strict=True)))
            self._paged = self.worker.page_mode
            self._paged.device = self._device_decode()
        except BaseException:
            self.close()
            raise
        self._requests: dict[str, _Request] = {}
        self._epoch = self._step = 0
        self._rows: RowBatch | None = None
        self._now: list[tuple[_Request, int]] = []
        self._mapping = torch.zeros(0, dtype=torch.int64)

    def _device_decode(self) -> DeviceDecode | None:
        """Attention that is captured with the model; None: layer by layer."""
        paged, new_event = self._paged, events_of(self.device)
        reason = piecewise_reason(paged.config, paged.layout, paged.layers)
        if not self.passes.captures or new_event is None or reason:
            return None
        rows, blocks = self.room.requests, self.room.blocks // self.room.requests
        stride, where = self._caches[0].stride(0), self.device
        device = DeviceDecode(paged, rows, blocks, stride, where, new_event)
        widest = blocks + -(-self.window // self.room.block_tokens) + 2
        self._batch = device.batch(
            torch.full((rows,), -1, dtype=torch.int64, device=where),
            torch.zeros(rows, dtype=torch.int32, device=where),
            torch.zeros((rows, widest), dtype=torch.int32, device=where),
        )
        return device

    def _open(self, place: StorePlace, contexts: int, drives: NodeDrives | None) -> OpenStore:
        """Open the store, with memory of the device for summaries where the options give any."""
        hold_summary_memory(self.config, self.device)
        held = held_for_summaries()
        return open_rank(place, 0, place.counters, contexts, remote=drives, hbm_summaries=held)

    def __enter__(self) -> PagedDecoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what vLLM's block manager does ----

    def _make_room(self, request: _Request, end: int) -> None:
        """HBM blocks for the tokens before ``end``; those behind the window become free."""
        block = self.room.block_tokens
        behind = max(0, request.tokens - self.window + 1) // block if self.pages else 0
        for index in range(min(behind, len(request.hbm)) - 1, -1, -1):
            if not request.hbm[index]:
                break
            self._free_blocks.append(request.hbm[index])
            request.hbm[index] = 0
        while len(request.hbm) * block < end:
            request.hbm.append(self._free_blocks.pop())

    def _row(self, name: str, request: _Request, count: int) -> Row:
        block, computed = self.room.block_tokens, request.tokens
        start = max(0, computed - self.window + 1) // block if self.pages else 0
        fence = request.hbm[(computed - 1) // block] if computed else 0
        first = request.hbm[computed // block]
        of_prompt = computed < request.prompt
        return Row(name, first, fence, computed, start, count, request.asked, of_prompt)

    def _save(self, plan: StepPlan, name: str, request: _Request, tokens: int) -> None:
        """Every block that is complete with ``tokens`` gets a slot."""
        begin, end = len(request.slots), tokens // self.room.block_tokens
        if begin >= end or not self.pages:
            return
        self._epoch += 1
        slots = [self._free_slots.pop() for _ in range(begin, end)]
        request.slots += slots
        plan.contexts.append(ContextDelta(name, begin, np.array(slots, dtype=np.int64)))
        copies = [
            (slot, self._epoch, request.hbm[index], index)
            for index, slot in enumerate(slots, begin)
        ]
        plan.save = _joined(plan.save, CopyToDram.of(copies))
        if self.durable:
            keys = [(slot, self._epoch, os.urandom(KEY_BYTES)) for slot in slots]
            commit = Flush.of(keys)
            plan.commit = Flush(
                np.concatenate([plan.commit.slots, commit.slots]),
                np.concatenate([plan.commit.epochs, commit.epochs]),
                plan.commit.keys + commit.keys,
            )

    def _plan(self) -> StepPlan:
        self._step += 1
        return StepPlan(self._step, (0,))

    def _carry_out(self, plan: StepPlan, work: Callable[[], torch.Tensor] | None) -> Any:  # noqa: ANN401
        worker = self.worker
        worker.begin(plan)
        step, parts = worker.page_mode.step, self._parts
        if step is not None and parts is not None and self.device.type == "cuda":
            step.clock = parts
        found = None if work is None else work()
        worker.end(plan)
        if step is not None and parts is not None and isinstance(step.clock, AttentionClock):
            parts.add(step.clock)
        worker.collect(idle=False)
        report = worker.take_report()
        if report is not None and (report.poisoned or report.bad or report.failed_writes):
            raise StoreError(
                f"step {plan.step}: requests {report.poisoned} lost, slots {report.bad} bad, "
                f"writes of {report.failed_writes} failed"
            )
        if report is not None and (report.skipped or report.unbound):
            raise StoreError(f"step {plan.step}: slots {report.skipped} were not stored")
        return found

    # ---- requests ----

    def start(self, name: str, prompt: int, asked: RequestOptions | None = None) -> None:
        """Begin a request of so many prompt tokens, which chooses as it asks."""
        self._requests[name] = _Request(asked, prompt)

    def ask(self, name: str, asked: RequestOptions | None) -> None:
        """Let the request choose like this from now on."""
        self._requests[name].asked = asked

    def tokens(self, name: str) -> int:
        """Tokens of a request that have KV."""
        return self._requests[name].tokens

    def context_tokens(self, name: str) -> int:
        """Tokens of a request that are behind its window."""
        request = self._requests[name]
        behind = max(0, request.tokens - self.window + 1) if self.pages else 0
        return behind // self.room.block_tokens * self.room.block_tokens

    def forget(self, name: str) -> None:
        """End a request; what was stored of it is dropped."""
        request = self._requests.pop(name)
        self._free_blocks += [block for block in request.hbm if block]
        plan = self._plan()
        plan.forget, plan.discard = [name], list(request.slots)
        self._carry_out(plan, None)
        self._free_slots += request.slots

    def fill(self, name: str, tokens: int, source: Source) -> None:
        """Give a request that has begun the KV of its first ``tokens`` tokens."""
        request, block = self._requests[name], self.room.block_tokens
        most = FILL_BLOCKS * block
        while request.tokens < tokens:
            first = request.tokens
            end = min(tokens, first + most - first % block)
            if not self.pages:
                end = min(tokens, first + 16 * most)
            self._make_room(request, end)
            mapping = self._slots_of(request, first, end)
            for layer, cache in enumerate(self._caches):
                key, value = source(layer, first, end - first)
                store_new(self._paged, key, value, cache, mapping)
            plan = self._plan()
            self._save(plan, name, request, end)
            request.tokens = end
            self._carry_out(plan, None)
            self._make_room(request, end)

    def prefill(self, name: str, ids: Sequence[int]) -> torch.Tensor:
        """Compute a request's prompt, chunk by chunk; logits [vocabulary] behind its last token."""
        if name not in self._requests:
            self.start(name, len(ids))
        logits = torch.zeros(0)
        for first in range(0, len(ids), self.room.chunk):
            part = torch.tensor([ids[first : first + self.room.chunk]], device=self.device)
            logits = self._forward([name], part)[0]
        return logits

    def step(self, names: Sequence[str], ids: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocabulary] of requests behind one more token each, ``ids`` [R]."""
        return self._forward(names, ids[:, None])

    # ---- the forward pass ----

    def _slots_of(self, request: _Request, first: int, end: int) -> torch.Tensor:
        """Places of the tokens in HBM, int64 [end - first], on the device."""
        position = np.arange(first, end)
        block = self.room.block_tokens
        blocks = np.array(request.hbm, dtype=np.int64)[position // block]
        return torch.from_numpy(blocks * block + position % block).to(self.device)

    def _forward(self, names: Sequence[str], ids: torch.Tensor) -> torch.Tensor:
        count, plan = ids.shape[1], self._plan()
        requests = [self._requests[name] for name in names]
        positions, mappings = [], []
        for name, request in zip(names, requests, strict=True):
            end = request.tokens + count
            self._make_room(request, end)
            plan.rows.append(self._row(name, request, count))
            self._save(plan, name, request, end)
            positions.append(torch.arange(request.tokens, end))
            mappings.append(self._slots_of(request, request.tokens, end))
        self._mapping = torch.cat(mappings)
        self._now, self._rows = [(request, count) for request in requests], None
        where = torch.stack(positions).to(self.device)
        work = functools.partial(self._pass, ids, where)
        logits: torch.Tensor = self._carry_out(plan, work)
        for request in requests:
            request.tokens += count
        return logits

    def _pass(self, ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """Do the pass, by one graph where the device serves the step and no part of it is timed."""
        attention: Attention = self._attend
        if self.timer is not None:
            attention = timed(attention, self.timer)
        device, timing = self._paged.device, self.timer or self._parts
        if device is None or timing or len(ids) != self.room.requests:
            return self.passes(ids, where, attention)
        if not device.serves or (device.armed and not device.answered):
            return self.passes(ids, where, attention)
        ends = [request.tokens + 1 for request, _ in self._now]
        batch = self._batch
        # A capture does steps of its own: of padding, which asks for no page.
        batch.slots.fill_(-1)
        self.passes.capture(len(ids), self._attend_by_tables)
        batch.slots.copy_(self._mapping)
        batch.seq_lens.copy_(torch.tensor(ends))
        table = torch.zeros(batch.block_table.shape, dtype=torch.int32)
        for row, (request, _) in enumerate(self._now):
            table[row, : len(request.hbm)] = torch.tensor(request.hbm, dtype=torch.int32)
        batch.block_table.copy_(table)
        logits = self.passes(ids, where, attention, self._attend_by_tables)
        if not self.passes.captures:  # layers have attended one by one
            device.close()
            self._paged.device = None
        return logits

    def _attend_by_tables(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        device, layer = self._paged.device, layer_of(module)
        if device is None:
            raise RuntimeError("there are no tables to attend by")
        if layer == 0:
            device.find_rows(self._batch)
        queries, keys, values = (part[:, :, 0].contiguous() for part in (query, key, value))
        out, cache = torch.empty_like(queries), self._caches[layer]
        device.store(keys, values, cache, self._batch)
        device.attend(layer, queries, cache, out, scale)
        return out[:, None]

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        batch, heads, count, size = query.shape
        layer = layer_of(module)
        queries, keys, values = (
            part.transpose(1, 2).reshape(batch * count, -1, size).contiguous()
            for part in (query, key, value)
        )
        store_new(self._paged, keys, values, self._caches[layer], self._mapping)
        if self._rows is None:
            self._rows = self._rows_of_step()
        out = torch.empty_like(queries)
        attend_layer(
            self._paged,
            self.layout.layer_names[layer],
            queries,
            values,
            self._caches[layer],
            out,
            self._rows,
            scale,
        )
        return out.view(batch, count, heads, size)

    def _rows_of_step(self) -> RowBatch:
        if self._paged.step is None:
            raise RuntimeError("there is no step to attend for")
        block = self.room.block_tokens
        ends = np.array([request.tokens + count for request, count in self._now], dtype=np.int64)
        counts = np.array([count for _, count in self._now], dtype=np.int64)
        widest = max(len(request.hbm) for request, _ in self._now)
        table = np.zeros((len(self._now), widest), dtype=np.int32)
        for row, (request, _) in enumerate(self._now):
            table[row, : len(request.hbm)] = request.hbm
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return rows_of_step(self._paged.step, starts, ends, table, block)

    # ---- measuring ----

    def time_parts(self, parts: PartClock | None) -> None:
        """Have this clock get the times of the steps from now on. On a GPU it waits for the
        device."""
        self._parts = parts

    def drain(self, timeout_s: float) -> bool:
        """Wait until every block that was to be written is; False: not in time."""
        done = self.worker.store.drain(timeout_s)
        self.worker.collect(idle=False)
        return done

    def leave_frames(self, names: Sequence[str], blocks: int | None = None) -> None:
        """Have the first ``blocks`` of requests, or all, on the drives alone, which have them."""
        store = self.worker.page_mode.store
        for slots in store.whole_contexts(names):
            store.frames.forget(slots[:blocks])

    def close(self) -> None:
        """Give everything back, the memory that CUDA has pinned first: another decoder's arena may
        lie at the same address."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                cudart: Any = torch.cuda.cudart
                cudart().cudaHostUnregister(self.opened.arena.address)
        finally:
            self._caches.clear()
            self.worker.close()


def _joined(one: CopyToDram, other: CopyToDram) -> CopyToDram:
    parts = (
        np.concatenate([getattr(one, f.name), getattr(other, f.name)])
        for f in dataclasses.fields(CopyToDram)
    )
    return CopyToDram(*parts)
