"""Contexts in a store, decoded without vLLM by one device after the other.

Every case begins with the same contexts, filled anew, so that none is longer for those that come
later. K and V are random: no speed here depends on them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from transformers import LlamaConfig

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.metrics import Counters, counter_key
from vllm_ssdkv.base.sizes import MIB, format_size
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.io_engine import ThrottleRule
from vllm_ssdkv.config.selectors import SelectorName
from vllm_ssdkv.connector.kv_layout import paged_geometry
from vllm_ssdkv.kernels.operands.block_layout import PartialState
from vllm_ssdkv.offload.offloader import Offloader, Outcome
from vllm_ssdkv.offload.protocol import ContextDevice, ContextWork, Ticket
from vllm_ssdkv.offload.testing.drive_timing import FLASH_LATENCY_S
from vllm_ssdkv.profiling.decode_harness.decoder import (
    FILL_BLOCKS,
    PagedDecoder,
    Room,
    within_blocks,
)
from vllm_ssdkv.profiling.decode_harness.measure import Clocked
from vllm_ssdkv.profiling.decode_harness.models import (
    head_size,
    kv_bytes_per_token,
    kv_heads,
    make_model,
)
from vllm_ssdkv.store.io.testing.throttled import ThrottledEngine
from vllm_ssdkv.store.memory.summary_rows import row_bytes

Figures = dict[str, Any]
Share: TypeAlias = float | Literal["auto"]

WINDOW: Final = 64
"""Tokens in HBM."""
ROOM_BEHIND: Final = 208
"""Tokens that are decoded behind a context, at most."""
STAGING: Final = 8 * MIB
PATIENCE_S: Final = 60.0
"""Time limit of devices, and of writing contexts."""
_CPU: Final = torch.device("cpu")
_OWN: Final = counter_key("offload_step_seconds")
_STALL: Final = 1.5
"""Limit of a step's time as a multiple of the median: longer steps count as that."""
FAST: Final = 10**12
"""Bytes/s of a drive that is not slowed down."""
LINK: Final = ("query", "selection", "partials", "kv")
"""Payloads that cross the link."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the model's attention, which is all that counts here."""

    layers: int = 2
    kv_heads: int = 4
    queries_per_kv: int = 1
    head_size: int = 128

    @property
    def query_heads(self) -> int:
        """Query heads of a layer."""
        return self.kv_heads * self.queries_per_kv

    @property
    def hidden(self) -> int:
        """Numbers of a layer's input, of a model whose heads divide it."""
        return self.query_heads * self.head_size

    def model(self) -> torch.nn.Module:
        """A model of this attention and little else, with random weights in bf16."""
        config = LlamaConfig(
            num_hidden_layers=self.layers,
            num_attention_heads=self.query_heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            hidden_size=256,
            intermediate_size=512,
            vocab_size=256,
            max_position_embeddings=1 << 20,
            tie_word_embeddings=False,
            eos_token_id=None,
            bos_token_id=None,
        )
        return make_model(config, torch.device("cpu"), torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Contexts:
    """Contexts that are decoded at a time.

    Attributes:
        tokens: Of each.
        requests: Number of them.
        selector: By which each token is decoded.
        block_tokens: Tokens that are stored at once.
        on_drive: They come from the drive; else DRAM holds all of them.
        written: They are written to the drive, although DRAM holds them.
    """

    tokens: int
    requests: int
    selector: SelectorName = "exact"
    block_tokens: int = 16
    on_drive: bool = False
    written: bool = False

    @property
    def durable(self) -> bool:
        """True if the drive has them."""
        return self.on_drive or self.written

    @property
    def room(self) -> Room:
        """Room of a decoder for them."""
        return Room(self.requests, self.tokens + ROOM_BEHIND, self.block_tokens)


@dataclass(frozen=True, slots=True)
class Effort:
    """Steps of a case; after ``seconds`` no more than the ``least`` are done, and ``warm`` ones
    before that do not count."""

    steps: int = 16
    least: int = 2
    seconds: float = 2.0
    warm: int = 1


def options(contexts: Contexts, model: Any, budget: float) -> SSDKVConfig:  # noqa: ANN401 - transformers'
    """Options of the store: DRAM for all contexts, or for the blocks that are being written."""
    room = contexts.room
    given: dict[str, Any] = {
        "mode": "page",
        "selector": contexts.selector,
        "hbm_window_tokens": WINDOW,
        "io": {"staging": STAGING},
    }
    sparse: dict[str, Any] = {}
    if contexts.selector != "exact":
        sparse = {"budget": budget, "exact_below": 0}
        given["sparse"] = sparse
    config = within_blocks(SSDKVConfig.from_extra_config(given), room.block_tokens)
    geometry = paged_geometry(
        config,
        model.config.num_hidden_layers,
        kv_heads(model.config),
        head_size(model.config),
        room.block_tokens,
        model.dtype,
    )
    if contexts.durable:
        given["io"] |= {"throttle": [{"bandwidth": FAST}]}
    summaries = 0
    if sparse:
        summaries = MIB + room.blocks * row_bytes(geometry, config.page_tokens, channels=False)
    if contexts.on_drive:
        if not sparse:
            return _with_dram(given, STAGING + 2 * MIB)
        # Of chosen pages DRAM holds those of about one step.
        kv = contexts.tokens * contexts.requests * kv_bytes_per_token(model.config, model.dtype)
        pages = max(MIB, int(budget * kv))
        sparse |= {"summaries": summaries, "page_cache": pages}
        return _with_dram(given, STAGING + pages + summaries + 4 * MIB)
    pages = max(MIB, 64 * geometry.layer_bytes)
    if sparse:
        sparse |= {"summaries": summaries, "page_cache": pages}
    frames = (room.blocks + FILL_BLOCKS) * geometry.frame_bytes
    return _with_dram(given, STAGING + pages + summaries + frames + 32 * MIB)


def _with_dram(given: dict[str, Any], nbytes: int) -> SSDKVConfig:
    dram = format_size(-(-nbytes // MIB) * MIB)
    return SSDKVConfig.from_extra_config({**given, "dram_gib": dram})


class _Metered(Offloader):
    """Counts CPU time of the step's thread, which other work on the machine does not change.

    Attributes:
        cpu_s: Seconds, those for which it waits left out but for the calls.
    """

    def __init__(self, device: ContextDevice, counters: Counters, share: Share):
        super().__init__(device, PATIENCE_S, counters, share)
        self.cpu_s = 0.0

    def submit(self, work: ContextWork) -> Ticket:
        begun = time.thread_time()
        ticket = super().submit(work)
        self.cpu_s += time.thread_time() - begun
        return ticket

    def fold(self, ticket: Ticket, state: PartialState) -> Outcome:
        begun = time.thread_time()
        outcome = super().fold(ticket, state)
        self.cpu_s += time.thread_time() - begun
        return outcome


class Rig:
    """Decodes the same contexts again and again. Used by one thread; see :func:`opened`."""

    def __init__(self, decoder: PagedDecoder, contexts: Contexts):
        self._decoder, self._contexts = decoder, contexts
        self._names = [str(i) for i in range(contexts.requests)]
        layout = decoder.layout
        shape = contexts.tokens, layout.kv_heads, layout.head_size
        made = torch.Generator().manual_seed(0)
        self._key, self._value = (
            torch.randn(shape, generator=made).to(layout.dtype) for _ in range(2)
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of all contexts, in all layers."""
        each = kv_bytes_per_token(self._decoder.model.config, self._decoder.model.dtype)
        return self._contexts.tokens * self._contexts.requests * each

    def run(
        self,
        device: ContextDevice | None,
        effort: Effort,
        link: ThrottleRule | None = None,
        writes: Iterator[None] | None = None,
        share: Share = 1.0,
    ) -> Figures:
        """Figures of some steps.

        Args:
            device: That attends to contexts; None: the thread of the step does. Closed at the end.
            effort: Number of steps.
            link: Of the drive, where contexts come from there.
            writes: Taken one of before each step that counts.
            share: Of the device in what is attended to.

        Raises:
            BenchError: the drive took too long, or the device failed.
        """
        worker = self._decoder.worker
        with self._attending(device, link, share) as clocked:
            for _ in range(effort.warm):
                clocked.seconds()
            before, late = worker.counters.totals(), _late(device)
            offloader = worker.page_mode.offloader
            cpu = offloader.cpu_s if isinstance(offloader, _Metered) else 0.0
            seconds: list[float] = []
            own = [before.get(_OWN, 0.0)]
            while len(seconds) < effort.steps:
                if len(seconds) >= effort.least and sum(seconds) > effort.seconds:
                    break
                if writes is not None:
                    next(writes)
                seconds.append(clocked.seconds())
                own.append(worker.counters.totals().get(_OWN, 0.0))
            found = self._figures(seconds, before, worker.counters)
            layers = len(self._decoder.layout.layer_names)
            found["step_thread_s"] = float(np.median(np.diff(own))) / layers
            found["step_thread_cpu_s"] = 0.0
            if isinstance(offloader, _Metered):
                found["step_thread_cpu_s"] = (offloader.cpu_s - cpu) / len(seconds) / layers
            if offloader is not None:
                if not offloader.in_use:
                    raise BenchError("the device failed; the log has the reason")
                found["late"] = _late(device) - late
            return found

    def write(self, device: ContextDevice, steps: int, turns: int, drive: ThrottleRule) -> Figures:
        """Figures of some steps beside which full blocks are written, of the fastest turn.

        Writes go on beside steps, so a token takes as long as the longer one of the two.

        Args:
            device: That attends to contexts. Closed at the end.
            steps: Of a turn; a multiple of the tokens of a block.
            drive: To which is written, and from which nothing comes.

        Raises:
            BenchError: the drive took too long, or the device failed.
        """
        requests = self._contexts.requests
        tokens, found = steps * requests, []
        with self._attending(device, drive, 1.0) as clocked:
            clocked.seconds()
            for _ in range(turns):
                self._drain()
                busy, written = self._busy_s(), self._written()
                step_s = float(np.median([clocked.seconds() for _ in range(steps)]))
                self._drain()
                write_s = (self._busy_s() - busy) / tokens
                nbytes = (self._written() - written) / tokens
                found.append((step_s, write_s, nbytes))
        step_s, write_s, nbytes = min(found)
        return {
            "steps": steps,
            "step_s": step_s,
            "write_s": write_s,
            "tokens_per_s": 1 / max(step_s / requests, write_s),
            "bytes_written": nbytes,
            "token_bytes": self.kv_bytes / self._contexts.tokens / requests,
        }

    @contextmanager
    def _attending(
        self, device: ContextDevice | None, link: ThrottleRule | None, share: Share
    ) -> Iterator[Clocked]:
        """Contexts that are whole again, a device that attends to them, and a drive like that."""
        decoder, worker = self._decoder, self._decoder.worker
        self._fill()
        self._throttle(link)
        if device is not None:
            worker.page_mode.offloader = _Metered(device, worker.counters, share)
        try:
            yield Clocked(lambda ids: decoder.step(self._names, ids), len(self._names), _CPU)
        finally:
            offloader, worker.page_mode.offloader = worker.page_mode.offloader, None
            self._drain()  # a slot that is given back must not be written to any more
            for name in self._names:
                decoder.forget(name)
            if offloader is not None and not offloader.close(PATIENCE_S):
                raise BenchError("the device does not end")

    def _busy_s(self) -> float:
        """Seconds of work that the drive was given, by its model."""
        engine = self._decoder.opened.files.engine
        if not isinstance(engine, ThrottledEngine):
            raise BenchError("the drive has no model")
        return float(engine.busy_s().sum())

    def _written(self) -> float:
        """Bytes that the drive was given to write."""
        totals = self._decoder.worker.counters.totals()
        paths = [str(path) for path in self._decoder.opened.files.health.paths]
        return sum(totals.get(counter_key("bytes_written", device=path), 0.0) for path in paths)

    def _fill(self) -> None:
        """Have the store hold the contexts."""
        self._throttle(None)
        for name in self._names:
            self._decoder.start(name, self._contexts.tokens)
            self._decoder.fill(name, self._contexts.tokens, self._source)
        self._drain()

    def _drain(self) -> None:
        if self._contexts.durable and not self._decoder.drain(PATIENCE_S):
            raise BenchError(f"the contexts were not written within {PATIENCE_S:.0f} s")

    def _source(self, layer: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        del layer
        part = slice(first, first + count)
        return self._key[part], self._value[part]

    def _throttle(self, link: ThrottleRule | None) -> None:
        engine = self._decoder.opened.files.engine
        if isinstance(engine, ThrottledEngine):
            engine.change((link or ThrottleRule(bandwidth=FAST),))

    def _figures(
        self, seconds: list[float], before: dict[str, float], counters: Counters
    ) -> Figures:
        after = counters.totals()

        def gained(name: str, **labels: str) -> float:
            key = counter_key(name, **labels)
            return after.get(key, 0.0) - before.get(key, 0.0)

        if gained("sparse_rows_exact"):
            raise BenchError("DRAM had no room for some contexts' summaries")
        steps, layers = len(seconds), len(self._decoder.layout.layer_names)
        rows = steps * self._contexts.requests
        paths = [str(path) for path in self._decoder.opened.files.health.paths]
        link = {name: gained("offload_bytes", payload=name) / rows / layers for name in LINK}
        attend_s = gained("offload_seconds", part="attend")
        # Steps that take much longer are other work's. Median alone would miss those with writes.
        step_s = float(np.minimum(seconds, _STALL * np.median(seconds)).mean())
        return {
            "steps": steps,
            "step_s": step_s,
            "step_mean_s": sum(seconds) / steps,
            "tokens_per_s": self._contexts.requests / step_s,
            "link_bytes": link,
            "bytes_read": sum(gained("bytes_read", device=path) for path in paths) / steps,
            "kv_bytes": self.kv_bytes,
            "attend_s": attend_s / steps,
            "tickets": gained("offload_tickets"),
        }


def _late(device: ContextDevice | None) -> float:
    return 0.0 if device is None else device.statistics().late


@contextmanager
def opened(
    contexts: Contexts,
    model: Any,  # noqa: ANN401 - transformers' model
    budget: float,
    directory: Path,
) -> Iterator[Rig]:
    """A rig with a store of its own below ``directory``, which is removed afterwards."""
    place = directory / f"store{time.monotonic_ns()}"
    config = options(contexts, model, budget)
    try:
        with PagedDecoder(model, config, contexts.room, place, durable=contexts.durable) as decoder:
            yield Rig(decoder, contexts)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def link_rule(bandwidth: float, dilation: float) -> ThrottleRule:
    """A drive behind a link of so many bytes/s, slower by ``dilation``."""
    return ThrottleRule(bandwidth=bandwidth, latency_s=FLASH_LATENCY_S, dilation=dilation)
