"""Under which keys the store keeps a request's blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ssdkv.connector.model import adapter_identity
from vllm_ssdkv.store.store_key import block_name

if TYPE_CHECKING:
    from vllm.v1.request import Request


class BlockKeys:
    """Makes keys of 32 bytes from vLLM's block hashes. Reads each adapter's files once."""

    def __init__(self, name_key: bytes = b"") -> None:
        """``name_key``: :meth:`StorePlace.name_key`; empty: keys are not hidden."""
        self._name_key = name_key
        self._adapters: dict[str, bytes] = {}

    def of(self, request: Request, stop: int | None = None, start: int = 0) -> list[bytes]:
        """Keys of the request's full blocks ``start`` to ``stop`` whose tokens are known."""
        hashes = request.block_hashes[start:stop]
        adapter, hidden = request.lora_request, self._name_key
        if adapter is None and not hidden:
            return [bytes(h[:32]).ljust(32, b"\0") for h in hashes]
        # vLLM's block hash holds an adapter's name and path; other weights there are other KV.
        identity = b"" if adapter is None else self._identity(adapter.lora_path)
        return [block_name(hidden, identity + bytes(h)) for h in hashes]

    def _identity(self, path: str) -> bytes:
        known = self._adapters.get(path)
        if known is None:
            known = self._adapters[path] = adapter_identity(path)
        return known
