"""Contents of the images, videos and sounds of requests, by which their blocks are keyed.

vLLM names a medium by a hash of its file, or by an identifier that the client gives in place of
one: "image-0" of another day or tenant has that name, too. A name may also look like a hash, or
come from the file's EXIF data. So names are taken for what they are, and keys have the content: a
digest of the tensors that the model computes with.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from vllm.multimodal.hasher import MultiModalHasher

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
    from vllm.v1.request import Request

MAX_NAMES: Final = 1 << 16
"""Names that are remembered: more than vLLM holds media or their blocks in HBM."""

_ALGORITHM: Final = "blake3"


@dataclass(slots=True)
class _Named:
    """A name of vLLM's, and what it stood for.

    Attributes:
        item: Latest tensors under it; None: they are gone.
        digest: Digest of them; empty: nobody has seen them, or they have been several.
    """

    item: weakref.ref[MultiModalKwargsItem] | None
    digest: str

    def is_of(self, item: MultiModalKwargsItem | None) -> bool:
        """Check whether these very tensors have been digested."""
        return item is not None and self.item is not None and self.item() is item


class MediaContents:
    """Digests of media by their names. Used by the scheduler's thread.

    vLLM itself keeps what it computes for a medium by its name. Where a name has stood for several
    contents, nobody knows which of them is attended to: blocks of a request from the first such
    medium on are neither stored nor found, as long as the engine runs.
    """

    def __init__(self, block_tokens: int, *, seen: bool):
        """``seen``: the tensors reach this process."""
        self._block, self._seen = block_tokens, seen
        self._names: OrderedDict[str, _Named] = OrderedDict()

    def note(self, request: Request) -> None:
        """Look at a request's media before it runs."""
        for feature in request.mm_features:
            self._digest(feature)

    def known_blocks(self, request: Request) -> int | None:
        """Number of the request's first blocks whose media are known; None: all of them."""
        for feature in request.mm_features:
            if not self._digest(feature):
                return int(feature.mm_position.offset) // self._block
        return None

    def by_content(self, request: Request) -> list[MultiModalFeatureSpec]:
        """The request's media, named by their contents; unknown ones by names of nobody's."""
        return [
            replace(feature, identifier=self._digest(feature) or os.urandom(32).hex())
            for feature in request.mm_features
        ]

    def _digest(self, feature: MultiModalFeatureSpec) -> str:
        """Digest of a medium; empty: it is not known."""
        if not self._seen:
            return ""
        item, known = feature.data, self._names.get(feature.identifier)
        if known is None:
            known = self._names[feature.identifier] = _Named(None, _digest_of(item))
            if len(self._names) > MAX_NAMES:
                self._names.popitem(last=False)
        elif not known.is_of(item) and known.digest != _digest_of(item):
            known.digest = ""
        self._names.move_to_end(feature.identifier)
        known.item = None if item is None else weakref.ref(item)
        return known.digest


def _digest_of(item: MultiModalKwargsItem | None) -> str:
    if item is None:
        return ""
    content = {name: element.data for name, element in item.items()}
    return str(MultiModalHasher.hash_kwargs(_ALGORITHM, medium=content))
