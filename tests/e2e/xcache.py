"""Engines whose contexts are stored as X, and their K and V beside those of HBM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.e2e.models import prompts
from tests.e2e.workload import SMALL_DRAM, kv_tokens, page_mode
from tests.kit.engine import Engine
from vllm_ssdkv.connector import attention_impl
from vllm_ssdkv.connector.worker.page_mode import PageMode
from vllm_ssdkv.connector.worker.paged_attention import attend_layer
from vllm_ssdkv.kernels.dense import select_kernels

WINDOW, CHUNK, BLOCK = 64, 128, 32
PROMPTS = prompts((700, 333, 257, 600), 5)


def start(
    model: Path,
    devices: Sequence[object],
    dtype: str = "float32",
    *,
    share: float | Literal["auto"] = 1.0,
    enforce_eager: bool = True,
    dram: str = SMALL_DRAM,
    **options: object,
) -> Engine:
    """An engine in page mode with a device of one thread, and so much of the contexts as X.

    ``options``: others of the connector."""
    return Engine(
        model,
        ssdkv=page_mode(
            devices,
            window=WINDOW,
            dram=dram,
            offload={"threads": 1, "share": 1.0, "x_share": share},
            **options,
        ),
        dtype=dtype,
        kv_tokens=len(PROMPTS) * kv_tokens(WINDOW, CHUNK),
        max_num_batched_tokens=CHUNK,
        max_model_len=2048,
        enforce_eager=enforce_eager,
    )


@dataclass
class Compared:
    """Blocks that were compared, and the largest deviation, relative to the largest number."""

    blocks: int = 0
    worst: float = 0.0

    def compare(self, paged: PageMode, layer_name: str, cache: torch.Tensor, rows: Any) -> None:  # noqa: ANN401
        """Of one row's blocks in the window that are stored already: K and V of X beside HBM's."""
        step, store = paged.step, paged.store
        assert step is not None
        assert paged.x_cache is not None
        layer = step.layers[layer_name]
        (request_id,) = {name for name in step.x_requests if name}
        known = store.context_from(request_id, 0)
        for block, position in zip(rows.window_ids, rows.window_position, strict=True):
            number = int(position) // BLOCK
            frame = store.frames.frames_of(known[number : number + 1])
            if not len(frame) or frame[0] < 0:
                continue
            offset = np.uint64(paged.layout.geometry.layer_offset(layer))
            source = paged.x_cache.projector.project(
                select_kernels(cache.device),
                layer,
                store.frames.address(frame) + offset,
                np.array([position]),
            )
            assert source.tensor is not None
            found = source.tensor[0].float()
            there = cache.view(cache.shape[0], -1)[int(block)].float()
            self.blocks += 1
            worst = float((found - there).abs().max() / there.abs().max())
            self.worst = max(self.worst, worst)


@contextmanager
def comparing() -> Iterator[Compared]:
    """Compare, in all steps that are computed meanwhile."""
    made = Compared()

    def spy(paged: PageMode, layer_name: str, *args: Any, **options: Any) -> None:  # noqa: ANN401
        attend_layer(paged, layer_name, *args, **options)
        _, _, cache, _, rows, _ = args
        made.compare(paged, layer_name, cache, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_impl, "attend_layer", spy)
        yield made
