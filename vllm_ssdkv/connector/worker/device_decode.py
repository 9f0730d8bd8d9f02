"""Page mode's attention of decode steps on a GPU without the host in a layer.

The host plans a step and sends what changes in the tables. The rest is launches with the same
arguments in every step, which a graph can capture. Steps that :attr:`DeviceDecode.serves` refuses
are attended to layer by layer, as before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from vllm_ssdkv.connector.worker.device_tables import DeviceTables, Event, Leases
from vllm_ssdkv.kernels.operands.block_layout import FLOAT8
from vllm_ssdkv.kernels.operands.step_tables import StepTables, TableRow
from vllm_ssdkv.sparse.protocol import Selector
from vllm_ssdkv.sparse.selectors.bounds import BoundsSelector
from vllm_ssdkv.sparse.selectors.spread import SpreadSelector
from vllm_ssdkv.sparse.selectors.window import WindowSelector

if TYPE_CHECKING:
    from vllm_ssdkv.connector.worker.page_mode import PageMode
    from vllm_ssdkv.connector.worker.paged_step import PagedStep


def piecewise_reason(paged: PageMode) -> str:
    """Reason for which no step of this rank can be captured, known at the start; empty: there is
    none."""
    config, sparse = paged.config, paged.config.sparse
    choices = paged.choices
    if paged.offloader is not None or paged.x_cache is not None:
        return "contexts are attended to, or projected, between layers"
    if not paged.layers.plain:
        return "some layers have attention sinks, or logits that are no plain products"
    if paged.block_layout.dtype in FLOAT8:
        return "K and V are stored in 8 bits"
    if list(paged.layers.numbers) != list(range(paged.layout.geometry.layers)):
        return "some layers attend to a window alone"
    if choices is None:
        return ""
    if sparse.hbm_pages is not None:
        return "pages are kept in HBM by the host (sparse.hbm_pages)"
    if choices.kept is not None or choices.dense_layers:
        return "what rows choose depends on steps or layers before"
    if choices.own is None or _scorer(choices.own.selector) is None:
        return f"the host takes part in the choice of the selector {config.selector}"
    return ""


def _scorer(selector: Selector) -> BoundsSelector | SpreadSelector | WindowSelector | None:
    """Selector by whose scores, if it has any, kernels choose; None: they do not choose as this
    one."""
    if isinstance(selector, WindowSelector) or type(selector) is BoundsSelector:
        return selector
    if type(selector) is SpreadSelector and not selector.estimate_rest:
        return selector
    return None


class DeviceDecode:
    """Attention of a rank's decode steps by tables. Used by the thread of the forward pass.

    Attributes:
        leases: Memory that steps use until the device has done them.
        serves: Whether the step under way is one that the tables describe.
        batch: Batch of a step, at fixed places: whoever runs the model fills it.

    Example::

        device.begin(step)
        if device.serves:
            device.find_rows()
            device.attend(layer, query, key, value, cache, out, scale)  # each layer
            device.count(step)
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
            paged: Page mode, for which there is no :func:`piecewise_reason`.
            rows, blocks: See above.
            block_stride: Elements from a block in HBM to the next, in every layer.
            device: Device of the caches.
            new_event: Makes a mark in its work.
        """
        self.leases, self.serves = Leases(new_event), False
        self._listed: Mapping[int, TableRow] = {}
        layout, geometry = paged.layout, paged.layout.geometry
        self._geometry, self._block_stride = geometry, block_stride
        choices = paged.choices
        group = None if choices is None else choices.own
        own = None if group is None else _scorer(group.selector)
        self._own = own
        self._record_bytes = paged.store.record_bytes
        kernels: Any = importlib.import_module("vllm_ssdkv.triton_kernels.decode_layer")
        rows_of: Any = importlib.import_module("vllm_ssdkv.triton_kernels.step_rows")
        self._change = rows_of.change
        window = -(-paged.config.window_tokens // layout.block_tokens) + 2
        self._window_blocks, self._block_tokens = window, layout.block_tokens
        self.tables = DeviceTables(StepTables(rows, blocks, layout.num_blocks), device)
        choosing = None
        if own is not None:
            sinks = -(-paged.config.sparse.sink_tokens // paged.block_layout.page_tokens)
            choosing = kernels.Choosing(isinstance(own, SpreadSelector), sinks)
        self._layer = kernels.DecodeLayer(
            paged.block_layout,
            paged.context_layout,
            self.tables.shape,
            self.tables.memory,
            window_blocks=window,
            query_heads=layout.query_heads or layout.kv_heads,
            choosing=choosing,
        )
        self.batch = rows_of.Batch(
            torch.full((rows,), -1, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros((rows, blocks + window), dtype=torch.int32, device=device),
        )

    def begin(self, step: PagedStep) -> None:
        """Send what a step changes in the tables; see :attr:`serves`. Of two steps, the leases of
        the one before the last must have ended."""
        rows = step.table_rows(self._takes)
        shape = self.tables.shape
        self.serves = (
            rows is not None
            and len(rows) <= shape.rows
            and all(len(row.frames) <= shape.blocks for row in rows.values())
            and step.longest_window(self._block_tokens) <= self._window_blocks
        )
        if rows is not None and self.serves:
            self._listed = rows
            changes = self.tables.update(rows)
            if len(changes):
                self._change(self.tables.memory, changes)

    def count(self, step: PagedStep) -> None:
        """Count what the rows of a step have chosen, which all of its layers have attended to."""
        step.count_listed(self._listed)

    def _takes(self, selector: Selector) -> bool:
        """Check whether rows may choose so: as the engine does, or by no score."""
        own = self._own
        if not isinstance(selector, WindowSelector) and type(selector) is not type(own):
            return False
        return own is not None and selector.sink_tokens == own.sink_tokens

    def find_rows(self) -> None:
        """Find the rows of :attr:`batch`, before the first layer."""
        self._layer.begin(self.batch, self._block_stride)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """Store K and V of a layer's new tokens, [R, Hkv, D], and write its attention to ``out``,
        [R, Hq, D]; entries of the batch that have no row get zeros."""
        offsets = self._geometry.layer_offset(layer), layer * self._record_bytes
        self._layer.attend(query, key, value, cache, out, self.batch, scale, offsets)
