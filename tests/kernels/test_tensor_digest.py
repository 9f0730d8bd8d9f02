"""Digests of tensors: the formula, whatever shape and order they have; and a probe's looks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.digest import digest_of
from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.kernels.tensor_digest import TensorProbe, digest_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool)


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_bytes_of_every_length_give_the_formula(parts: list[bytes]) -> None:
    tensors = [torch.frombuffer(bytearray(b"x" + part), dtype=torch.uint8)[1:] for part in parts]
    assert digest_tensors(tensors).tolist() == [digest_of(part) for part in parts]


def test_large_ones_are_shared_by_threads() -> None:
    data = np.random.default_rng(1).integers(0, 256, (9 << 20) + 5, dtype=np.uint8)
    words = np.frombuffer(data.tobytes().ljust((9 << 20) + 8, b"\0"), np.uint64)
    number = np.arange(1, len(words) + 1, dtype=np.uint64)
    mixed = (words ^ number * np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(32)) * np.uint64(0x94D049BB133111EB)
    expected = int((mixed ^ mixed >> np.uint64(29)).sum(dtype=np.uint64))
    assert digest_tensors([torch.from_numpy(data)]).tolist() == [expected]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_order(dtype: torch.dtype) -> None:
    """Bytes are those of memory, or of a copy where the tensor has gaps."""
    whole = torch.arange(60).to(torch.uint8).to(dtype).reshape(3, 4, 5)
    raw = whole.contiguous().view(torch.uint8).numpy().tobytes()
    assert digest_tensors([whole, whole.permute(2, 0, 1)]).tolist() == [digest_of(raw)] * 2
    gaps = whole[:, 1:3]
    copied = gaps.contiguous().view(torch.uint8).numpy().tobytes()
    assert digest_tensors([gaps]).tolist() == [digest_of(copied)]


def test_nothing_is_zero() -> None:
    assert digest_tensors([torch.empty(0), torch.empty(5, device="meta")]).tolist() == [0, 0]
    assert digest_tensors([]).tolist() == []


@given(st.binary(min_size=8, max_size=64), st.integers(0), st.integers(1, 255))
def test_a_changed_byte_always_changes_it(data: bytes, at: int, flip: int) -> None:
    other = bytearray(data)
    other[at % len(data)] ^= flip
    one, two = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (data, other))
    assert digest_tensors([one]) != digest_tensors([two])


def test_swapped_words_change_it() -> None:
    words = torch.arange(6)
    assert digest_tensors([words]) != digest_tensors([words.flip(0)])


def test_another_kind_of_device_is_refused() -> None:
    class Elsewhere(torch.Tensor):
        device = torch.device("xpu")

    with pytest.raises(UnsupportedError, match="xpu"):
        digest_tensors([torch.ones(3).as_subclass(Elsewhere)])


class TestProbe:
    """A look finds what reloading does to weights."""

    @staticmethod
    def weights() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(shape, generator=generator) for shape in ((7, 9), (4,), (33, 2))]

    def test_nothing_changed(self) -> None:
        weights = self.weights()
        probe = TensorProbe([*weights, torch.empty(0), torch.empty(4, device="meta")])
        assert not probe.changed()
        assert not probe.changed()

    def test_new_content_in_place(self) -> None:
        for which in range(3):
            weights = self.weights()
            probe = TensorProbe(weights)
            weights[which].data.copy_(torch.randn(weights[which].shape))
            assert probe.changed()

    def test_new_memory(self) -> None:
        weights = self.weights()
        probe = TensorProbe(weights)
        weights[1].data = weights[1].clone()
        assert probe.changed()

    def test_a_tensor_that_is_gone(self) -> None:
        weights = self.weights()
        probe = TensorProbe(weights)
        del weights[0]
        assert probe.changed()

    def test_a_tensor_with_gaps(self) -> None:
        memory = torch.zeros(10, 10)
        gaps = memory[:, ::2]
        probe = TensorProbe([gaps])
        assert not probe.changed()
        memory.fill_(1)
        assert probe.changed()
