"""Frequencies of keys lately, in little memory: a count-min sketch that ages.

After TinyLFU (Einziger, Friedman, Manes, 2017): counters are halved after so many additions, so
that what was popular once is forgotten, and the estimate is never below the truth of what was
seen since, as long as counters do not saturate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.format.slot_header import KEY_BYTES

ROWS = 4
COUNTERS_PER_KEY = 8
"""Counters per expected key. After twice as many additions as expected keys, when counters are
halved, a key that was never seen is taken for one seen twice in (1 - 2/e)^4 = 0.5 % of all cases.
"""
MOST = 255


class FrequencySketch:
    """Counts keys of 32 bytes. Single-threaded; one byte per counter, allocated at once."""

    def __init__(self, keys: int):
        """``keys``: how many keys it shall tell apart, such as the slots of the store."""
        self._columns = 1 << max(6, (COUNTERS_PER_KEY * keys // ROWS - 1).bit_length())
        self._table = np.zeros((ROWS, self._columns), dtype=np.uint8)
        self._sample = self._columns
        self._additions = 0

    @property
    def nbytes(self) -> int:
        """Memory of the counters."""
        return self._table.nbytes

    def _places(self, keys: Sequence[bytes]) -> NDArray[np.intp]:
        """Flat places of the counters of each key, [n, ROWS]: keys are hashes already."""
        words = np.frombuffer(b"".join(keys), dtype="<u8").reshape(len(keys), KEY_BYTES // 8)
        columns = (words & np.uint64(self._columns - 1)).astype(np.intp)
        return columns + np.arange(ROWS, dtype=np.intp) * self._columns

    def count(self, keys: Sequence[bytes]) -> NDArray[np.uint8]:
        """Frequency of each key, [n]; now and then more, never less."""
        if not keys:
            return np.zeros(0, dtype=np.uint8)
        least: NDArray[np.uint8] = self._table.ravel()[self._places(keys)].min(axis=1)
        return least

    def add(self, keys: Sequence[bytes]) -> None:
        """These distinct keys were seen once more."""
        if not keys:
            return
        flat = self._table.reshape(-1)
        places = self._places(keys)
        seen = flat[places]
        # Only the smallest counters of a key: the others count somebody else as well.
        smallest = (seen == seen.min(axis=1, keepdims=True)) & (seen < MOST)
        flat[np.unique(places[smallest])] += 1
        self._additions += len(keys)
        if self._additions >= self._sample:
            self._table >>= 1
            self._additions //= 2
