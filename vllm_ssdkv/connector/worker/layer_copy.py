"""Copies the blocks that a step completes layer by layer, each layer beside the next ones.

InstInfer, layer-wise prefill: KV of layer i leaves HBM while layer i + 1 computes, and about two
layers wait at most. A prompt's last layers then leave little to copy when the step ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import DeadlineError
from vllm_ssdkv.base.host import nearby_cpus
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.kv_layout import KVLayout
from vllm_ssdkv.connector.messages import CopyToDram, SlotArray
from vllm_ssdkv.connector.worker.block_copy import BlockPort, LeavingBlocks
from vllm_ssdkv.connector.worker.stream_fence import StreamFence
from vllm_ssdkv.store.io.engines.daemon_executor import DaemonExecutor

if TYPE_CHECKING:
    from vllm_ssdkv.store.memory.summary_rows import SummaryRows

    ReserveRows = Callable[[SlotArray], SummaryRows | None]

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 2
"""Layers that wait to be copied or are being copied. More would let the copies of a slow link pile
up behind a step that computes fast; with one, a copy that takes a moment longer stops the step."""

LEAST_BYTES: Final[Mapping[str, int | None]] = {"cuda": 1 << 20, "cpu": None}
"""Bytes of one layer of a step's blocks, by type of device, below which handing a layer over takes
about as long as copying it. On the CPU no layer goes alone: its copy would take a core that
computes, and the step gains nothing (``bench_engine``). Tests and benches set another bound."""

Reserve = Callable[[SlotArray], NDArray[np.int32]]


@dataclass
class _OpenStep:
    """The blocks of one step that go by layers."""

    save: CopyToDram
    frames: NDArray[np.int32]
    reserve_rows: ReserveRows
    missing: Counter[int]
    """Layers that have not ended yet, by their place in a slot: several, where KV cache groups
    share their blocks' memory."""
    told: set[str] = field(default_factory=set)
    copies: dict[int, Future[None]] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    """Places of layers that were computed more than once: a copy may be of the time between."""

    @functools.cached_property
    def blocks(self) -> LeavingBlocks:
        """The blocks, with rows that are taken when the first layer goes: the step then has what it
        reads."""
        save = self.save
        rows = self.reserve_rows(save.slots)
        return LeavingBlocks(save.block_ids, self.frames, rows, save.index)


class LayerCopier:
    """Copies each layer of a step's blocks in a thread of its own, on a stream of its own.

    The thread of the forward pass calls :meth:`begin`, :meth:`computed` after each layer, and
    :meth:`end`, or :meth:`drop` where a step failed. Nothing that it copied is committed before
    :meth:`end` has returned. On a GPU this has not been run yet.

    Example:
        >>> copier.begin(plan.save, reserve, reserve_rows)  # doctest: +SKIP
        >>> copier.computed("model.layers.0.self_attn.attn")  # doctest: +SKIP
        >>> filled = copier.end()  # doctest: +SKIP
    """

    def __init__(
        self,
        port: BlockPort,
        layout: KVLayout,
        device: torch.device,
        deadline_s: float,
        counters: Counters,
    ):
        """Start the thread, on the CPUs of the NUMA node that the calling thread is bound to.

        Args:
            port: Copies.
            layout: Of this rank's KV.
            device: Where the blocks are.
            deadline_s: Of each wait for a copy.
            counters: Of this rank.
        """
        self.least_bytes = LEAST_BYTES[device.type]
        """A layer of fewer bytes of blocks is copied with the others, when the step ends; None:
        every layer is."""
        self._port = port
        self._deadline_s = deadline_s
        self._counters = counters
        self._device = device
        whole = layout.geometry.kv_pages * layout.geometry.payload_bytes
        self._block_bytes = whole // len(layout.layer_names)
        groups = (layout.layer_names, *layout.overlaid)
        self._places = {name: i for group in groups for i, name in enumerate(group)}
        self._names = Counter(self._places.values())
        self._never = "states" if layout.has_states else ""
        self._step: _OpenStep | None = None
        self._under_way: deque[Future[None]] = deque()
        self.most_waiting = 0
        """Layers that waited or were being copied at a time, at most."""
        counters.set("layers_waiting", 0)
        self._thread = DaemonExecutor(1)
        cuda: Any = torch.cuda
        self._stream: Any = cuda.Stream(device) if device.type == "cuda" else None
        self._thread.submit(_spread, nearby_cpus(os.sched_getaffinity(0)))

    @property
    def waiting(self) -> int:
        """Layers that wait or are being copied."""
        return sum(not copy.done() for copy in self._under_way)

    def begin(
        self,
        save: CopyToDram,
        reserve: Reserve,
        reserve_rows: ReserveRows,
        *,
        has_inputs: bool = False,
    ) -> None:
        """A step is about to complete these blocks: take frames, if their layers go one by one.

        Args:
            save: The blocks.
            reserve: Gives frames [k] to the first k of some slots [n], without a wait.
            reserve_rows: Gives rows to slots, [k], for what selectors must know of them.
            has_inputs: Some of them are stored as X, which is copied when the step ends.
        """
        if not len(save.slots):
            return
        way, least = self._never or ("inputs" if has_inputs else ""), self.least_bytes
        if not way and least is None:
            way = "cpu"
        elif not way and len(save.slots) * self._block_bytes < (least or 0):
            way = "small"
        if not way:
            frames = reserve(save.slots)
            held = len(frames)
            if held:
                part = save.part(np.arange(len(save.slots)) < held)
                self._step = _OpenStep(part, frames, reserve_rows, self._names.copy())
                return
            way = "frames"
        self._counters.add("step_copies", 1, way=way)

    def computed(self, layer_name: str) -> None:
        """A layer has its attention, and its K and V are in HBM: copy it.

        Waits for the oldest copy where :data:`MOST_WAITING` are under way. Any layer may come
        twice: it is then copied when the step ends.

        Raises:
            DeadlineError: a copy does not end.
            Exception: of the copy that failed.
        """
        step = self._step
        place = None if step is None else self._places.get(layer_name)
        if step is None or place is None:
            return
        if layer_name in step.told:
            step.again.add(place)
            return
        step.told.add(layer_name)
        step.missing[place] -= 1
        if step.missing[place] or place in step.again:
            return
        self._make_room()
        fence = StreamFence(self._device)
        fence.set()
        copy = self._thread.submit(self._copy, place, step.blocks, fence)
        step.copies[place] = copy
        self._under_way.append(copy)
        if len(self._under_way) > self.most_waiting:
            self.most_waiting = len(self._under_way)
            self._counters.set("layers_waiting", self.most_waiting)

    def end(self) -> int:
        """The forward pass is over: have the rest copied, and wait for it.

        Returns:
            How many blocks, the first ones of :meth:`begin`, are in their frames as a whole.

        Raises:
            DeadlineError: a copy does not end.
            Exception: of the copy that failed.
        """
        step = self._step
        if step is None:
            return 0
        beside = {place for place, copy in step.copies.items() if copy.done()} - step.again
        while self._under_way:
            self._await_oldest()
        if step.copies:
            for place in sorted(self._names.keys() - (step.copies.keys() - step.again)):
                self._port.save_layer(place, step.blocks)
        else:
            self._port.save(step.blocks)
        self._step = None
        self._counters.add("step_copies", 1, way="layers" if step.copies else "untold")
        self._counters.add("layers_copied", len(beside), when="beside")
        self._counters.add("layers_copied", len(self._names) - len(beside), when="end")
        return len(step.frames)

    def drop(self) -> SlotArray:
        """Give up a step that failed; slots [k] whose frames are worthless, and not in use.

        Raises:
            DeadlineError: a copy does not end.
        """
        step = self._step
        if step is None:
            return np.zeros(0, dtype=np.int64)
        if wait(self._under_way, self._deadline_s).not_done:
            raise self._late()
        self._under_way.clear()
        self._step = None
        return step.save.slots

    def close(self, timeout_s: float) -> bool:
        """End the thread. Whether no copy is under way any more."""
        self._thread.shutdown()
        return not wait(self._under_way, timeout_s).not_done

    def _make_room(self) -> None:
        while self._under_way and self._under_way[0].done():
            self._await_oldest()
        if len(self._under_way) < MOST_WAITING:
            return
        started = time.monotonic()
        self._await_oldest()
        self._counters.add("layer_copy_waits", 1)
        self._counters.add("layer_copy_wait_seconds", time.monotonic() - started)

    def _await_oldest(self) -> None:
        if wait([self._under_way[0]], self._deadline_s).not_done:
            raise self._late()
        self._under_way.popleft().result()

    def _late(self) -> DeadlineError:
        cause = "there are too few processors for what runs on them"
        if self._stream is not None:
            cause = "the GPU has not computed it, or another rank is late: see its log"
        return DeadlineError(
            f"a layer of KV was not copied to DRAM within {self._deadline_s:g} s (io.deadline): "
            f"{cause}"
        )

    def _copy(self, place: int, blocks: LeavingBlocks, fence: StreamFence) -> None:
        cuda: Any = torch.cuda
        stream = self._stream
        with contextlib.nullcontext() if stream is None else cuda.stream(stream):
            fence.follow()
            self._port.save_layer(place, blocks)


def _spread(cpus: set[int]) -> None:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        logger.warning("ssdkv: layers are copied on the CPUs of the step itself: %s", error)
