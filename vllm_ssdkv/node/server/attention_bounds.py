"""Bounds of the memory that one connection for attention takes in a node, and lists within them.

All of them follow from the memory for its pages (``attend_gib``) and the shape of its slots. The
engine hears those that it must keep to; see ``docs/internals/node-attention.md``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import ProtocolError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.node.protocol.messages import MAX_ROWS, TellRow, unpack
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

I64 = NDArray[np.int64]

LEAST_SHARE: Final = 16 * MIB
"""Minimum of both shares, whatever ``attend_gib`` says: a context of 8K tokens of the largest
models."""

_LEAST_BLOCKS: Final = 16
_TOLD_BYTES: Final = 8 + 8 + 4
"""Bytes that describe a page: its place, its digest, and the number of its place in DRAM."""

_ENTRY_BYTES: Final = 200
"""Bytes of a page in a call, without its mask: all arrays of its lists, and of its reads."""

_SLOT_BYTES: Final = 4
_LISTED_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class AttendBounds:
    """Bounds of one connection for attention.

    Attributes:
        blocks: That are told at a time.
        listed: Blocks of all rows together.
        entries: Pages that are worked on at once, which a call's rows are cut by.
        plan_bytes: Of lists that are kept from call to call.

    Example:
        bounds = AttendBounds.of(geometry, slots=1000, page_tokens=16, nbytes=1 << 30)
    """

    blocks: int
    listed: int
    entries: int
    plan_bytes: int

    @classmethod
    def of(cls, geometry: SlotGeometry, slots: int, page_tokens: int, nbytes: int) -> AttendBounds:
        """Bounds beside ``nbytes`` of memory for pages: a quarter of it for what is told, and a
        quarter for rows, plans and calls.

        Raises:
            ProtocolError: slots are too many or too large.
        """
        share = max(nbytes // 4, LEAST_SHARE)
        if slots * _SLOT_BYTES > share:
            raise ProtocolError(
                "limit", f"{slots} slots are more than attend_gib of the node has room for"
            )
        if 4 * geometry.layer_bytes > max(nbytes, LEAST_SHARE):
            raise ProtocolError(
                "limit", f"layers of {geometry.layer_bytes} bytes need more attend_gib of the node"
            )
        of_entry = _ENTRY_BYTES + page_tokens
        # Any one row can be worked on as a whole.
        blocks = min(
            share // (_TOLD_BYTES * geometry.kv_pages),
            share // 2 // (of_entry * geometry.pages_per_layer),
        )
        if blocks < min(slots, _LEAST_BLOCKS):
            raise ProtocolError(
                "limit", f"blocks of {geometry.kv_pages} pages need more attend_gib of the node"
            )
        return cls(
            min(blocks, slots), share // 4 // _LISTED_BYTES, share // 2 // of_entry, share // 4
        )


class ToldRows:
    """Blocks of rows, as an engine has told them. One thread at a time.

    Example:
        rows = ToldRows(bounds)
        rows.tell(TellRow(1, 0, pack([7, 8])))
        rows.slots(1)
    """

    def __init__(self, bounds: AttendBounds):
        """No row."""
        self._bounds = bounds
        self._rows: dict[int, I64] = {}
        self._listed = 0

    def tell(self, message: TellRow) -> None:
        """See :class:`TellRow`.

        Raises:
            ProtocolError: it does not fit what was told, a slot is there twice, or a bound is
                reached.
        """
        before = self._rows.get(message.row, np.zeros(0, dtype=np.int64))
        if message.keep > len(before):
            raise ProtocolError("body", "a row is to keep more blocks than it has")
        kept, slots = before[: message.keep], unpack(message.slots)
        if len(np.unique(slots)) < len(slots) or np.isin(slots, kept).any():
            raise ProtocolError("body", "a row has a block twice")
        length = len(kept) + len(slots)
        listed = self._listed + length - len(before)
        if length > self._bounds.blocks or listed > self._bounds.listed:
            raise ProtocolError(
                "limit",
                f"a row has more than {self._bounds.blocks} blocks, or all of them more than "
                f"{self._bounds.listed}",
            )
        self._rows[message.row] = np.concatenate([kept, slots])
        self._listed = listed

    def forget(self, rows: I64) -> None:
        """These are no more."""
        for row in rows.tolist():
            self._listed -= len(self._rows.pop(row, ()))

    def called(self, rows: I64) -> list[I64]:
        """Blocks of each row of a call.

        Raises:
            ProtocolError: a row was not told, or comes twice; or there are too many.
        """
        names = rows.tolist()
        if len(names) > MAX_ROWS or len(set(names)) < len(names):
            raise ProtocolError("body", f"a call has a row twice, or more than {MAX_ROWS}")
        for row in names:
            if row not in self._rows:
                raise ProtocolError("order", f"row {row} was not told")
        return [self._rows[row] for row in names]


def cut(lengths: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of items that together have ``most`` at most, or are single ones."""
    begin = total = 0
    for number, length in enumerate(lengths):
        if number > begin and total + length > most:
            yield begin, number
            begin, total = number, 0
        total += length
    if begin < len(lengths):
        yield begin, len(lengths)


class Sized(Protocol):
    """Has a size in memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        ...


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", bound=Sized)


class BoundedCache(Generic[Key, Value]):
    """Values that are kept up to a number of bytes: those that were used last.

    Example:
        cache = BoundedCache(1 << 20)
        cache.put("a", value)
    """

    def __init__(self, most: int):
        """``most`` bytes of all values together."""
        self._most, self._nbytes = most, 0
        self._values: OrderedDict[Key, Value] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self._nbytes

    def get(self, key: Key) -> Value | None:
        """The value, if it is kept."""
        found = self._values.get(key)
        if found is not None:
            self._values.move_to_end(key)
        return found

    def put(self, key: Key, value: Value) -> None:
        """Keep a value under a new key, unless it is larger than the bound."""
        if value.nbytes > self._most:
            return
        self._values[key] = value
        self._nbytes += value.nbytes
        while self._nbytes > self._most:
            self._nbytes -= self._values.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Keep nothing."""
        self._values.clear()
        self._nbytes = 0
