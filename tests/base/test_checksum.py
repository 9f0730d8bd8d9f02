"""Native checksums and copies against independent implementations."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.checksum import checksum_bytes, checksum_pages

PARALLEL = 4 << 20


def addresses_in(memory: NDArray[np.uint8], offsets: list[int]) -> NDArray[np.uint64]:
    return np.uint64(memory.ctypes.data) + np.array(offsets, dtype=np.uint64)


def noise(nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def test_known_value_of_the_empty_input() -> None:
    # From the xxHash specification's reference output for XXH3_64bits, seed 0, length 0.
    memory = noise(16)
    assert _io.checksum(addresses_in(memory, [0]), 0).tolist() == [0x2D06800538D394C2]


@settings(max_examples=60, deadline=None)
@given(
    nbytes=st.one_of(st.integers(1, 300), st.sampled_from([1024, 4096, 8192, 65536, 100_001])),
    offsets=st.lists(st.integers(0, 5000), max_size=9),
    threads=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_checksum_equals_the_reference_package(
    nbytes: int, offsets: list[int], threads: int, seed: int
) -> None:
    memory = noise(5000 + nbytes, seed)
    got = _io.checksum(addresses_in(memory, offsets), nbytes, threads)
    assert got.dtype == np.uint64
    assert got.tolist() == [
        xxhash.xxh3_64_intdigest(memory[o : o + nbytes].tobytes()) for o in offsets
    ]


@pytest.mark.parametrize("threads", [0, 1, 2, 7])
def test_many_threads_give_what_one_gives(threads: int) -> None:
    page = 8192
    memory = noise(2 * PARALLEL)
    offsets = list(range(0, memory.size, page))
    got = _io.checksum(addresses_in(memory, offsets), page, threads)
    assert got.tolist() == [
        xxhash.xxh3_64_intdigest(memory[o : o + page].tobytes()) for o in offsets
    ]


def test_verify_names_exactly_the_pages_that_changed() -> None:
    page = 4096
    memory = noise(PARALLEL + 5 * page)
    where = addresses_in(memory, list(range(0, memory.size, page)))
    expected = _io.checksum(where, page)
    assert _io.verify(where, expected, page).tolist() == []
    for index in (3, 700, len(where) - 1):
        memory[index * page + index % page] ^= 1
    wrong = _io.verify(where, expected, page)
    assert wrong.dtype == np.int64
    assert wrong.tolist() == [3, 700, len(where) - 1]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=12),
    threads=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_copy_of_different_sizes_touches_nothing_else(
    sizes: list[int], threads: int, seed: int
) -> None:
    gap = 64
    starts = np.cumsum([0, *[size + gap for size in sizes]]).tolist()
    source, target = noise(starts[-1], seed), np.zeros(starts[-1], np.uint8)
    want = target.copy()
    order = np.random.default_rng(seed).permutation(len(sizes))
    for i in order:
        want[starts[i] : starts[i] + sizes[i]] = source[starts[i] : starts[i] + sizes[i]]
    chosen = [starts[i] for i in order]
    _io.copy(
        addresses_in(source, chosen),
        addresses_in(target, chosen),
        np.array([sizes[i] for i in order], dtype=np.uint64),
        threads,
    )
    np.testing.assert_array_equal(target, want)


@pytest.mark.parametrize("threads", [1, 0, 3])
def test_one_long_copy_is_complete(threads: int) -> None:
    source = noise(PARALLEL + 12_345)
    target = np.zeros_like(source)
    _io.copy(addresses_in(source, [0]), addresses_in(target, [0]), source.size, threads)
    np.testing.assert_array_equal(target, source)


def test_many_small_copies_through_the_parallel_path() -> None:
    source, step = noise(2 * PARALLEL), 4096
    target = np.zeros_like(source)
    offsets = list(range(0, source.size, step))
    back = offsets[::-1]
    _io.copy(addresses_in(source, offsets), addresses_in(target, back), step, 2)
    np.testing.assert_array_equal(
        target.reshape(-1, step), source.reshape(-1, step)[::-1], strict=True
    )


def test_wrong_arguments_are_refused() -> None:
    memory = noise(8192)
    one, two = addresses_in(memory, [0]), addresses_in(memory, [0, 4096])
    strided = addresses_in(memory, [0, 64, 128])[::2]
    with pytest.raises(ValueError, match="differ in length"):
        _io.verify(two, one, 16)
    with pytest.raises(ValueError, match="differ in length"):
        _io.copy(one, two, 16)
    with pytest.raises(ValueError, match="differ in length"):
        _io.copy(two, two, one)
    with pytest.raises(ValueError, match="address is zero"):
        _io.checksum(np.zeros(1, np.uint64), 16)
    with pytest.raises(ValueError, match="address is zero"):
        _io.copy(one, np.zeros(1, np.uint64), 16)
    for bad in (one.astype(np.int64), one.astype(np.float64), strided, two.reshape(1, 2)):
        with pytest.raises(TypeError):
            _io.checksum(bad, 16)  # type: ignore[arg-type]  # the wrong dtype is the point


# ---- the store's checksum is xxh3-64, seed 0, of exactly the bytes given ----


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
