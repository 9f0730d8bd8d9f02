"""Types of the native module ``_index`` (sources in csrc/index)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]

def encode_records(
    kind: int, slots: I64, epochs: I64, keys: list[bytes] | None, first_sequence: int
) -> bytes:
    """Sealed records of the journal; shapes [n]; ``keys`` None: all zero.

    Raises ValueError when lengths differ or a key has not 32 bytes.
    """

class Replay:
    """Content of a journal, fed piece by piece; not thread-safe.

    Memory is bounded by ``num_slots``, whatever the length of the journal. ``slots``, ``epochs``
    and ``keys`` list what is live in the order of the records; reading one of them, or
    :meth:`SlotTable.recover`, ends the journal.
    """

    def __init__(self, num_slots: int) -> None: ...
    def feed(self, data: bytes) -> None: ...
    @property
    def slots(self) -> I64: ...
    @property
    def epochs(self) -> I64: ...
    @property
    def keys(self) -> list[bytes]: ...
    @property
    def records(self) -> int:
        """Valid records."""

    @property
    def corrupt(self) -> int:
        """Records that failed their checksum, an incomplete last one included."""

    @property
    def damaged(self) -> int:
        """Corrupt records with a valid one behind them: no append that was cut leaves these."""

    @property
    def out_of_range(self) -> int:
        """Valid ``PUT`` records of slots that the store does not have."""

    @property
    def superseded(self) -> int:
        """Records of slots whose key a newer record gives to another one; known after
        :meth:`SlotTable.recover`, or when one of the lists was read."""

    @property
    def newest_epoch(self) -> int: ...
    @property
    def newest_sequence(self) -> int: ...

class SlotTable:
    """Slots, their keys and lists; the rules are in :mod:`vllm_ssdkv.store.index.slot_index`.

    One thread calls everything but :meth:`begin_walk` and :meth:`walk`, which another may call.
    Arrays are int64 of shape [n]. Raises IndexError for a slot outside, ValueError for misuse.
    """

    def __init__(self, num_slots: int) -> None: ...
    def recover(self, replay: Replay) -> int: ...
    def find(self, key: bytes) -> int | None: ...
    def lookup(self, keys: list[bytes]) -> I64: ...
    def last(self, keys: list[bytes], first: int, end: int, tags: Sequence[int]) -> int: ...
    def epoch(self, slot: int) -> int: ...
    def epochs(self, slots: I64) -> I64: ...
    def state(self, slot: int) -> int: ...
    def key(self, slot: int) -> bytes:
        """Key of the block in a ready slot."""

    def usage(self, first: int, n: int) -> tuple[int, int, int, int]:
        """Numbers of slots of a range that are ready, masked, pinned, and free or evictable."""

    def order(self) -> I64: ...
    def free_slots(self) -> I64: ...
    def allocate(self, n: int) -> tuple[I64, I64, I64]:
        """Slots taken; slots and epochs of what the journal must be told is gone."""

    def touch(self, slots: I64) -> None: ...
    def retain(self, slots: I64, until: int, most: int) -> None: ...
    def expire(self, now: int) -> None: ...
    def pin(self, slots: I64) -> None: ...
    def unpin(self, slots: I64) -> None: ...
    def publish(self, slot: int, key: bytes) -> bool: ...
    def durable(self, slots: I64) -> tuple[I64, I64, list[bytes], I64]:
        """Slots, epochs and keys that the journal must be told of before :meth:`retire` of the last
        ones, masked slots that have one of these keys."""

    def replace(self, old: I64, new: I64) -> tuple[list[bool], I64, I64, I64, list[bytes]]:
        """Flags of pairs that have moved; old slots of those that are journalled; slots, epochs and
        keys that the journal must be told of before :meth:`retire`."""

    def retire(self, slots: I64) -> tuple[I64, I64]:
        """Slots and epochs of what the journal must be told is gone."""

    def drop(self, slots: I64) -> tuple[I64, I64]:
        """Slots and epochs of what the journal must be told is gone."""

    def quarantine(self, slots: I64) -> tuple[int, I64, I64]:
        """Number of slots dropped; then as :meth:`drop`."""

    def mask(self, slots: I64) -> tuple[int, int]:
        """Numbers of slots masked, and of slots dropped, whose data is not durable."""

    def unmask(self, slots: I64) -> int:
        """Number of slots that are found again."""

    def restore(self, slots: I64) -> None: ...
    def defer(self, mask: NDArray[np.bool_]) -> None: ...
    def set_last_epoch(self, epoch: int) -> None: ...
    def begin_walk(self) -> None: ...
    def walk(self, first_sequence: int, budget: int = 16384) -> tuple[bytes, bool]:
        """As ``LiveRecords.walk``; 16 of the budget are one slot of
        the eviction order, one is one of the slots that may come by number."""

    @property
    def obtainable(self) -> int: ...
    @property
    def free(self) -> int:
        """Free slots that are not deferred."""

    @property
    def deferred(self) -> int:
        """Free slots that are deferred."""

    @property
    def evictable(self) -> int: ...
    @property
    def ready(self) -> int: ...
    @property
    def journalled(self) -> int: ...
    @property
    def writing(self) -> int: ...
    @property
    def pinned(self) -> int: ...
    @property
    def lost(self) -> int: ...
    @property
    def masked(self) -> int: ...
    @property
    def retained(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def counts(self) -> dict[str, int]: ...
