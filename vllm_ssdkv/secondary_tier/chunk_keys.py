"""Keys under which the store keeps vLLM's chunks.

A key binds vLLM's own key of a chunk, which stands for its tokens, to the engine's identity and to
the contents of the images up to the chunk's end. vLLM's key has a client's name of an image, and an
adapter's name, in place of what they contain.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vllm_ssdkv.connector.scheduler.media_contents import MediaContents
from vllm_ssdkv.store.integrity.store_key import block_name

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

KEY_BYTES: Final = 32


@dataclass(slots=True)
class _Owner:
    """A request as the keys see it.

    Attributes:
        resets: Resets of the cache that came before it.
        head: vLLM's hash of its first block; empty where it has none.
        media: The request, if it has images and the like.
    """

    resets: int
    head: bytes
    media: Request | None


class ChunkKeys:
    """Makes keys of 32 bytes. Used by the scheduler's thread.

    No chunk of these requests has a key, so that they are neither stored nor found: with an
    adapter, with embeddings in place of tokens, of a session that may take tokens back, with an
    image whose content is not known, those that vLLM's cache was reset under, and all of an engine
    whose requests may not begin with stored chunks.
    """

    def __init__(self, namespace: bytes, name_key: bytes, *, reuses: bool, sees_media: bool):
        """``namespace``: 32 bytes of the engine's identity. ``name_key``:
        :meth:`StorePlace.name_key`. ``reuses``: requests may begin with stored chunks.
        ``sees_media``: contents of images reach this process."""
        self._namespace, self._name_key, self._reuses = namespace, name_key, reuses
        self._media = MediaContents(1, seen=sees_media)
        self._resets = 0
        self._told_unknown = False

    @property
    def lasting(self) -> bool:
        """Check whether a later start finds what is stored now."""
        return self._resets == 0

    def renew(self) -> None:
        """Take an identity of this process: the weights may be others from now on."""
        self._namespace = hashlib.blake2b(
            self._namespace, key=os.urandom(KEY_BYTES), digest_size=KEY_BYTES
        ).digest()
        self._resets += 1

    def arrived(self, context: ReqContext, request: Request | None) -> None:
        """A request begins; None: nobody knows which one."""
        if not self._reuses:
            return
        if request is None:
            self._tell_unknown()
            return
        if request.prompt_embeds is not None or request.resumable:
            return
        if request.lora_request is not None:  # chunk_space has said so
            return
        if request.mm_features:
            self._media.note(request)
        head = bytes(request.block_hashes[0]) if request.block_hashes else b""
        context.set_state(_Owner(self._resets, head, request if request.mm_features else None))

    def _tell_unknown(self) -> None:
        if not self._told_unknown:
            self._told_unknown = True
            logger.warning(
                "ssdkv: the tier cannot see a request that vLLM tells it of, and neither stores "
                "nor finds chunks of such requests (ssdkv_stores_skipped, cause unknown)"
            )

    def head(self, context: ReqContext) -> bytes:
        """vLLM's hash of a request's first block; empty where none is known."""
        owner = context.get_state(_Owner)
        return b"" if owner is None else owner.head

    def of(self, key: OffloadKey, context: ReqContext) -> bytes | None:
        """Key of a request's chunk in the store; None: it has none."""
        owner = context.get_state(_Owner)
        if owner is None or owner.resets != self._resets:
            return None
        named = bytes(key)
        if owner.media is not None:
            contents = self._contents(owner.media, context.get_offload_key_position(key))
            if contents is None:
                return None
            named += contents
        made = hashlib.blake2b(named, key=self._namespace, digest_size=KEY_BYTES).digest()
        return block_name(self._name_key, made) if self._name_key else made

    def _contents(self, request: Request, end: int | None) -> bytes | None:
        """Digest of the request's images before token ``end``, empty where there are none; None:
        one of them is not known."""
        if end is None:
            return None
        known = self._media.known_blocks(request)  # of one token each
        if known is not None and known < end:
            return None
        seen = [
            f"{feature.mm_position.offset} {feature.identifier}"
            for feature in self._media.by_content(request)
            if feature.mm_position.offset < end
        ]
        if not seen:
            return b""
        return hashlib.blake2b("\n".join(seen).encode(), digest_size=KEY_BYTES).digest()
