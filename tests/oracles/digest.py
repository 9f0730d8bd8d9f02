"""The digest of memory, word by word as ``csrc/io/slot/digest.hpp`` defines it."""

from __future__ import annotations

MASK = (1 << 64) - 1


def digest_of(data: bytes) -> int:
    """Digest of these bytes."""
    total = 0
    for number, begin in enumerate(range(0, len(data), 8), 1):
        word = int.from_bytes(data[begin : begin + 8], "little")
        mixed = (word ^ number * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & MASK
        mixed = (mixed ^ mixed >> 32) * 0x94D049BB133111EB & MASK
        total += mixed ^ mixed >> 29
    return total & MASK
