"""vLLM's attention backend of page mode: thin, it turns vLLM's arguments into ours.

On the CPU vLLM always resolves ``CPU_ATTN``; our class takes that name and behaves like vLLM's own
unless this engine asks for page mode. On CUDA it is ``--attention-backend CUSTOM``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    SlidingWindowSpec,
)

from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.compatibility import refusal_of_layer
from vllm_ssdkv.connector.kv_cache_spec import TieredAttentionSpec
from vllm_ssdkv.connector.names import CONNECTOR
from vllm_ssdkv.connector.obstacle import Obstacle
from vllm_ssdkv.kernels.operands.block_layout import HEAD_SIZE_STEP, MAX_HEAD_SIZE

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.cache import CacheDType

_last_known: list[SSDKVConfig | None] = [None]


def page_config(vllm_config: VllmConfig | None = None) -> SSDKVConfig | None:
    """This engine's options if it is in page mode, else None.

    vLLM asks backends for their classes both inside and outside the scope of a configuration;
    outside, the one last seen in this process holds.
    """
    vllm_config = vllm_config or get_current_vllm_config_or_none()
    if vllm_config is not None:
        transfer = vllm_config.kv_transfer_config
        config = None
        if transfer is not None and transfer.kv_connector == CONNECTOR:
            config = SSDKVConfig.from_extra_config(transfer.kv_connector_extra_config)
        _last_known[0] = config if config is not None and config.mode == "page" else None
    return _last_known[0]


def captures_steps(vllm_config: VllmConfig) -> bool:
    """Check whether vLLM is to capture whole steps, attention included, in CUDA graphs."""
    mode = vllm_config.compilation_config.cudagraph_mode
    return mode is not None and bool(mode.has_full_cudagraphs())


def _tiered(spec: AttentionSpec, config: SSDKVConfig) -> AttentionSpec:
    """The layer's KV cache spec, with only a window in HBM."""
    # Those derived from the two attend in other ways.
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
        raise refusal_of_layer(
            f"page mode cannot serve a layer with {type(spec).__name__}",
            get_current_vllm_config_or_none(),
        )
    if getattr(spec, "non_causal", False):
        raise Obstacle("neither mode can serve a layer whose attention is not causal").error()
    return TieredAttentionSpec.like(spec, config.window_tokens)


class SSDKVBackend(AttentionBackend):
    """Page mode on CUDA, registered as ``CUSTOM``."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        *AttentionBackend.supported_kv_cache_dtypes,
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
    ]

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's registry."""
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:  # noqa: ANN401 - vLLM's own signature
        """Blocks are whole pages."""
        return [MultipleOf(16)]

    @classmethod
    def supports_sink(cls) -> bool:
        """Layers may have attention sinks."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Layers may have sliding windows."""
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """A block of a layer must be one stretch of memory."""
        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """See vLLM."""
        from vllm_ssdkv.connector.attention_impl import PagedAttentionImpl

        return PagedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """See vLLM."""
        from vllm_ssdkv.connector.attention_impl import PagedMetadataBuilder

        return PagedMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Tiered in page mode.

        Raises:
            UnsupportedError: this backend was chosen without page mode.
        """
        config = page_config()
        if config is None:
            raise UnsupportedError(
                f"--attention-backend CUSTOM is the page mode of {CONNECTOR}: set "
                'kv_connector_extra_config.mode to "page", or leave the backend to vLLM'
            )
        return _tiered(spec, config)


class SSDKVCPUBackend(CPUAttentionBackend):
    """vLLM's CPU backend, and page mode when this engine asks for it."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:  # noqa: ANN401 - vLLM's own signature
        """Blocks are whole pages in page mode."""
        if page_config() is None:
            stock: list[int | MultipleOf] = CPUAttentionBackend.get_supported_kernel_block_sizes(
                kv_cache_spec
            )
            return stock
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Any multiple of 8 in page mode."""
        if page_config() is None:
            stock: list[int] = super().get_supported_head_sizes()
            return stock
        return list(range(HEAD_SIZE_STEP, MAX_HEAD_SIZE + 1, HEAD_SIZE_STEP))

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """See vLLM."""
        return (CPUAttentionBackend if page_config() is None else SSDKVBackend).get_impl_cls()

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """See vLLM."""
        return (CPUAttentionBackend if page_config() is None else SSDKVBackend).get_builder_cls()

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Tiered in page mode, vLLM's own otherwise."""
        config = page_config()
        if config is None:
            return super().customize_spec(spec)
        return _tiered(spec, config)
