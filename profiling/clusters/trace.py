"""Traces: queries and keys that a real engine computed, in files with a checked manifest.

A directory holds ``manifest.json`` and an ``.npz`` file per document. The manifest names the size
and checksum of each finished file, so what an interrupted recording left is told from a whole one.
"""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.checksum import NO_DIGITS, check_seal, checksum_bytes, sealed
from vllm_ssdkv.base.durable_file import read_regular, replace_file
from vllm_ssdkv.base.errors import BenchError

PAGE: Final = 16
"""Tokens of a page."""
WINDOW: Final = 256
"""Newest tokens, which every query attends to."""
VERSION: Final = 1
MANIFEST: Final = "manifest.json"

F32: TypeAlias = NDArray[np.float32]
I64: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Part:
    """A finished file: a document's trace.

    Attributes:
        file: Name in the directory.
        checksum: xxh3-64 of the file, hexadecimal.
    """

    file: str
    nbytes: int
    checksum: str


@dataclass(slots=True)
class Manifest:
    """Contents of a directory of traces.

    Attributes:
        settings: What was recorded, by the name of each option. Another recording into the same
            directory must have the same.
        parts: Finished files by the document's name.
    """

    settings: dict[str, Any]
    parts: dict[str, Part] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """The manifest of a directory; None: there is none.

        Raises:
            BenchError: it is damaged, or of another version.
        """
        path = directory / MANIFEST
        try:
            data = read_regular(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BenchError(f"{path} cannot be read: {error.strerror}") from error
        try:
            check_seal(data)
            fields = json.loads(data)
            version = fields["version"]
            parts = {name: Part(**part) for name, part in fields["parts"].items()}
            settings = dict(fields["settings"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BenchError(
                f"{path} is damaged ({error}): record into another directory"
            ) from error
        if version != VERSION:
            raise BenchError(f"{path} is of version {version}, not {VERSION}: record again")
        return cls(settings, parts)

    def write(self, directory: Path) -> None:
        """Replace the directory's manifest; blocks until it is durable."""
        fields = {
            "version": VERSION,
            "settings": self.settings,
            "parts": {name: asdict(part) for name, part in self.parts.items()},
            "checksum": NO_DIGITS,
        }
        replace_file(directory / MANIFEST, sealed(json.dumps(fields, indent=1).encode()))


@dataclass(frozen=True, slots=True)
class Trace:
    """Queries and keys of one document, some layers of a model. Immutable, any thread.

    Attributes:
        query: Of the last N tokens, float16 [layers, query heads, N, size], RoPE applied.
        key: Of all S tokens, float16 [layers, KV heads, S, size].
        layers: Numbers of the recorded layers in the model.
        context: Tokens that are counted, whole pages: what neither window nor turns hold.
        decode: First of the N queries that a decode step made; those before are the prompt's.
        scale: Of logits.
    """

    name: str
    query: NDArray[np.float16]
    key: NDArray[np.float16]
    layers: I64
    context: int
    decode: int
    scale: float

    def __post_init__(self) -> None:
        """Check shapes. Raises ValueError."""
        layers, heads, count, size = self.query.shape
        kept, kv_heads, tokens, key_size = self.key.shape
        if (kept, key_size) != (layers, size) or heads % kv_heads or len(self.layers) != layers:
            raise ValueError(f"queries {self.query.shape} do not go with keys {self.key.shape}")
        if not 0 <= self.decode < count <= tokens:
            raise ValueError(f"{count} queries, decode from {self.decode}, {tokens} tokens")
        if not 2 * PAGE <= self.context <= tokens or self.context % PAGE:
            raise ValueError(f"a context of {self.context} of {tokens} tokens")

    @property
    def pages(self) -> int:
        """Pages of the context."""
        return self.context // PAGE

    @property
    def kv_heads(self) -> int:
        """KV heads of a layer."""
        return int(self.key.shape[1])

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return int(self.query.shape[1] // self.key.shape[1])

    @property
    def position(self) -> I64:
        """Position of each query, int64 [N]."""
        count = self.query.shape[2]
        return np.arange(self.key.shape[2] - count, self.key.shape[2])

    @property
    def decode_steps(self) -> I64:
        """Numbers of the decode steps' queries."""
        return np.arange(self.decode, self.query.shape[2])

    @property
    def profile_steps(self) -> I64:
        """Numbers of the prompt's queries."""
        return np.arange(self.decode)

    def heads(self, most: int | None = None) -> list[tuple[int, int]]:
        """Recorded layer and KV head, from layers spread evenly; ``most``: so many at most."""
        every = [(i, h) for i in range(len(self.layers)) for h in range(self.kv_heads)]
        if most is None or len(every) <= most:
            return every
        return [every[i] for i in np.linspace(0, len(every) - 1, most).round().astype(int).tolist()]

    def adjacent_heads(self, most: int) -> list[tuple[int, int]]:
        """So many at most, of neighbouring layers in the middle: they stand for one layer."""
        every = self.heads()
        first = max(0, (len(every) - most) // 2) // self.kv_heads * self.kv_heads
        return every[first : first + most]

    def keys(self, layer: int, head: int) -> F32:
        """Keys of the context, float32 [context, size]."""
        return self.key[layer, head, : self.context].astype(np.float32)

    def queries(self, layer: int, head: int, steps: I64) -> F32:
        """Queries of a KV head's group, float32 [group, steps, size]."""
        mine = slice(head * self.group, (head + 1) * self.group)
        return self.query[layer, mine][:, steps].astype(np.float32)

    def weights(self, layer: int, head: int, steps: I64) -> F32:
        """Softmax over all tokens that a query sees, mean of the group, float32 [steps, S]."""
        keys = self.key[layer, head].astype(np.float32)
        logits = self.queries(layer, head, steps) @ keys.T * np.float32(self.scale)
        logits[:, np.arange(len(keys))[None] > self.position[steps][:, None]] = -np.inf
        logits -= logits.max(-1, keepdims=True)
        np.exp(logits, out=logits)
        logits /= logits.sum(-1, keepdims=True)
        mean: F32 = logits.mean(0, dtype=np.float32)
        return mean

    def mass(self, layer: int, head: int, steps: I64) -> F32:
        """Share of the attention that each token of the context has, float32 [steps, context].

        The first page and each query's own window count as 0.
        """
        mass = self.weights(layer, head, steps)[:, : self.context]
        window = self.position[steps][:, None] - WINDOW
        mass[np.arange(self.context)[None] > window] = 0
        mass[:, :PAGE] = 0
        return mass

    def shortened(self, context: int) -> Trace:
        """The same queries over the first ``context`` tokens alone, whole pages of them."""
        tokens = np.r_[0:context, self.context : self.key.shape[2]]
        return Trace(
            f"{self.name} {context}",
            self.query,
            self.key[:, :, tokens],
            self.layers,
            context,
            self.decode,
            self.scale,
        )

    def write(self, directory: Path) -> Part:
        """Write the file of this trace; blocks."""
        path = directory / f"{self.name}.npz"
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("wb") as file:
            np.savez(
                file,
                query=self.query,
                key=self.key,
                layers=self.layers,
                context=self.context,
                decode=self.decode,
                scale=self.scale,
            )
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        return Part(path.name, path.stat().st_size, _checksum(path))


def pages_of(tokens: F32) -> F32:
    """Sum of each page's tokens, [..., tokens] to [..., pages]."""
    paged: F32 = tokens.reshape(*tokens.shape[:-1], -1, PAGE).sum(-1)
    return paged


def top(scores: NDArray[np.floating], count: int) -> Bools:
    """Mask of the ``count`` largest of each row; equal ones by number."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    mask = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(mask, order, True, axis=-1)
    return mask


def budget_pages(share: float, pages: int) -> int:
    """Pages that a budget has, of a context's pages without the first."""
    return max(1, round(share * (pages - 1)))


def active(mass: F32, share: float = 0.1) -> Bools:
    """Pages that a step activates: those with most of its mass, [steps, pages]."""
    return top(mass, budget_pages(share, mass.shape[-1])) & (mass > 0)


def read_traces(directory: Path) -> tuple[Manifest, list[Trace]]:
    """All finished traces of a directory, by the order of their recording.

    Raises:
        BenchError: there are none, or a file is not what the manifest says.
    """
    manifest = Manifest.read(directory)
    if manifest is None or not manifest.parts:
        raise BenchError(f"{directory} has no traces: record some with `ssdkv lab profile`")
    return manifest, [read_trace(directory, name, part) for name, part in manifest.parts.items()]


def read_trace(directory: Path, name: str, part: Part) -> Trace:
    """One finished trace.

    Raises:
        BenchError: the file is not what the manifest says.
    """
    path = directory / part.file
    if problem := part_problem(directory, part):
        raise BenchError(f"{problem}: remove it, and record again with `ssdkv lab profile`")
    try:
        with np.load(path, allow_pickle=False) as held:
            return Trace(
                name,
                held["query"],
                held["key"],
                held["layers"],
                int(held["context"]),
                int(held["decode"]),
                float(held["scale"]),
            )
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise BenchError(f"{path} is no trace: {error}") from error


def part_problem(directory: Path, part: Part) -> str:
    """Reason for a finished file not to be what the manifest says; empty if it is."""
    path = directory / part.file
    try:
        if path.stat().st_size != part.nbytes:
            return f"{path} has {path.stat().st_size} bytes, not {part.nbytes}"
        if _checksum(path) != part.checksum:
            return f"{path} has another checksum than the manifest"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return ""


def _checksum(path: Path) -> str:
    return f"{checksum_bytes(path.read_bytes()):016x}"
