"""The KV of all tokens in the device's memory, in place: what paging is compared with."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from vllm_ssdkv.profiling.decode_harness.attention import Attention, attention_by, sdpa, timed
from vllm_ssdkv.profiling.decode_harness.models import head_size, kv_heads
from vllm_ssdkv.profiling.decode_harness.part_clock import AttentionTimer


class InPlaceLayer(DynamicLayer):  # type: ignore[misc] # transformers is not followed
    """KV of one layer with room for what comes: transformers' own copies all of it per token."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
        """``keys`` and ``values`` [B, Hkv, room, D], of which the first ``tokens`` hold KV."""
        super().__init__()
        self._keys, self._values, self._tokens = keys, values, tokens
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_: Any,  # noqa: ANN401 - transformers' own signature
        **__: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens; views of all KV."""
        end = self._tokens + key_states.shape[-2]
        self._keys[:, :, self._tokens : end] = key_states
        self._values[:, :, self._tokens : end] = value_states
        self._tokens = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def get_seq_length(self) -> int:
        """Tokens that have KV."""
        return self._tokens


class FullDecoder:
    """Decodes B requests of one length with their KV in the device's memory, by SDPA."""

    def __init__(self, model: Any, requests: int, context: int, room: int) -> None:  # noqa: ANN401
        """Contexts of random KV; ``room`` tokens may be decoded."""
        config = model.config
        self.model, self.device, self.tokens = model, model.device, context
        self.timer: AttentionTimer | None = None
        shape = requests, kv_heads(config), context + room, head_size(config)
        self._cache = Cache(
            layers=[
                InPlaceLayer(self._random(shape), self._random(shape), context)
                for _ in range(config.num_hidden_layers)
            ]
        )

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self.model.dtype, device=self.device).normal_()

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocabulary] behind the tokens ``ids`` [B]."""
        attention: Attention = sdpa if self.timer is None else timed(sdpa, self.timer)
        position = torch.full_like(ids, self.tokens)[:, None]
        with attention_by(self.model, attention), torch.inference_mode():
            out = self.model(
                ids[:, None], position_ids=position, past_key_values=self._cache, use_cache=True
            )
        self.tokens += 1
        logits: torch.Tensor = out.logits[:, -1]
        return logits
