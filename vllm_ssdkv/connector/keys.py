"""Under which keys the store keeps a request's blocks."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from vllm_ssdkv.connector.model import adapter_identity

if TYPE_CHECKING:
    from vllm.v1.request import Request


class BlockKeys:
    """Makes keys of 32 bytes from vLLM's block hashes. Reads each adapter's files once."""

    def __init__(self) -> None:
        self._adapters: dict[str, bytes] = {}

    def of(self, request: Request, stop: int | None = None, start: int = 0) -> list[bytes]:
        """Keys of the request's full blocks ``start`` to ``stop`` whose tokens are known."""
        hashes = request.block_hashes[start:stop]
        adapter = request.lora_request
        if adapter is None:
            return [bytes(h[:32]).ljust(32, b"\0") for h in hashes]
        # vLLM's block hash holds an adapter's name and path; other weights there are other KV.
        identity = self._identity(adapter.lora_path)
        return [hashlib.blake2b(identity + bytes(h), digest_size=32).digest() for h in hashes]

    def _identity(self, path: str) -> bytes:
        known = self._adapters.get(path)
        if known is None:
            known = self._adapters[path] = adapter_identity(path)
        return known
