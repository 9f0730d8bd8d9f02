"""Orders of tokens: permutations within blocks; the first page stays; alike tokens share pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.profiling.clusters.token_order import by_co_activation, by_keys, by_position
from vllm_ssdkv.profiling.clusters.trace import I64, PAGE


def check(order: I64, tokens: int, block: int) -> None:
    np.testing.assert_array_equal(np.sort(order), np.arange(tokens))
    np.testing.assert_array_equal(order[:PAGE], np.arange(PAGE))
    np.testing.assert_array_equal(order // block, np.arange(tokens) // block)


@given(pages=st.integers(1, 40), block=st.sampled_from([32, 128, 512]), seed=st.integers(0, 99))
def test_orders_permute_within_blocks(pages: int, block: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = pages * PAGE
    check(by_keys(rng.normal(size=(tokens, 8)).astype(np.float32), block), tokens, block)
    check(by_co_activation(rng.random((20, tokens)) < 0.1, block), tokens, block)
    check(by_position(tokens), tokens, block)


@pytest.mark.parametrize("by", ["keys", "co-activation"])
def test_alike_tokens_share_pages(by: str) -> None:
    rng = np.random.default_rng(1)
    kind = np.concatenate(
        [np.zeros(PAGE, np.int64), rng.permutation(np.repeat(np.arange(7), PAGE))]
    )
    if by == "keys":
        keys = 4 * np.outer(kind, np.ones(8)) + 0.1 * rng.normal(size=(len(kind), 8))
        order = by_keys(keys.astype(np.float32), 128)
    else:
        order = by_co_activation(np.arange(8)[:, None] == kind[None], 128)
    pages = kind[order].reshape(-1, PAGE)[1:]
    assert (pages == pages[:, :1]).all()


def test_dense_attention_does_not_care_for_order() -> None:
    rng = np.random.default_rng(2)
    keys, values = rng.normal(size=(2, 256, 16)).astype(np.float32)
    query = rng.normal(size=16).astype(np.float32)
    order = by_keys(keys, 128)

    def attend(k: np.ndarray, v: np.ndarray) -> np.ndarray:
        weights = np.exp(k @ query / 4)
        attended: np.ndarray = weights @ v / weights.sum()
        return attended

    np.testing.assert_allclose(attend(keys, values), attend(keys[order], values[order]), rtol=1e-4)
    assert (order != np.arange(256)).any()
