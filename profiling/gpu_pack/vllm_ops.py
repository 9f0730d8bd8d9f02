"""vLLM's compiled operators: a first look at those that have travelled, and stand-ins in PyTorch.

    python -P -m vllm_ssdkv.profiling.gpu_pack.vllm_ops LIBRARY

Loads a library of operators for CUDA and compares one of them with its definition.

No file of vLLM is touched where there is none: operators that it calls without asking first are
registered with PyTorch under their own names.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch.library import Library

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.gpu_pack.cuda_library import needs

OPERATORS: Final = "vllm/_C_stable_libtorch.py"
FLASH_ATTENTION: Final = "vllm/vllm_flash_attn/_vllm_fa2_C.py"
"""Empty, these take the places of modules that vLLM's classes for CUDA import."""

_TOLERANCE: Final = 1e-5
"""Tolerance of one operator in float32 against its definition."""

_held: list[Any] = []
"""An operator goes with its library."""


def compiled_parts() -> list[str]:
    """Names of the compiled operators of this environment's vLLM.

    Imports nothing of it. Raises ``ImportError`` without vLLM.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ImportError("No module named 'vllm'")
    return sorted(path.name for path in Path(spec.origin).parent.glob("_C*.so"))


def missing_symbols(names: Iterable[str]) -> list[str]:
    """Names that this environment's PyTorch does not export."""
    found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch.so"))
    return [name for name in names if not hasattr(found, name)]


def check_operators(library: Path) -> None:
    """Load operators for CUDA, and normalize some rows with one of them.

    Raises ``BenchError`` if PyTorch lacks what they need, or the result is wrong.
    """
    if missing := missing_symbols(needs()):
        raise BenchError(f"PyTorch {torch.__version__} has no {', '.join(missing)}")
    given = torch.randn(7, 4096, device="cuda")
    weight, result = torch.rand(4096, device="cuda"), torch.empty_like(given)
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]  # torch's
    torch.ops._C.rms_norm(result, given, weight, 1e-5)
    wanted = given * torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    worst = float((result - wanted).abs().max())
    if not worst <= _TOLERANCE * float(wanted.abs().max()):
        raise BenchError(f"rms_norm differs from its definition by up to {worst:g}")


def stand_in(device: str) -> list[str]:
    """Register what a text model needs on ``device``, "cuda" or "cpu"; names of what was."""
    registered = []
    library: Any = Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
    _held.append(library)
    for schema, work in (_CUDA if device == "cuda" else _CPU).items():
        name = library.define(schema)
        library.impl(name, work, "CompositeExplicitAutograd")
        registered.append(f"_C::{name}")
    return registered


def _silu_and_mul(result: torch.Tensor, given: torch.Tensor) -> None:
    half = given.shape[-1] // 2
    result.copy_(torch.nn.functional.silu(given[..., :half]) * given[..., half:])


def _slot_mapping(
    starts: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    block_tokens: int,
) -> None:
    """Work out each token's place: its block's number times the block's tokens, and its place."""
    lengths = starts.diff().long()
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    where = positions[: len(rows)].long()
    slots[: len(rows)] = (
        block_table[rows, where // block_tokens].long() * block_tokens + where % block_tokens
    )
    slots[len(rows) :] = -1


def _store(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *_: object,
) -> None:
    """New K and V [T, Hkv, D] into caches of [blocks, Hkv, block tokens, D]."""
    kept = (slots >= 0).nonzero()[:, 0]
    block_tokens = key_cache.shape[2]
    blocks, places = slots[kept] // block_tokens, slots[kept] % block_tokens
    key_cache[blocks, :, places] = key[kept]
    value_cache[blocks, :, places] = value[kept]


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    causal: bool,
    slopes: torch.Tensor | None,
    window: int,
    block_table: torch.Tensor,
    *_: object,
) -> None:
    """Causal attention of [T, Hq, D], one row of the batch after the other."""
    if not causal or slopes is not None or window >= 0:
        raise NotImplementedError("this stand-in has only causal attention over everything")
    block_tokens = key_cache.shape[2]
    for row in range(len(starts) - 1):
        begin, end, length = int(starts[row]), int(starts[row + 1]), int(lengths[row])
        if begin == end:
            continue
        blocks = block_table[row, : -(-length // block_tokens)].long()
        key, value = (
            cache[blocks].transpose(1, 2).flatten(0, 1)[:length].transpose(0, 1)
            for cache in (key_cache, value_cache)
        )
        reach = torch.arange(length - (end - begin), length)[:, None]
        output[begin:end] = torch.nn.functional.scaled_dot_product_attention(
            query[begin:end].transpose(0, 1),
            key,
            value,
            attn_mask=torch.arange(length)[None] <= reach,
            scale=scale,
            enable_gqa=True,
        ).transpose(0, 1)


_Work = Callable[..., Any]

_CUDA: Final[dict[str, _Work]] = {
    "silu_and_mul(Tensor! result, Tensor input) -> ()": _silu_and_mul,
    "cutlass_scaled_mm_supports_fp8(int capability) -> bool": lambda _: False,
    "cutlass_scaled_mm_supports_block_fp8(int capability) -> bool": lambda _: False,
}
"""All else has a Triton kernel or a native form that options choose."""

_CPU: Final[dict[str, _Work]] = {
    "init_cpu_memory_env(int[] nodes) -> ()": lambda _: None,
    "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1),
    "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor table, "
    "Tensor! slots, int block_tokens) -> ()": _slot_mapping,
    "get_scheduler_metadata(int rows, int heads, int kv_heads, int head_size, Tensor lengths, "
    "ScalarType dtype, Tensor starts, bool causal, int window, str isa, bool split, "
    "Tensor? dynamic, str cache_dtype) -> Tensor": lambda *_: torch.empty(0),
    "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor! key_cache, "
    "Tensor! value_cache, Tensor slots, str isa, float k_scale, float v_scale, "
    "str cache_dtype) -> ()": _store,
    "cpu_attention_with_kv_cache(Tensor query, Tensor key_cache, Tensor value_cache, "
    "Tensor! output, Tensor starts, Tensor lengths, float scale, bool causal, Tensor? slopes, "
    "int window, Tensor table, float softcap, Tensor metadata, Tensor? sinks, "
    "Tensor? dynamic, float k_scale, float v_scale, str cache_dtype) -> ()": _attend,
}


def main() -> None:
    """Check the library that the argument names; status 1 and a last line that says why not."""
    try:
        check_operators(Path(sys.argv[1]))
    except (BenchError, RuntimeError, OSError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
