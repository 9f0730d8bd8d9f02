"""The KV of all tokens in the device's memory, in place: what paging is compared with."""

from __future__ import annotations

from typing import Any

import torch

from vllm_ssdkv.profiling.decode_harness.attention import Attention, layer_of, sdpa, timed
from vllm_ssdkv.profiling.decode_harness.forward import Forward
from vllm_ssdkv.profiling.decode_harness.models import head_size, kv_heads
from vllm_ssdkv.profiling.decode_harness.part_clock import AttentionTimer


class FullDecoder:
    """Decodes B requests of one length with their KV in the device's memory, by SDPA."""

    def __init__(self, model: Any, requests: int, context: int, room: int) -> None:  # noqa: ANN401
        """Contexts of random KV; ``room`` tokens may be decoded."""
        config = model.config
        self.model, self.device, self.tokens = model, model.device, context
        self.timer: AttentionTimer | None = None
        shape = requests, kv_heads(config), context + room, head_size(config)
        layers = range(config.num_hidden_layers)
        self._kv = [(self._random(shape), self._random(shape)) for _ in layers]
        self.passes = Forward(model)

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self.model.dtype, device=self.device).normal_()

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocabulary] behind the tokens ``ids`` [B]."""
        attention: Attention = self._attend
        if self.timer is not None:
            attention = timed(attention, self.timer)
        logits = self.passes(ids[:, None], torch.full_like(ids, self.tokens)[:, None], attention)
        self.tokens += 1
        return logits

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        end = self.tokens + 1
        held: list[torch.Tensor] = []
        for room, new in zip(self._kv[layer_of(module)], (key, value), strict=True):
            room[:, :, self.tokens : end] = new
            held.append(room[:, :, :end])
        return sdpa(module, query, held[0], held[1], scale)
