"""Pins the arena for a GPU, so that copies and kernels reach it without a bounce."""

from __future__ import annotations

from typing import Any, Final

import torch

from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.store.memory.arena import Arena

_MAPPED: Final = 2
"""cudaHostRegisterMapped: kernels may read the memory where it lies."""


def pin_arena(arena: Arena, device: torch.device) -> None:
    """Register the arena with CUDA; blocks until all of its pages are in memory.

    Raises:
        StoreError: CUDA refuses.
    """
    with torch.cuda.device(device):
        cudart: Any = torch.cuda.cudart
        code = int(cudart().cudaHostRegister(arena.address, arena.nbytes, _MAPPED))
    if code:
        raise StoreError(
            f"CUDA cannot pin {arena.nbytes} bytes of DRAM (error {code}): lower dram_gib or raise "
            "the limit of locked memory (ulimit -l)"
        )


def unpin_arena(arena: Arena, device: torch.device) -> None:
    """End the registration, before the arena is closed in a process that goes on.

    Raises:
        StoreError: CUDA refuses.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        cudart: Any = torch.cuda.cudart
        code = int(cudart().cudaHostUnregister(arena.address))
    if code:
        raise StoreError(f"CUDA does not unpin {arena.nbytes} bytes of DRAM (error {code})")
