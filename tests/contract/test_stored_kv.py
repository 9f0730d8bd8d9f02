"""What vLLM's own CPU backend writes into its KV cache, and what page mode writes."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from vllm_ssdkv.connector.kv_layout import FLOAT8_TYPES
from vllm_ssdkv.kernels.dense import CpuKernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout

HEAD, BLOCK = 32, 32


def test_a_layer_has_its_scales_as_floats() -> None:
    """Those of V and K, which page mode reads at every step: weights may be loaded anew."""
    layer = torch.nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    assert (layer._k_scale_float, layer._v_scale_float) == (1.0, 1.0)
    layer.kv_cache_dtype = "fp8"
    method = BaseKVCacheMethod(None)
    method.create_weights(layer)
    layer.k_scale.data.fill_(0.5)
    layer.v_scale.data.fill_(0.25)
    method.process_weights_after_loading(layer)
    assert (layer._k_scale_float, layer._v_scale_float) == (0.5, 0.25)
    assert layer._buffers["_k_scale"] == 0.5, "the digest of the model has buffers"


def stock(values: torch.Tensor, scale: float, name: str) -> torch.Tensor:
    """Bytes of vLLM, by its V, which lies as it came."""
    cache = torch.zeros(len(values) // BLOCK, 1, 2 * BLOCK, HEAD, dtype=torch.uint8)
    keys, stored = cache.chunk(2, dim=2)
    slots = torch.arange(len(values))
    ops.cpu_attn_reshape_and_cache(
        values, values, keys, stored, slots, "vec", scale, scale, kv_cache_dtype=name
    )
    return stored.flatten()


def ours(values: torch.Tensor, scale: float, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of page mode, of K and of V."""
    layout = BlockLayout.unpadded(BLOCK, BLOCK, 1, HEAD, FLOAT8_TYPES[name])
    cache = torch.zeros(len(values) // BLOCK, layout.block_bytes, dtype=torch.uint8)
    slots = torch.arange(len(values))
    CpuKernels(2).store_kv(values, values, cache.view(layout.dtype), slots, layout, (scale, scale))
    key, value = cache.view(len(cache), 2, -1).unbind(1)
    return key.flatten(), value.flatten()


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's CPU backend has fp8 with AVX-512 only"
)
@pytest.mark.parametrize("name", FLOAT8_TYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.37, 3.1])
def test_numbers_of_8_bits_are_rounded_as_vllm_rounds(
    name: str, dtype: torch.dtype, scale: float
) -> None:
    """Every number of 16 bits, infinity and NaN among them; of 32 bits some."""
    if dtype == torch.float32:
        bits = torch.randint(-(2**31), 2**31, (1 << 18,), dtype=torch.int64).to(torch.int32)
        bits[::2] = (torch.rand(1 << 17) * 2.0 ** torch.randint(-20, 10, (1 << 17,))).view(
            torch.int32
        )
    else:
        bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    values = bits.view(dtype).view(-1, 1, HEAD)
    wanted = stock(values, scale, name)
    for got in ours(values, scale, name):
        assert torch.equal(got, wanted)
