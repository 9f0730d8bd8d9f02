"""Digests of tensors, and words of memory, as the native code gives them."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.digest import digest_of
from vllm_ssdkv.triton_kernels.digest import digest, read_words


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 50) | st.integers(16 * 1024 - 9, 16 * 1024 + 9), max_size=3))
def test_equals_the_formula(sizes: list[int]) -> None:
    random = np.random.default_rng(sum(sizes))
    parts = [random.integers(0, 256, size, dtype=np.uint8) for size in (*sizes, 3)]
    found = digest([torch.from_numpy(part) for part in parts]).numpy().view(np.uint64)
    assert found.tolist() == [digest_of(part.tobytes()) for part in parts]


def test_words_at_addresses() -> None:
    memory = torch.randint(-(1 << 62), 1 << 62, (700,))
    which = torch.randperm(700)[:300]
    assert torch.equal(read_words(memory.data_ptr() + 8 * which), memory[which])
