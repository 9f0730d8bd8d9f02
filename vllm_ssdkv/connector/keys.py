"""Under which keys the store keeps a request's blocks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm_ssdkv.connector.model import adapter_identity, adapter_version
from vllm_ssdkv.store.store_key import block_name

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

Version = tuple[tuple[str, int, int], ...]
"""Names, sizes and times of an adapter's files; empty where they are not read again."""

_REPLACED: Version = (("another one is in its place", 0, 0),)


class BlockKeys:
    """Makes keys of 32 bytes from vLLM's block hashes. Reads each adapter's files when it is new,
    and when vLLM would read them again.

    A request keeps the identity that its adapter had when it was first asked for: what is found for
    it and what is loaded are one answer.
    """

    def __init__(self, name_key: bytes = b"", *, apart: bool = False) -> None:
        """``name_key``: :meth:`StorePlace.name_key`; empty: keys are not hidden. ``apart``: see
        :meth:`private`."""
        self._name_key = name_key
        self.sessions_apart = apart
        self._own: dict[str, bytes] = {}
        self._adapters: dict[tuple[object, ...], bytes] = {}
        self._of_requests: dict[str, tuple[Version, bytes]] = {}
        self._in_place: set[int] = set()
        """Numbers of adapters that were loaded in another one's place."""

    def __bool__(self) -> bool:
        """Whether any request's identity is remembered."""
        return bool(self._of_requests or self._own)

    def of(self, request: Request, stop: int | None = None, start: int = 0) -> list[bytes]:
        """Keys of the request's full blocks ``start`` to ``stop`` whose tokens are known."""
        hashes = request.block_hashes[start:stop]
        adapter, hidden = request.lora_request, self._name_key
        if adapter is None and not hidden:
            return [bytes(h[:32]).ljust(32, b"\0") for h in hashes]
        # vLLM's block hash holds an adapter's name and path; other weights there are other KV.
        identity = b"" if adapter is None else self._identity(request.request_id, adapter)
        return [block_name(hidden, identity + bytes(h)) for h in hashes]

    def _identity(self, request_id: str, adapter: LoRARequest) -> bytes:
        known = self._of_requests.get(request_id)
        if known is None:
            version = _version(adapter)
            known = version, self._read(adapter, version)
            self._of_requests[request_id] = known
            if adapter.load_inplace:
                self._in_place.add(adapter.lora_int_id)
        return known[1]

    def _read(self, adapter: LoRARequest, version: Version) -> bytes:
        # One that was unloaded and loaded has another number; one that was loaded in its place has
        # not, but is read again for every request that says so (vLLM's add_adapter).
        key = (adapter.lora_int_id, adapter.lora_path, version)
        known = self._adapters.get(key)
        if known is None:
            known = self._adapters[key] = adapter_identity(adapter.lora_path)
        return known

    def to_store(self, request: Request, stop: int, start: int) -> list[bytes]:
        """Keys, as :meth:`of`, of blocks that the request has computed.

        Where the adapter's file was written anew, vLLM goes on with KV of both weights once another
        request has had it read, or the operator; where it was loaded in the place of the request's
        own, it does already. Nobody else must find that.
        """
        if self.private(request):
            own = self._own.setdefault(request.request_id, os.urandom(32))
            hashes = request.block_hashes[start:stop]
            return [block_name(self._name_key, own + bytes(h)) for h in hashes]
        adapter = request.lora_request
        known = self._of_requests.get(request.request_id)
        if adapter is not None and known is not None:
            replaced = not adapter.load_inplace and adapter.lora_int_id in self._in_place
            version = _REPLACED if replaced else _version(adapter)
            if version != known[0]:
                self._of_requests[request.request_id] = version, os.urandom(32)
        return self.of(request, stop, start)

    def private(self, request: Request) -> bool:
        """Whether what the request computes is for itself: a session's, where steps compute tokens
        that a turn's end takes back.

        With drafts, a turn may end among some that were accepted: vLLM takes their KV for that of
        the next turn's input. With a state, a turn may end while the step after its last token is
        under way: the next turn goes on from a state that has seen a token too much.
        """
        return self.sessions_apart and bool(request.resumable)

    def forget(self, request_id: str) -> None:
        """The request has ended, or starts again from its beginning."""
        self._of_requests.pop(request_id, None)
        self._own.pop(request_id, None)


def _version(adapter: LoRARequest) -> Version:
    return adapter_version(adapter.lora_path) if adapter.load_inplace else ()
