"""Memory that is free goes back to the system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.batch.hostile import memory_of
from tests.kit.alone import environment_with_tests
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.batch.heap import trim


def test_what_lies_below_a_block_in_use_goes_back() -> None:
    # Too large for Python's own pools, and too small for a mapping of its own.
    blocks = [bytes(4000) for _ in range(25_000)]
    last = blocks[-1]
    blocks.clear()
    before = memory_of({os.getpid()})
    assert trim()
    assert memory_of({os.getpid()}) < before - 50 * MIB
    assert len(last) == 4000


def test_large_blocks_go_back_by_themselves(tmp_path: Path) -> None:
    # In a process of its own: what it asks of the C library stays. A large block that was freed
    # makes glibc keep as much of each heap from then on.
    program = """
import os
import subprocess
import sys
from tests.batch.hostile import memory_of
from vllm_ssdkv.batch.heap import return_large
assert return_large()
bytes(30 << 20)
before = memory_of({os.getpid()})
blocks = [b"x" * (512 << 10) for _ in range(60)]
held = memory_of({os.getpid()}) - before
blocks.clear()
print(held, memory_of({os.getpid()}) - before)
"""
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=environment_with_tests(tmp_path),
        capture_output=True,
        check=True,
    )
    held, left = map(int, told.stdout.split())
    assert held > 29 * MIB
    assert left < 8 * MIB
