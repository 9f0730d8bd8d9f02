"""Memory that is free goes back to the system."""

from __future__ import annotations

import os

from tests.batch.hostile import memory_of
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.batch.heap import trim


def test_what_lies_below_a_block_in_use_goes_back() -> None:
    # Too large for Python's own pools, and too small for a mapping of its own.
    blocks = [bytes(4000) for _ in range(25_000)]
    last = blocks[-1]
    blocks.clear()
    before = memory_of(os.getsid(0), os.getpid())
    assert trim()
    assert memory_of(os.getsid(0), os.getpid()) < before - 50 * MIB
    assert len(last) == 4000
