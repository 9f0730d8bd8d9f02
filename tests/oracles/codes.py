"""Meaning of codes of K (``docs/format.md``), in float64, one key at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

LEVELS = {
    1: (0.7978846,),
    2: (0.4527800, 1.5104176),
    4: (0.1283950, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7326356),
}
"""Levels above 0, by bits."""

_MASK = (1 << 64) - 1


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def signs(turn: int, size: int) -> F64:
    """The signs of a round."""
    return np.array([-1.0 if _splitmix64(256 * turn + d) >> 63 else 1.0 for d in range(size)])


def hadamard(size: int) -> F64:
    """Orthogonal, of a power of two."""
    made = np.ones((1, 1))
    while len(made) < size:
        made = np.block([[made, made], [made, -made]])
    return made / np.sqrt(size)


def rotation(size: int, rounds: tuple[F64, ...]) -> F64:
    """The matrix of rounds of signs and Hadamard matrices, in pieces of powers of two."""
    made = np.zeros((size, size))
    begin = 0
    while begin < size:
        piece = 1 << ((size - begin).bit_length() - 1)
        part = slice(begin, begin + piece)
        turned = np.eye(piece)
        for one in rounds:
            turned = hadamard(piece) @ (one[part, None] * turned)
        made[part, part] = turned
        begin += piece
    return made


def turned(size: int) -> F64:
    """The matrix of this format."""
    return rotation(size, (signs(0, size), signs(1, size)))


def quantised(y: F64, bits: int) -> tuple[NDArray[np.int64], F64, F64]:
    """Numbers of the levels of rotated keys [..., size], the levels, and each key's weight."""
    positive = np.array(LEVELS[bits])
    levels = np.concatenate([-positive[::-1], positive])
    norm = np.linalg.norm(y, axis=-1, keepdims=True)
    unit = y * np.sqrt(y.shape[-1]) / np.where(norm > 0, norm, 1)
    number = np.searchsorted((levels[1:] + levels[:-1]) / 2, unit)
    code = levels[number]
    along = (code * y).sum(-1)
    weight = np.where(along != 0, norm[..., 0] ** 2 / np.where(along != 0, along, 1), 0)
    return number, code, weight


@dataclass(frozen=True)
class Record:
    """A record of one head of a block, taken apart."""

    numbers: NDArray[np.int64]
    weights: NDArray[np.float32]
    mean: NDArray[np.float32]

    @classmethod
    def of(cls, data: NDArray[np.uint8], tokens: int, size: int, bits: int) -> Record:
        """From its bytes."""
        tiles, lines = -(-tokens // 16), -(-size * bits // 32) * 4
        codes = data[: tiles * lines * 16].reshape(tiles, lines, 16)
        bytes_of = codes.transpose(0, 2, 1).reshape(tiles * 16, lines)[:tokens].astype(np.int64)
        shift = np.arange(0, 8, bits)
        numbers = (bytes_of[:, :, None] >> shift & ((1 << bits) - 1)).reshape(tokens, -1)[:, :size]
        rest = data[tiles * lines * 16 :]
        halves = rest[: tiles * 32].view(np.uint16)[:tokens].astype(np.uint32) << 16
        step = rest[tiles * 32 + -(-size // 4) * 4 :][:4].view(np.float32)[0]
        whole = rest[tiles * 32 : tiles * 32 + size].view(np.int8)
        return cls(numbers, halves.view(np.float32), whole.astype(np.float32) * step)

    def assert_near(self, other: Record) -> None:
        """Check that two records are of the same keys: numbers that lie on an edge may go either
        way, and take their key's weight along."""
        np.testing.assert_allclose(
            self.mean, other.mean, rtol=0, atol=np.abs(other.mean).max() / 63
        )
        assert (self.numbers == other.numbers).mean() > 0.99
        same = (self.numbers == other.numbers).all(-1)
        np.testing.assert_allclose(self.weights[same], other.weights[same], rtol=2**-6)

    def keys(self, bits: int) -> F64:
        """The keys that it stands for, [tokens, size], rotated back."""
        positive = np.array(LEVELS[bits])
        levels = np.concatenate([-positive[::-1], positive])
        y = self.weights[:, None] * levels[self.numbers] + self.mean
        found: F64 = y @ turned(len(self.mean))
        return found
