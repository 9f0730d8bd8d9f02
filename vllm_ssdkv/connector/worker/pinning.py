"""Pins the arena for a GPU, so that copies and kernels reach it without a bounce."""

from __future__ import annotations

from typing import Any, Final

import torch

from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.store.memory.arena import Arena

_MAPPED: Final = 2
"""cudaHostRegisterMapped: kernels may read the memory where it lies."""

_READ_ONLY: Final = 8
"""cudaHostRegisterReadOnly: this process may not write the memory."""


def pin_arena(arena: Arena, device: torch.device) -> None:
    """Register the arena with CUDA; blocks until all of its pages are in memory.

    Raises:
        StoreError: CUDA refuses.
    """
    pin_memory(arena.address, arena.nbytes, writable=True, device=device)


def pin_memory(address: int, nbytes: int, *, writable: bool, device: torch.device) -> None:
    """Register memory at an absolute address with CUDA, as :func:`pin_arena`.

    Raises:
        StoreError: CUDA refuses.
    """
    flags = _MAPPED if writable else _MAPPED | _READ_ONLY
    with torch.cuda.device(device):
        cudart: Any = torch.cuda.cudart
        code = int(cudart().cudaHostRegister(address, nbytes, flags))
    if code:
        raise StoreError(
            f"CUDA cannot pin {nbytes} bytes of DRAM (error {code}): lower dram_gib or raise "
            "the limit of locked memory (ulimit -l)"
        )


def unpin_arena(arena: Arena, device: torch.device) -> None:
    """End the registration, before the arena is closed in a process that goes on.

    Raises:
        StoreError: CUDA refuses.
    """
    unpin_memory(arena.address, arena.nbytes, device=device)


def unpin_memory(address: int, nbytes: int, *, device: torch.device) -> None:
    """End the registration of memory, as :func:`unpin_arena`.

    Raises:
        StoreError: CUDA refuses.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        cudart: Any = torch.cuda.cudart
        code = int(cudart().cudaHostUnregister(address))
    if code:
        raise StoreError(f"CUDA does not unpin {nbytes} bytes of DRAM (error {code})")
