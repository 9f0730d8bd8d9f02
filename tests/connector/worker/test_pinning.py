"""Pinning of the arena, with CUDA's runtime stood in for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch

from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.connector.worker.pinning import pin_arena, unpin_arena
from vllm_ssdkv.store.memory.arena import Arena

DEVICE = torch.device("cuda", 0)
MAPPED = 2


@dataclass
class Runtime:
    """Remembers what was registered, and answers with a code."""

    code: int = 0
    registered: dict[int, tuple[int, int]] = field(default_factory=dict)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if not self.code:
            self.registered[address] = nbytes, flags
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if not self.code:
            del self.registered[address]
        return self.code


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    return made


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(8192)
    yield made
    made.close()


def test_all_of_the_arena_is_pinned_until_it_is_not(runtime: Runtime, arena: Arena) -> None:
    pin_arena(arena, DEVICE)
    assert runtime.registered == {arena.address: (8192, MAPPED)}
    unpin_arena(arena, DEVICE)
    assert runtime.registered == {}


def test_a_refusal_is_told_with_the_way_out(runtime: Runtime, arena: Arena) -> None:
    runtime.code = 2
    with pytest.raises(StoreError, match=r"cannot pin 8192 bytes .*error 2.*ulimit -l"):
        pin_arena(arena, DEVICE)
    with pytest.raises(StoreError, match="does not unpin"):
        unpin_arena(arena, DEVICE)
