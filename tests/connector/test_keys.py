"""Names of blocks in a store: vLLM's hashes, or what only the key's owner can make of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from vllm_ssdkv.connector import model
from vllm_ssdkv.connector.keys import BlockKeys
from vllm_ssdkv.connector.model import adapter_identity

HASHES = [bytes([n]) * 32 for n in range(5)]
SECRET = bytes(range(32))


def request(adapter: Path | None = None, *, again: bool = False, name: str = "r") -> Request:
    lora = None
    if adapter is not None:
        lora = LoRARequest("an adapter", 1, str(adapter), load_inplace=again)
    found = SimpleNamespace(
        request_id=name, block_hashes=HASHES, lora_request=lora, resumable=False
    )
    return cast(Request, found)


def hidden(data: bytes) -> bytes:
    return hashlib.blake2b(data, key=SECRET, digest_size=32).digest()


def test_hashes_are_hidden_under_the_key() -> None:
    assert BlockKeys().of(request()) == HASHES
    keys = BlockKeys(SECRET)
    assert keys.of(request()) == [hidden(h) for h in HASHES]
    assert keys.of(request(), 4, 1) == [hidden(h) for h in HASHES[1:4]]


def test_of_an_adapter_the_identity_is_hidden_too(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"weights")
    identity = adapter_identity(str(tmp_path))
    plain = [hashlib.blake2b(identity + h, digest_size=32).digest() for h in HASHES]
    assert BlockKeys().of(request(tmp_path)) == plain
    assert BlockKeys(SECRET).of(request(tmp_path)) == [hidden(identity + h) for h in HASHES]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    write(tmp_path, b"old weights")
    return tmp_path


def write(adapter: Path, weights: bytes) -> None:
    (adapter / "adapter_model.bin").write_bytes(weights)


def test_what_is_found_and_what_is_loaded_have_one_key(adapter: Path) -> None:
    keys, asked = BlockKeys(), request(adapter, again=True)
    old = keys.of(asked)
    write(adapter, b"other weights")
    assert keys.of(asked) == old
    new = keys.of(request(adapter, again=True, name="other"))
    assert not set(new) & set(old)
    keys.forget(asked.request_id)
    assert keys.of(asked) == new, "a request that starts again computes with the new weights"


def test_what_both_weights_computed_is_nobody_elses(adapter: Path) -> None:
    keys, runs = BlockKeys(), request(adapter, again=True)
    old = keys.of(runs)
    assert keys.to_store(runs, 5, 0) == old
    write(adapter, b"other weights")
    assert keys.of(runs) == old
    mixed = keys.to_store(runs, 5, 0)
    assert keys.to_store(runs, 3, 1) == mixed[1:3]
    assert keys.of(runs) == mixed
    new = keys.of(request(adapter, again=True, name="other"))
    assert len({*old, *mixed, *new}) == 3 * len(HASHES)
    for name in ("r", "other"):
        keys.forget(name)
    assert not keys


def test_an_adapter_that_vllm_does_not_read_again_keeps_its_keys(adapter: Path) -> None:
    keys, runs = BlockKeys(), request(adapter)
    old = keys.of(runs)
    write(adapter, b"other weights")
    assert keys.to_store(runs, 5, 0) == keys.of(request(adapter, name="other")) == old


def test_an_adapter_in_whose_place_another_one_was_loaded(adapter: Path) -> None:
    """Its request does not say so: the one that came with the new weights does."""
    keys, runs = BlockKeys(), request(adapter)
    old = keys.of(runs)
    write(adapter, b"other weights")
    new = keys.of(request(adapter, again=True, name="other"))
    mixed = keys.to_store(runs, 5, 0)
    assert keys.to_store(runs, 5, 0) == mixed
    assert len({*old, *mixed, *new}) == 3 * len(HASHES)


def test_a_file_that_somebody_is_about(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listed, and gone when it is looked at."""
    gone = adapter / "gone.bin"
    listed = [adapter / "adapter_model.bin", gone]
    monkeypatch.setattr(model, "_adapter_files", lambda root: listed)
    ((name, *_),) = model.adapter_version(str(adapter))
    assert name == "adapter_model.bin"


def test_what_a_session_computes_with_drafts_is_its_own() -> None:
    """A turn that ends among accepted drafts leaves their KV where the next input's belongs."""
    once, session = request(), request(name="s")
    session.resumable = True
    assert BlockKeys().to_store(session, 5, 0) == HASHES
    keys = BlockKeys(apart=True)
    assert [keys.private(each) for each in (once, session)] == [False, True]
    assert keys.to_store(once, 5, 0) == HASHES
    stored = keys.to_store(session, 5, 0)
    assert not set(stored) & set(HASHES)
    assert keys.to_store(session, 5, 2) == stored[2:]
    assert keys.of(session) == HASHES
    keys.forget("s")
    assert not keys
    assert not set(keys.to_store(session, 5, 0)) & set(stored)
