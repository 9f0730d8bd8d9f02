"""Under which keys the store keeps a request's blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ssdkv.connector.model import adapter_identity, adapter_version
from vllm_ssdkv.store.store_key import block_name

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request


class BlockKeys:
    """Makes keys of 32 bytes from vLLM's block hashes. Reads each adapter's files when it is new,
    and when vLLM would read them again."""

    def __init__(self, name_key: bytes = b"") -> None:
        """``name_key``: :meth:`StorePlace.name_key`; empty: keys are not hidden."""
        self._name_key = name_key
        self._adapters: dict[tuple[object, ...], bytes] = {}

    def of(self, request: Request, stop: int | None = None, start: int = 0) -> list[bytes]:
        """Keys of the request's full blocks ``start`` to ``stop`` whose tokens are known."""
        hashes = request.block_hashes[start:stop]
        adapter, hidden = request.lora_request, self._name_key
        if adapter is None and not hidden:
            return [bytes(h[:32]).ljust(32, b"\0") for h in hashes]
        # vLLM's block hash holds an adapter's name and path; other weights there are other KV.
        identity = b"" if adapter is None else self._identity(adapter)
        return [block_name(hidden, identity + bytes(h)) for h in hashes]

    def _identity(self, adapter: LoRARequest) -> bytes:
        path = adapter.lora_path
        # One that was unloaded and loaded has another number; one that was loaded in its place has
        # not, but is read again for every request that says so (vLLM's add_adapter).
        version = adapter_version(path) if adapter.load_inplace else ()
        key = (adapter.lora_int_id, path, version)
        known = self._adapters.get(key)
        if known is None:
            known = self._adapters[key] = adapter_identity(path)
        return known
