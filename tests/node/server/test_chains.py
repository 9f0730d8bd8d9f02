"""Requests that compute: each key has one, until that has ended or stands still."""

from __future__ import annotations

import pytest

from vllm_ssdkv.node.server import chains
from vllm_ssdkv.node.server.chains import CHAIN_S, MOST_CHAINS, ChainTable

A, B = "engine a", "engine b"
KEYS = [bytes([i]) * 32 for i in range(6)]


def nobody(key: bytes) -> bool:
    return False


def test_others_wait_for_the_first_who_asks() -> None:
    table = ChainTable()
    assert table.expected(KEYS, A, 1, nobody, 0.0) == 0
    table.begin(A, 1, KEYS[:4], 0.0)
    assert table.expected(KEYS, A, 1, nobody, 1.0) == 0, "not for itself"
    assert table.expected(KEYS, A, 2, nobody, 1.0) == 4
    assert table.expected(KEYS, B, 1, nobody, 1.0) == 4
    assert table.expected(KEYS[4:], B, 1, nobody, 1.0) == 0
    assert table.expected([KEYS[5], *KEYS], B, 1, nobody, 1.0) == 0, "the first is nobody's"


def test_what_is_being_stored_is_expected_too() -> None:
    table = ChainTable()
    table.begin(A, 1, KEYS[:3], 0.0)
    table.claimed(KEYS[0], 1.0)
    assert table.expected(KEYS, B, 1, nobody, 1.0) == 0
    assert table.expected(KEYS, B, 1, lambda key: key == KEYS[0], 1.0) == 3


def test_a_chain_of_which_nothing_comes_is_given_up() -> None:
    table = ChainTable()
    table.begin(A, 1, KEYS, 0.0)
    table.claimed(KEYS[0], CHAIN_S / 2)
    assert table.expected(KEYS[1:], B, 1, nobody, CHAIN_S) == 5, "it has moved since"
    assert table.expected(KEYS[1:], B, 1, nobody, 2 * CHAIN_S) == 0
    table.begin(B, 1, KEYS[1:], 2 * CHAIN_S)
    assert table.expected(KEYS[1:], A, 1, nobody, 2 * CHAIN_S + 1) == 5


def test_ends_free_keys_for_others() -> None:
    table = ChainTable()
    table.begin(A, 1, KEYS[:3], 0.0)
    table.begin(A, 2, KEYS, 0.0)
    table.leave(A, 1)
    assert table.expected(KEYS, B, 1, nobody, 0.0) == 0
    assert table.expected(KEYS[3:], B, 1, nobody, 0.0) == 3
    table.end(A)
    assert len(table) == 0
    table.end(A)


def test_a_request_that_asks_again_has_one_chain() -> None:
    table = ChainTable()
    for _ in range(3):
        table.begin(A, 1, KEYS, 0.0)
    assert len(table) == len(KEYS)
    table.leave(A, 1)
    assert len(table) == 0


def test_owners_have_a_limit() -> None:
    table = ChainTable()
    for number in range(MOST_CHAINS + 5):
        table.begin(A, number, [number.to_bytes(32, "big")], 0.0)
    assert len(table) == MOST_CHAINS


def test_so_do_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "MOST_KEYS", 4)
    table = ChainTable()
    table.begin(A, 1, KEYS[:3], 0.0)
    table.begin(A, 2, KEYS[3:5], 0.0)
    assert table.expected(KEYS, B, 1, nobody, 0.0) == 0
    assert table.expected(KEYS[3:], B, 1, nobody, 0.0) == 2
