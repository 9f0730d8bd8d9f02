"""Changes of bytes for tests that fuzz."""

from __future__ import annotations

import random

INTERESTING = (0, 1, 2, 127, 255, 4096, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def mutated(data: bytes, source: random.Random, other: bytes) -> bytes:
    """Up to four changes of a few bytes, or of the length."""
    out = bytearray(data)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(out) + 1)
        size = source.choice((1, 1, 2, 4, 8, 8, 32, 200))
        match source.randrange(8):
            case 0 | 1 if out:
                out[at % len(out)] ^= 1 << source.randrange(8)
            case 2:
                out[at : at + size] = source.randbytes(len(out[at : at + size]))
            case 3:
                value = source.choice(INTERESTING).to_bytes(8, "little")[: min(size, 8)]
                at -= at % min(size, 8)
                out[at : at + len(value)] = value[: len(out) - at]
            case 4:
                out[at : at + size] = bytes(len(out[at : at + size]))
            case 5:
                begin = source.randrange(len(other) + 1)
                piece = other[begin : begin + size]
                out[at : at + len(piece)] = piece[: len(out) - at]
            case 6 if source.random() < 0.3:
                out[at:at] = source.randbytes(size)
            case 7 if source.random() < 0.3:
                del out[at : at + size]
    return bytes(out)
