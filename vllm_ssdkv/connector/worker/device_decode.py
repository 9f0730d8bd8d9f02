"""Page mode's attention of decode steps on a GPU without the host in a layer.

The host plans a step and sends what changes in the tables. The rest is launches with the same
arguments in every step, which a graph can capture. ``connector/graphs.py`` says which engines have
it.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.attention.native_choice import is_native
from vllm_ssdkv.base.errors import ConfigError, StepError
from vllm_ssdkv.connector.names import PIECEWISE_FLAG
from vllm_ssdkv.connector.worker.device_tables import DeviceTables, Event, Leases
from vllm_ssdkv.kernels.operands.step_tables import MOST_MISSES, StepTables, TableRow
from vllm_ssdkv.sparse.protocol import Selector
from vllm_ssdkv.sparse.scores import Scorer
from vllm_ssdkv.sparse.selectors.adaptive import AdaptiveSelector
from vllm_ssdkv.sparse.selectors.bounds import BoundsSelector
from vllm_ssdkv.sparse.selectors.codes import CodesSelector
from vllm_ssdkv.sparse.selectors.spread import SpreadSelector
from vllm_ssdkv.sparse.selectors.window import WindowSelector

if TYPE_CHECKING:
    from vllm_ssdkv.base.metrics import Counters
    from vllm_ssdkv.connector.worker.page_mode import PageMode
    from vllm_ssdkv.connector.worker.paged_step import PagedStep
    from vllm_ssdkv.store.memory.device_memory import DeviceMemory
    from vllm_ssdkv.store.read.miss_answers import MissAnswers
    from vllm_ssdkv.triton_kernels.step_rows import Batch

Record = Literal["", "bounds", "spread", "codes"]

_RECORDS: Final[dict[type, Record]] = {
    WindowSelector: "",
    BoundsSelector: "bounds",
    SpreadSelector: "spread",
    CodesSelector: "codes",
}

_LOOK_S: Final = 0.0001
"""Interval at which the end of an armed step looks whether the device has done it."""


class Manner(NamedTuple):
    """Manner in which kernels choose as a selector does.

    Attributes:
        record: Data by which pages are scored; empty: they are not.
        sink_tokens: First tokens of a context that are chosen in any case.
        code_bits: Bits of a channel in codes.
        mass: Share of the attention that ends a choice; 1: nothing does.
    """

    record: Record
    sink_tokens: int
    code_bits: int
    mass: float

    @classmethod
    def of(cls, selector: Selector) -> Manner | None:
        """Manner of a selector; None: kernels do not choose as it does."""
        scorer: Selector | Scorer = selector
        mass = 1.0
        if isinstance(selector, AdaptiveSelector):
            scorer, mass = selector.scorer, selector.p
        estimates = isinstance(scorer, SpreadSelector) and scorer.estimate_rest
        if estimates or not is_native(selector, channels=False):
            return None
        record = _RECORDS[type(scorer)]
        sinks: int = selector.sink_tokens  # type: ignore[attr-defined]  # all of these have it
        return cls(record, sinks, selector.needs.codes, mass)

    def takes(self, other: Manner) -> bool:
        """Check whether rows may choose in the other manner where kernels choose in this one."""
        if other.sink_tokens != self.sink_tokens:
            return False
        scored = (other.record, other.code_bits) == (self.record, self.code_bits)
        return not other.record or (scored and other.mass in (1.0, self.mass))


class DeviceDecode:
    """Attention of a rank's decode steps by tables. Used by the thread of the forward pass.

    Attributes:
        leases: Memory that steps use until the device has done them.
        serves: Whether the step under way is one that the tables describe.
        armed: Whether rows of it may lack pages on the device, as a block has no frame.
        answered: Whether somebody brings these pages, and has room for all; else rows are lost.

    Example::

        device.begin(step)
        if device.serves:
            device.find_rows(batch)
            device.store(key, value, cache, batch)  # each layer
            device.attend(layer, query, cache, out, scale)
            device.end(step, counters, deadline_s)
    """

    def __init__(
        self,
        paged: PageMode,
        rows: int,
        blocks: int,
        block_stride: int,
        device: torch.device,
        new_event: Callable[[], Event],
    ) -> None:
        """Take the memory for steps of at most ``rows`` rows with contexts of so many ``blocks``.

        Args:
            paged: Page mode, for which there is no ``graphs.piecewise_reason``.
            rows, blocks: See above.
            block_stride: Elements from a block in HBM to the next, in every layer.
            device: Device of the caches.
            new_event: Makes a mark in its work.
        """
        self.leases = Leases(new_event)
        self.serves = self.armed = self.answered = False
        self._new_event = new_event
        self._listed: Mapping[int, TableRow] = {}
        layout, geometry = paged.layout, paged.layout.geometry
        self._geometry, self._block_stride = geometry, block_stride
        choices = paged.choices
        group = None if choices is None else choices.own
        self._own = None if group is None else Manner.of(group.selector)
        self._record_bytes = paged.store.record_bytes
        kernels: Any = importlib.import_module("vllm_ssdkv.triton_kernels.decode_layer")
        self._rows_of: Any = importlib.import_module("vllm_ssdkv.triton_kernels.step_rows")
        window = -(-paged.config.window_tokens // layout.block_tokens) + 2
        self._window_blocks, self._block_tokens = window, layout.block_tokens
        self._store = paged.store
        hot = paged.store.take_hot_memory()
        shape = StepTables(rows, blocks, layout.num_blocks, identified=hot is not None)
        self.tables = DeviceTables(shape, device)
        self._misses = self._make_misses(paged)
        choosing, own = None, self._own
        if own is not None:
            sinks = -(-own.sink_tokens // paged.block_layout.page_tokens)
            choosing = kernels.Choosing(own.record, sinks, own.code_bits, own.mass)
        self._layer = kernels.DecodeLayer(
            paged.block_layout,
            paged.context_layout,
            self.tables.shape,
            self.tables.memory,
            window_blocks=window,
            query_heads=layout.query_heads or layout.kv_heads,
            choosing=choosing,
            misses=self._misses,
        )
        if hot is not None:
            self._layer.hot = self._places_in(hot)
        outcome: torch.Tensor = self._layer.outcome
        pinned = device.type == "cuda"
        self._outcomes = [torch.zeros_like(outcome, device="cpu", pin_memory=pinned) for _ in "ab"]
        self._turn = 0
        self._answers: MissAnswers | None = None
        if self._misses is not None:  # last: nobody would end its threads if this failed
            self._answers = paged.store.answer_misses(self._mailbox(self._misses))

    def _make_misses(self, paged: PageMode) -> Any:  # noqa: ANN401 - ``misses.Misses``
        """Memory by which layers ask for pages; None: nothing is chosen, and nobody answers."""
        shape, every = self.tables.shape, self._geometry.pages_per_layer
        most = min(shape.rows * shape.blocks * every, paged.store.page_places, MOST_MISSES)
        if self._own is None or not most:
            return None
        kernels: Any = importlib.import_module("vllm_ssdkv.triton_kernels.misses")
        return kernels.Misses.empty(self._geometry.layers, most, shape, self.tables.memory)

    def _places_in(self, memory: DeviceMemory) -> Any:  # noqa: ANN401 - ``ResidentPages``
        """Places for chosen pages in this memory."""
        shape, geometry = self.tables.shape, self._geometry
        kernels: Any = importlib.import_module("vllm_ssdkv.triton_kernels.resident_pages")
        identities = self.tables.memory[shape.identities :].view(shape.rows, shape.blocks)
        lists = geometry.layers, geometry.heads, geometry.page_bytes
        if memory.places < (least := geometry.layers * geometry.heads * kernels.WAYS):
            raise ConfigError(
                f"sparse.hbm_pages has room for {memory.places} pages, and CUDA graphs keep at "
                f"least {least}: raise it, or leave it out"
            )
        return kernels.ResidentPages.empty(memory, lists, identities)

    def _mailbox(self, misses: Any) -> _io.Mailbox:  # noqa: ANN401 - ``misses.Misses``
        mail = misses.requests.data_ptr(), misses.replies.data_ptr()
        every = self._geometry.pages_per_layer
        return _io.Mailbox(*mail, misses.most, misses.layers, self.tables.shape.blocks, every)

    def begin(self, step: PagedStep) -> None:
        """Send what a step changes in the tables; see :attr:`serves`. Of two steps, the leases of
        the one before the last must have ended.

        Where blocks have no frame, nobody else uses the page cache until :meth:`end`, or until
        :meth:`withdraw`.
        """
        rows = step.table_rows(self._takes)
        shape = self.tables.shape
        self.serves = (
            rows is not None
            and len(rows) <= shape.rows
            and all(len(row.frames) <= shape.blocks for row in rows.values())
            and step.longest_window(self._block_tokens) <= self._window_blocks
        )
        self.armed = self.answered = False
        if rows is not None and self.serves:
            self._listed = rows
            self.armed = any(not row.frames.all() for row in rows.values())
            service = 0, 0
            if self.armed and self._answers is not None:
                base = self._answers.begin(step.slots_of_rows())
                service = base, int(1e9 * self._answers.patience_s)
                self.answered = base != 0 and self._most_missing(rows) <= self._answers.room
            slots = step.slots_of_rows() if shape.identified else []
            changes = self.tables.update(rows, service, [*map(self._store.identities, slots)])
            if len(changes):
                self._rows_of.change(self.tables.memory, changes)

    def _most_missing(self, rows: Mapping[int, TableRow]) -> int:
        """Pages that a layer can lack, at most."""
        every, heads = self._geometry.pages_per_layer, self._geometry.heads
        missing = [(int(np.count_nonzero(row.frames == 0)), row.most) for row in rows.values()]
        return sum(min(blocks * every, heads * most) for blocks, most in missing)

    def withdraw(self) -> None:
        """End the answers to a step that the host attends to, or that has failed."""
        if self._answers is not None and (served := self._answers.end()) is not None:
            self._answers.release(served.places)

    def end(self, step: PagedStep, counters: Counters, deadline_s: float) -> None:
        """End a step that kernels have attended to, or will. What it uses is given back when the
        device has done it, and its choices are counted then. An armed step is waited for, and its
        lost rows are those of ``step``; all are, where the device is not done in time.

        Raises:
            StepError: the tables do not describe the step.
        """
        if not self.serves:
            raise StepError(
                "a CUDA graph was replayed for a step that its tables do not describe: please "
                f"report it, and start with {PIECEWISE_FLAG}"
            )
        outcome, self._turn = self._outcomes[self._turn], 1 - self._turn
        outcome.copy_(self._layer.outcome, non_blocking=True)
        listed, taken = self._listed, list[NDArray[np.int32]]()

        def ended() -> None:
            for places in taken:
                self._release(places)
            step.give_back()
            step.count_listed(counters, list(listed), *outcome[1:].tolist())

        done = self._new_event() if self.armed else None
        if done is not None:
            done.record()
        self.leases.end_step(ended)
        if done is not None:
            in_time = self._wait(done, deadline_s)
            blocks = enumerate(listed)
            step.lose([block for row, block in blocks if not in_time or outcome[0, row]])
        if self._answers is not None and (served := self._answers.end()) is not None:
            taken.append(served.places)
            step.count_misses(served)

    def _release(self, places: NDArray[np.int32]) -> None:
        if self._answers is not None:
            self._answers.release(places)

    def _wait(self, event: Event, deadline_s: float) -> bool:
        """Wait until the device has come by a mark; False: it has not in time. It has as long as it
        waits for pages, and longer while they come."""
        answers, seen = self._answers, 0
        until = 0.0
        while not event.query():
            now = time.monotonic()
            if until and now >= until:
                return False
            if not until or (answers is not None and answers.answered != seen):
                patience = 0.0
                if answers is not None:
                    patience, seen = answers.patience_s, answers.answered
                until = now + deadline_s + patience
            time.sleep(_LOOK_S)
        return True

    def close(self) -> None:
        """Wait for all steps, and end their leases and the answers."""
        self.withdraw()
        self.leases.close()
        if self._answers is not None:
            self._answers.close()

    def _takes(self, selector: Selector) -> bool:
        """Check whether rows may choose so."""
        manner = Manner.of(selector)
        return self._own is not None and manner is not None and self._own.takes(manner)

    def batch(
        self, slots: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> Batch:
        """A batch, at places that do not change; see ``step_rows.Batch``.

        Raises:
            StepError: the tensors are not such.
        """
        same = slots.shape == seq_lens.shape and len(block_table) == len(seq_lens)
        kinds = slots.dtype, seq_lens.dtype, block_table.dtype
        if not same or kinds != (torch.int64, torch.int32, torch.int32):
            raise StepError(
                f"vLLM describes a batch by {kinds} of {tuple(slots.shape)}, "
                f"{tuple(seq_lens.shape)}, {tuple(block_table.shape)}: it runs another version "
                "than is supported; please report it"
            )
        found: Batch = self._rows_of.Batch(slots, seq_lens, block_table)
        return found

    def find_rows(self, batch: Batch) -> None:
        """Find the rows of a batch, before the first layer."""
        self._layer.begin(batch, self._block_stride)

    def store(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, batch: Batch
    ) -> None:
        """Store K and V of a layer's new tokens, [R, Hkv, D]."""
        self._layer.store(key, value, cache, batch)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """Write a layer's attention to ``out``, [R, Hq, D]; entries of the batch that have no row
        get zeros."""
        offsets = self._geometry.layer_offset(layer), layer * self._record_bytes
        self._layer.attend(layer, query, cache, out, scale, offsets)
