"""CUDA shared libraries as bytes: device code of other architectures blanked, and symbols.

The section ``.nv_fatbin`` of such a library holds containers, each a header and a list of entries.
The driver chooses an entry by the headers, so an entry that it never chooses may hold zeros, which
compress to nothing. No offset, size or header changes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from vllm_ssdkv.base.errors import BenchError

CONTAINER: Final = 0xBA55ED50
"""First word of a container."""

MACHINE_CODE: Final = 2
"""Kind of an entry that needs no compiler; entries of kind 1 hold PTX."""

_ELF: Final = b"\x7fELF\x02\x01"
"""Start of a 64-bit ELF file in the byte order of x86-64 and Arm."""

_SYMBOL_BYTES: Final = 24
_GLOBAL: Final = 1
"""Binding of a symbol that has to be found; a weak one need not be."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Device code of one architecture in a container.

    Attributes:
        kind: PTX or machine code.
        architecture: Compute capability times ten: 90 for ``sm_90`` and ``sm_90a``.
        begin, end: Place of its payload in the file.
    """

    kind: int
    architecture: int
    begin: int
    end: int


def blank_others(library: bytes, architecture: int) -> bytes:
    """The library with zeros for all device code but the machine code of ``architecture``.

    Raises ``BenchError`` if it is no such library, or has no machine code of ``architecture``.
    """
    kept, blanked = 0, bytearray(library)
    for entry in entries(library):
        if (entry.kind, entry.architecture) == (MACHINE_CODE, architecture):
            kept += 1
        else:
            blanked[entry.begin : entry.end] = bytes(entry.end - entry.begin)
    if not kept:
        raise BenchError(f"no machine code for sm_{architecture}")
    return bytes(blanked)


def entries(library: bytes) -> Iterator[Entry]:
    """All device code of a library, in its order."""
    at, size = _section(library, ".nv_fatbin")
    end = at + size
    while at < end:
        magic, _, header, payload = struct.unpack_from("<IHHQ", library, at)
        if magic != CONTAINER:
            at += 8  # padding between containers
            continue
        entry, last = at + header, at + header + payload
        while entry < last:
            kind, _, head, length = struct.unpack_from("<HHIQ", library, entry)
            (architecture,) = struct.unpack_from("<I", library, entry + 28)
            begin = entry + head
            entry = begin + length
            if not head or entry > last:
                raise BenchError(f"the container at byte {at} has an entry that ends outside it")
            yield Entry(kind, architecture, begin, entry)
        at = (last + 7) // 8 * 8


def needed_symbols(library: bytes) -> list[str]:
    """Sorted names that have to be found in other libraries when this one is loaded."""
    at, size = _section(library, ".dynsym")
    names, _ = _section(library, ".dynstr")
    found = []
    for symbol in range(at, at + size, _SYMBOL_BYTES):
        name, information, _, section = struct.unpack_from("<IBBH", library, symbol)
        if name and section == 0 and information >> 4 == _GLOBAL:
            found.append(_text(library, names + name))
    return sorted(found)


def _section(library: bytes, wanted: str) -> tuple[int, int]:
    """Place and size of a section."""
    if not library.startswith(_ELF):
        raise BenchError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    (text,) = struct.unpack_from("<Q", library, table + names * size + 0x18)
    for header in range(table, table + count * size, size):
        (name,) = struct.unpack_from("<I", library, header)
        if _text(library, text + name) == wanted:
            at, length = struct.unpack_from("<QQ", library, header + 0x18)
            return at, length
    raise BenchError(f"no section {wanted}")


def _text(library: bytes, at: int) -> str:
    return library[at : library.index(b"\0", at)].decode()
