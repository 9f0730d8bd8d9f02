"""Keys under which the store keeps a request's blocks.

A key binds three things: the tokens, which vLLM's block hash stands for; the *namespace*, a digest
of the weights in memory and of the settings that change KV; and the adapter's weights, as they were
loaded. So KV is found only by an engine that computes with the same.

Blocks with a token that was decoded from a chosen part of its context, and all blocks behind one,
bind the options of that choice, too: only requests that choose alike find them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_ssdkv.connector.scheduler.media_contents import MediaContents
from vllm_ssdkv.store.integrity.store_key import block_name

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

KEY_BYTES = 32

NO_NAMESPACE = bytes(KEY_BYTES)
"""Keys are vLLM's block hashes."""

AdapterDigest = Callable[[int], bytes]
"""Digest of an adapter's weights on all ranks, by vLLM's number; empty: it is not known."""


class _ByContent:
    """A request without the names of its adapter and media, for vLLM's own hashing of its blocks.

    vLLM's hashes have the adapter's name and path in them, and what the client calls its images.
    The same adapter or image may have others, and other ones the same. The adapter's weights come
    in by the key. Of embeddings in place of tokens vLLM hashes the bytes, and not which positions
    have them, nor their type.
    """

    def __init__(self, request: Request, media: MediaContents) -> None:
        self._request, self._media = request, media
        self._last = b""
        self.lora_request = None
        self.cache_salt = _salt_of(request)
        self.mm_features: list[MultiModalFeatureSpec] = []
        self.block_hashes: list[bytes] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._request, name)

    def hashes(self) -> list[bytes]:
        """One for each of the request's own, in their order."""
        own = self._request.block_hashes
        known = len(self.block_hashes)
        # A session takes back tokens. A hash stands for all tokens up to its block.
        if known and (known > len(own) or own[known - 1] != self._last):
            self.block_hashes, self.mm_features = [], []
        if len(self.mm_features) != len(self._request.mm_features):  # a session may get more
            self.mm_features = self._media.by_content(self._request)
        if own and len(self.block_hashes) < len(own):
            self.block_hashes += self._request._block_hasher(self)
            del self.block_hashes[len(own) :]
            self._last = own[-1]
        return self.block_hashes


class BlockKeys:
    """Makes keys of 32 bytes from vLLM's block hashes. Used by the scheduler's thread.

    A request keeps the identity that it had when it was first asked for: what is found for it and
    what is loaded are one answer. What it computes after weights have changed is of both, and gets
    keys that nobody looks for.

    Example:
        >>> keys = BlockKeys(namespace=bytes(range(32)))
        >>> len(keys.of(request)) == len(request.block_hashes)  # doctest: +SKIP
        True
    """

    def __init__(
        self,
        namespace: bytes = NO_NAMESPACE,
        name_key: bytes = b"",
        *,
        apart: bool = False,
        adapter: AdapterDigest = lambda number: b"",
        media: MediaContents | None = None,
        hashes_per_block: int = 1,
    ) -> None:
        """
        Args:
            namespace: 32 bytes.
            name_key: :meth:`StorePlace.name_key`; empty: keys are not hidden.
            apart: See :meth:`private`.
            adapter: Digests of adapters as the workers have told them.
            media: Contents of media; None: no request has any.
            hashes_per_block: See :class:`EngineFacts`.
        """
        self._hashes_per_block = hashes_per_block
        self._namespace = namespace
        self._name_key = name_key
        self._adapter = adapter
        self.resumable_apart = apart
        self.suspended = False
        """True if the store is: nobody is to find what is computed."""
        self.hidden = False
        """True between a reset of the cache and the next digest of the weights."""
        self._identities: dict[str, bytes] = {}
        self._chosen: dict[str, tuple[int, bytes]] = {}
        """First block of a request that binds a choice, and the digest of that choice."""
        self._own: dict[str, bytes] = {}
        self._mixed: set[str] = set()
        self._apart: set[str] = set()
        self._media = media or MediaContents(1, seen=False)
        self._views: dict[str, _ByContent] = {}

    def __bool__(self) -> bool:
        """Check whether anything is remembered of any request."""
        remembered = self._own, self._mixed, self._apart, self._chosen
        return any(map(bool, (self._identities, self._views, *remembered)))

    def identity(self, request: Request) -> bytes:
        """32 bytes of namespace and adapter; empty where the adapter is not known.

        One that vLLM reads anew for every step of its requests ("load_inplace") never is: files may
        change between the look into the store and the step.
        """
        if request.lora_request is None:
            return self._namespace
        known = self._identities.get(request.request_id)
        if known is None:
            known = b""
            digest = self._adapter(request.lora_request.lora_int_id)
            if digest and not request.lora_request.load_inplace:
                known = hashlib.blake2b(self._namespace + digest, digest_size=KEY_BYTES).digest()
                self._identities[request.request_id] = known
        return known

    def of(self, request: Request, stop: int | None = None, start: int = 0) -> list[bytes]:
        """Keys of the request's full blocks ``start`` to ``stop`` whose tokens are known.

        None where its adapter is not known.
        """
        identity = self.identity(request)
        if not identity:
            return []
        hashes = self._hashes(request)[start:stop]
        if request.request_id not in self._chosen:
            return self._named(hashes, identity)
        first, choice = self._chosen[request.request_id]
        plain = max(0, first - start)
        chosen = self._named(hashes[plain:], _bound_to(identity, choice))
        return self._named(hashes[:plain], identity) + chosen

    def arrived(self, request: Request) -> None:
        """A request may run from now on."""
        self._media.note(request)

    def known_blocks(self, request: Request) -> int | None:
        """As :meth:`MediaContents.known_blocks`: those that others may find."""
        return self._media.known_blocks(request) if request.mm_features else None

    def bind_choice(self, request: Request, block: int, choice: bytes) -> None:
        """Blocks of a request from ``block`` on hold, or follow, KV of tokens that were decoded by
        a ``choice`` (:attr:`SSDKVConfig.choice`). The first call counts, until :meth:`forget`."""
        self._chosen.setdefault(request.request_id, (block, choice))

    def decoded_from(self, request: Request) -> int | None:
        """First block of a request that :meth:`bind_choice` named; None: none is."""
        found = self._chosen.get(request.request_id)
        return None if found is None else found[0]

    def chosen(self, request: Request, block: int, choice: bytes) -> list[bytes]:
        """Key of a request's block as one who chose in it or before it has stored it, if its
        tokens and its adapter are known."""
        identity = self.identity(request)
        hashes = self._hashes(request)[block : block + 1] if identity else []
        return self._named(hashes, _bound_to(identity, choice))

    def _last_hashes(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """The last hash of each block: it covers all tokens before."""
        per_block = self._hashes_per_block
        return hashes if per_block == 1 else hashes[per_block - 1 :: per_block]

    def _hashes(self, request: Request) -> Sequence[bytes]:
        """Hashes of the request's tokens and media, by block, whatever they and its adapter are
        called."""
        named = request.lora_request is not None or request.mm_features
        if not named and request.prompt_embeds is None:
            return self._last_hashes(request.block_hashes)
        view = self._views.get(request.request_id)
        if view is None:
            view = self._views[request.request_id] = _ByContent(request, self._media)
        return self._last_hashes(view.hashes())

    def _named(self, hashes: Sequence[bytes], identity: bytes) -> list[bytes]:
        joined = b"".join(bytes(h[:KEY_BYTES]).ljust(KEY_BYTES, b"\0") for h in hashes)
        table = np.frombuffer(joined, dtype=np.uint8).reshape(-1, KEY_BYTES)
        bound = (table ^ np.frombuffer(identity, dtype=np.uint8)).tobytes()
        keys = [bound[at : at + KEY_BYTES] for at in range(0, len(bound), KEY_BYTES)]
        return [block_name(self._name_key, key) for key in keys] if self._name_key else keys

    def to_store(self, request: Request, stop: int, start: int) -> list[bytes]:
        """Keys, as :meth:`of`, of blocks that the request has computed; of those that are for
        itself (:meth:`private`, :meth:`known_blocks`) such as nobody looks for."""
        known = 0 if self.private(request) else self.known_blocks(request)
        if known is None or known >= stop:
            return self.of(request, stop, start)
        own = self._own.setdefault(request.request_id, os.urandom(KEY_BYTES))
        shared = self.of(request, known, start) if start < known else []
        hashes = self._last_hashes(request.block_hashes)[max(start, known) : stop]
        return shared + self._named(hashes, own)

    def private(self, request: Request) -> bool:
        """Check whether what the request computes is for itself.

        So it is while the store is suspended or hidden; where it is stored as X
        (:meth:`keep_apart`); where weights have changed under it; where its adapter is read anew
        for every step; and for a resumable request whose steps compute tokens that a turn's end
        takes back. With drafts, a turn may end among some that were accepted: vLLM takes their KV
        for that of the next turn's input. With a state, a turn may end while the step after its
        last token is under way: the next turn goes on from a state that has seen a token too much.
        """
        adapter = request.lora_request
        return (
            self.suspended
            or self.hidden
            or self.is_mixed(request)
            or request.request_id in self._apart
            or (adapter is not None and adapter.load_inplace)
            or (self.resumable_apart and bool(request.resumable))
        )

    def is_mixed(self, request: Request) -> bool:
        """Check whether weights have changed under the request, or under what it began with."""
        return request.request_id in self._mixed

    def rebind(self, namespace: bytes, running: Iterable[Request]) -> None:
        """The weights have changed: nothing older is found from now on."""
        self._namespace = namespace
        self.mix(running)
        self._identities.clear()

    def adapter_changed(self, users: Iterable[Request]) -> None:
        """An adapter was loaded, or is gone. Of its ``users``, which run, those that began when
        nobody had told of it have run with this one."""
        for request in users:
            if request.request_id in self._identities:
                self.mix([request])
            else:
                self.identity(request)

    def mix(self, requests: Iterable[Request]) -> None:
        """Requests go on with KV of weights that were changed, or begin with it."""
        self._mixed.update(request.request_id for request in requests)

    def keep_apart(self, request_id: str) -> None:
        """Hide what the request stores, which is not K and V, from who looks for these."""
        self._apart.add(request_id)

    def forget(self, request_id: str) -> None:
        """The request has ended, or starts again from its beginning."""
        self._identities.pop(request_id, None)
        self._chosen.pop(request_id, None)
        self._own.pop(request_id, None)
        self._views.pop(request_id, None)
        self._mixed.discard(request_id)
        self._apart.discard(request_id)


def _bound_to(identity: bytes, choice: bytes) -> bytes:
    """The identity of blocks that were decoded by a choice."""
    return hashlib.blake2b(identity + choice, digest_size=KEY_BYTES, person=b"choice").digest()


def _salt_of(request: Request) -> str | None:
    """The request's salt, with all that vLLM's hashes do not say of its embeddings."""
    embeddings = request.prompt_embeds
    if embeddings is None:
        salt: str | None = request.cache_salt
        return salt
    mask = request.prompt_is_token_ids
    where = "" if mask is None else hashlib.blake2b(bytes(mask), digest_size=16).hexdigest()
    return f"{request.cache_salt!r} {embeddings.dtype} {where}"
