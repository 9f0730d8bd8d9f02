"""Names of blocks in a store: vLLM's hashes, or what only the key's owner can make of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from vllm_ssdkv.connector.keys import BlockKeys
from vllm_ssdkv.connector.model import adapter_identity

HASHES = [bytes([n]) * 32 for n in range(5)]
SECRET = bytes(range(32))


def request(adapter: Path | None = None) -> Request:
    lora = None if adapter is None else LoRARequest("an adapter", 1, str(adapter))
    return cast(Request, SimpleNamespace(block_hashes=HASHES, lora_request=lora))


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
