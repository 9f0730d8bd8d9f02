"""The store's checksum is xxh3-64, seed 0, of exactly the bytes given."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.base.checksum import checksum_bytes, checksum_pages


@given(st.binary(max_size=2000))
def test_bytes_of_every_kind_give_the_reference_value(data: bytes) -> None:
    expected = xxhash.xxh3_64_intdigest(data)
    assert checksum_bytes(data) == expected
    assert checksum_bytes(bytearray(data)) == expected
    assert checksum_bytes(memoryview(b"x" + data + b"y")[1:-1]) == expected
    assert checksum_bytes(np.frombuffer(data, dtype=np.uint8)) == expected


def test_pages_are_checksummed_at_their_addresses() -> None:
    memory = np.random.default_rng(1).integers(0, 256, 4 * 4096, dtype=np.uint8)
    addresses = np.uint64(memory.ctypes.data) + np.array([4096, 0], dtype=np.uint64)
    expected = [xxhash.xxh3_64_intdigest(memory[at : at + 100].tobytes()) for at in (4096, 0)]
    assert checksum_pages(addresses, 100).tolist() == expected


def test_strided_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        checksum_bytes(np.zeros(8, dtype=np.uint8)[::2])
