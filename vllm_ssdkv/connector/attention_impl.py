"""Attention of page mode as vLLM calls it: its metadata, its builder, and one object per layer.

``attention_backend.py`` names these classes to vLLM in page mode, and imports them then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from vllm_ssdkv.attention.exact import RowBatch
from vllm_ssdkv.base.errors import StepError, UnsupportedError
from vllm_ssdkv.connector import active_worker
from vllm_ssdkv.connector.attention_backend import captures_steps, page_config
from vllm_ssdkv.connector.compatibility import (
    ALIBI,
    SOFT_CAP,
    obstacles_to_oddities,
    refusal_of_layer,
    serves_dtype,
)
from vllm_ssdkv.connector.names import CONNECTOR, PIECEWISE_FLAG
from vllm_ssdkv.connector.obstacle import Obstacle
from vllm_ssdkv.connector.worker.device_memory import hold_summary_memory
from vllm_ssdkv.connector.worker.host_copy import HostCopy
from vllm_ssdkv.connector.worker.paged_attention import attend_layer, rows_of_step, store_new
from vllm_ssdkv.kernels.operands.block_layout import FLOAT8, Softmax, head_size_problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_ssdkv.connector.worker.page_mode import PageMode
    from vllm_ssdkv.connector.worker.paged_step import PagedStep
    from vllm_ssdkv.triton_kernels.step_rows import Batch


@dataclass
class PagedMetadata(AttentionMetadata):
    """One step's batch as vLLM describes it; ``rows`` is made by the first layer that needs it.

    Lengths are the host's, which are right in page mode: with drafts no step is scheduled ahead.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: HostCopy
    slot_mapping: torch.Tensor
    num_actual_tokens: int
    rows: RowBatch | None = None
    captured: bool = False
    """True if a CUDA graph is captured with it."""
    batch: Batch | None = None
    """The batch of that graph's steps, at places that do not change."""

    def writes_kv(self) -> bool:
        """Look for tokens with a place in the KV cache: those of dummy runs have none."""
        return bool((self.slot_mapping[: self.num_actual_tokens] >= 0).any())


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Keeps what :class:`PagedAttentionImpl` needs of vLLM's metadata."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedMetadata:
        """Metadata of one step. Does not wait for the device.

        Raises:
            StepError: vLLM has not told the host how long the requests are.
        """
        common = common_attn_metadata
        if common.seq_lens_cpu_upper_bound is None:
            raise StepError(
                "vLLM does not tell the host how long requests are: it runs another version than "
                "is supported; please report it"
            )
        blocks = -(-common.max_seq_len // self.kv_cache_spec.block_size)
        return PagedMetadata(
            common.query_start_loc_cpu,
            common.seq_lens_cpu_upper_bound,
            HostCopy(common.block_table_tensor[:, :blocks]),
            common.slot_mapping,
            common.num_actual_tokens,
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> PagedMetadata:
        """Metadata of all steps of a graph: vLLM writes each one's batch to the same places."""
        made, paged = self.build(0, common_attn_metadata), active_worker.page_mode()
        made.captured = True
        if paged is not None and paged.device is not None:
            common = common_attn_metadata
            made.batch = paged.device.batch(
                common.slot_mapping[: common.num_actual_tokens],
                common.seq_lens,
                common.block_table_tensor,
            )
        return made

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Graphs of whole steps in which each request decodes a token, where nothing of this engine
        happens between layers. vLLM asks before the store is open, to measure memory, and then."""
        config, worker = page_config(vllm_config), active_worker.worker()
        if config is None or not captures_steps(vllm_config):
            return AttentionCGSupport.NEVER
        from vllm_ssdkv.connector.graphs import config_reason, engine_reason, tell

        reason = config_reason(config) if worker is None else engine_reason(vllm_config, worker)
        if not reason:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        tell(reason)
        return AttentionCGSupport.NEVER

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)


def _scales(layer: AttentionLayer, paged: PageMode) -> tuple[float, float]:
    """Scales of K and V in blocks of 8 bits. Wide blocks hold the numbers themselves, though layers
    of a checkpoint by llm-compressor have scales all the same."""
    if paged.block_layout.dtype in FLOAT8:
        return layer._k_scale_float, layer._v_scale_float
    return 1.0, 1.0


def _is_given(value: object) -> bool:
    return True if isinstance(value, torch.Tensor) else bool(value)


class PagedAttentionImpl(AttentionImpl):
    """Attention over a window in HBM and a context in the store, one object per layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown: Any,  # noqa: ANN401 - features of other backends; refused below
    ):
        """Raises UnsupportedError for a feature of the layer that page mode does not compute."""
        refused = {
            "KV shared between layers": kv_sharing_target_layer_name,
            **unknown,
        }
        vllm_config = get_current_vllm_config_or_none()
        found = [name for name, value in refused.items() if _is_given(value)]
        if attn_type != AttentionType.DECODER:
            # Such a layer has no KV that another request could use.
            kind = AttentionType(attn_type).value
            raise Obstacle(
                f"page mode does not compute {kind} attention, nor does reuse mode store it"
            ).error()
        dtype = None if vllm_config is None else vllm_config.model_config.dtype
        if not serves_dtype(kv_cache_dtype, dtype):
            found.append(f"--kv-cache-dtype {kv_cache_dtype}")
        if found:
            raise refusal_of_layer(f"page mode does not compute {', '.join(found)}", vllm_config)
        if problem := head_size_problem(head_size):
            raise refusal_of_layer(problem, vllm_config)
        config, reach = page_config(), sliding_window or 0
        if config is not None:
            # Not every model's configuration says so.
            what = SOFT_CAP if logits_soft_cap else ALIBI if alibi_slopes else ""
            for odd in obstacles_to_oddities(config, what):
                text = f"page mode does not compute this layer: {odd.problem}"
                raise refusal_of_layer(text, vllm_config, odd.ways)
        if config is not None and reach > config.window_tokens:
            # What a sliding window reaches is in HBM whole, so that such layers read nothing.
            least = -(-reach // config.page_tokens) * config.page_tokens
            raise UnsupportedError(
                f"the model has layers with a sliding window of {reach} tokens, and "
                f"hbm_window_tokens is {config.window_tokens}: set it to {least} or more"
            )
        if config is not None:
            # With the model, and before vLLM measures what is left for its KV cache.
            hold_summary_memory(config, torch.device(current_platform.device_type))
        self.num_heads = num_heads
        self.head_size = head_size
        self.sliding_window = sliding_window
        slopes = None
        if alibi_slopes is not None:
            # vLLM builds models under their dtype.
            where = current_platform.device_type
            slopes = torch.tensor(alibi_slopes, dtype=torch.float32, device=where)
        # Sinks are a parameter of the model, whose values are loaded later.
        self.softmax = Softmax(sinks, logits_soft_cap or 0.0, slopes)
        # Plain attributes, which the digest of the model has.
        self.soft_cap, self.alibi_slopes = logits_soft_cap or None, alibi_slopes
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new K and V [T, Hkv, D] into HBM, in page layout."""
        paged = active_worker.page_mode()
        if paged is None:  # vLLM's profiling run
            return
        if paged.projector is not None and paged.projector.projecting:
            paged.projector.keep(key, value)
        store_new(paged, key, value, kv_cache, slot_mapping, _scales(layer, paged))

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer; ``query`` and ``output`` are [T, Hq * D] or [T, Hq, D].

        Zeros in vLLM's profiling, warm-up and dummy runs, in which there is no request.

        Raises:
            StepError: there are requests, and no step to attend for.
        """
        worker, paged = active_worker.worker(), active_worker.page_mode()
        if attn_metadata is None:
            return output.zero_()
        if attn_metadata.captured and paged is not None:
            return self._capture(layer.layer_name, query, kv_cache, attn_metadata, paged, output)
        if paged is None or paged.step is None:
            warming_up = worker is not None and not worker.began
            if not warming_up and attn_metadata.writes_kv():
                raise StepError(
                    f"{layer.layer_name}: vLLM computes tokens of requests without a step of "
                    f"{CONNECTOR}: zeros would be served as their attention. It runs another "
                    "version of vLLM than is supported, or another connector beside it; please "
                    "report it"
                )
            return output.zero_()
        tokens = attn_metadata.num_actual_tokens
        heads = tokens, self.num_heads, self.head_size
        if attn_metadata.rows is None:
            attn_metadata.rows = self._rows(paged.step, attn_metadata, paged.layout.block_tokens)
            paged.begin_recording(attn_metadata.rows, query.device)
        key_scale, value_scale = _scales(layer, paged)
        if self.softmax.value_scale != value_scale:  # weights have been loaded
            self.softmax = replace(self.softmax, value_scale=value_scale)
        if paged.x_cache is not None:
            paged.record_inputs(layer.layer_name, query.device)
        attend_layer(
            paged,
            layer.layer_name,
            query[:tokens].view(heads),
            value[:tokens].view(tokens, self.num_kv_heads, self.head_size),
            kv_cache,
            output[:tokens].view(heads),
            attn_metadata.rows,
            self.scale * key_scale,
            sliding_window=self.sliding_window,
            softmax=self.softmax,
        )
        return output

    def _capture(
        self,
        name: str,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: PagedMetadata,
        paged: PageMode,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of a layer of any step, by the device's tables: launches, and nothing else."""
        device, batch = paged.device, metadata.batch
        if device is None or batch is None:
            raise StepError(
                f"{name}: vLLM captures a whole step, which it was told not to; please report it, "
                f"and start with {PIECEWISE_FLAG}"
            )
        layer, tokens = paged.layout.layer_names.index(name), metadata.num_actual_tokens
        heads = tokens, self.num_heads, self.head_size
        if layer == 0:
            device.find_rows(batch)
        device.attend(
            layer,
            query[:tokens].view(heads).contiguous(),
            paged.flat(kv_cache),
            output[:tokens].view(heads),
            self.scale,
        )
        return output

    @staticmethod
    def _rows(step: PagedStep, metadata: PagedMetadata, block_tokens: int) -> RowBatch:
        query_start = metadata.query_start.numpy().astype(np.int64)
        lengths = metadata.seq_lens.numpy().astype(np.int64)[: len(query_start) - 1]
        return rows_of_step(step, query_start, lengths, metadata.block_table.numpy(), block_tokens)
