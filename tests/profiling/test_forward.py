"""Captured passes: pieces replayed with other tokens and another attention, without CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config

from tests.kit.recorded_graph import RecordedGraph
from vllm_ssdkv.profiling.decode_harness import forward
from vllm_ssdkv.profiling.decode_harness.attention import sdpa
from vllm_ssdkv.profiling.decode_harness.forward import CapturedForward, Forward, plain
from vllm_ssdkv.profiling.decode_harness.models import make_model, small_config
from vllm_ssdkv.profiling.decode_harness.tokens import FAMILIES

REQUESTS, CONTEXT = 3, 7


class OverContext:
    """Attention over random KV of each layer and the new token's."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.layers: list[int] = []

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        layer = int(module.layer_idx)  # type: ignore[arg-type] # of attention modules
        self.layers.append(layer)
        made = torch.Generator().manual_seed(self._seed + layer)
        shape = (2, *key.shape[:2], CONTEXT, key.shape[-1])
        keys, values = torch.randn(shape, generator=made)
        return sdpa(module, query, torch.cat([keys, key], 2), torch.cat([values, value], 2), scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_pieces_compute_what_the_model_does(family: str) -> None:
    model: Any = make_model(small_config(family, layers=3), torch.device("cpu"), torch.float32)
    graphs: list[RecordedGraph] = []

    def new() -> RecordedGraph:
        graphs.append(RecordedGraph())
        return graphs[-1]

    captured = CapturedForward(model, REQUESTS, new)
    assert len(graphs) == 4, "one piece more than layers"
    made = torch.Generator().manual_seed(1)
    seen = set()
    for step in range(3):
        ids = torch.randint(0, 256, (REQUESTS, 1), generator=made)
        positions = torch.randint(0, 1000, (REQUESTS, 1), generator=made)
        attention = OverContext(100 * step)
        got = captured(ids, positions, attention)
        assert attention.layers == [0, 1, 2]
        want = plain(model, ids, positions, OverContext(100 * step))
        assert torch.equal(got, want)
        seen.add(tuple(got.argmax(-1).tolist()))
    assert len(seen) == 3, "the model says the same whatever it is given"


def test_where_nothing_can_be_captured_the_pass_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure says so: docs/gpu.md would tell of graphs that there were not."""

    class Refused(RecordedGraph):
        def capture_begin(self) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    model: Any = make_model(small_config("llama"), torch.device("cpu"), torch.float32)
    monkeypatch.setattr(forward, "graphs_of", lambda _: Refused)
    made = Forward(model)
    ids, positions = torch.zeros((2, 2, 1), dtype=torch.int64)
    for _ in range(2):
        got = made(ids, positions, OverContext(1))
        assert torch.equal(got, plain(model, ids, positions, OverContext(1)))
    assert made.launches == "one by one: operation not permitted when stream is capturing"


def test_what_attention_would_leave_out_is_refused() -> None:
    """Gemma 2's soft cap would be lost, and all figures would be of another model."""
    shape = Gemma2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        attn_logit_softcapping=20.0,
    )
    model: Any = make_model(shape, torch.device("cpu"), torch.float32)
    ids = torch.zeros((1, 1), dtype=torch.int64)
    with pytest.raises(ValueError, match="softcap, sliding_window"):
        plain(model, ids, ids, OverContext(1))
