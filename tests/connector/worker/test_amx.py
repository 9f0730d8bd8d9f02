"""Permission for AMX tiles: asked for where there are some, by the calls that Linux documents."""

from __future__ import annotations

import ctypes
import errno
import logging
import platform
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.cli.explain.catalog import entry_for
from vllm_ssdkv.connector.worker.amx import Amx, request_amx

MACHINE = platform.machine()
SUPPORTED, PERMITTED, REQUEST = 0x1021, 0x1022, 0x1023
TILE_DATA = 1 << 18


@dataclass
class Kernel:
    """Answers ``arch_prctl`` as Linux does for a processor with or without tiles."""

    supported: int = TILE_DATA
    permitted: int = 0
    refuses: int = 0
    knows_the_calls: bool = True
    asked: list[int] = field(default_factory=list)

    def __call__(self, code: int, argument: object) -> int:
        if not self.knows_the_calls:
            return errno.EINVAL
        self.asked.append(code)
        if code == REQUEST:
            assert getattr(argument, "value", None) == 18
            if not self.refuses:
                self.permitted |= TILE_DATA
            return self.refuses
        mask = {SUPPORTED: self.supported, PERMITTED: self.permitted}[code]
        ctypes.cast(argument, ctypes.POINTER(ctypes.c_uint64))[0] = mask  # type: ignore[arg-type]  # a reference
        return 0


@pytest.fixture(autouse=True)
def x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


def refusals(counters: Counters) -> float:
    return counters.total("amx_refusals")


def test_a_process_asks_once() -> None:
    kernel, counters = Kernel(), Counters()
    assert request_amx(counters, kernel) is Amx.PERMITTED
    assert kernel.asked == [SUPPORTED, PERMITTED, REQUEST, PERMITTED]
    kernel.asked.clear()
    assert request_amx(counters, kernel) is Amx.PERMITTED
    assert REQUEST not in kernel.asked
    assert refusals(counters) == 0


@pytest.mark.parametrize("kernel", [Kernel(supported=0xE7), Kernel(knows_the_calls=False)])
def test_where_there_are_no_tiles_nobody_asks(kernel: Kernel) -> None:
    counters = Counters()
    assert request_amx(counters, kernel) is Amx.ABSENT
    assert REQUEST not in kernel.asked
    assert refusals(counters) == 0


def test_another_processor_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    kernel = Kernel()
    assert request_amx(Counters(), kernel) is Amx.ABSENT
    assert kernel.asked == []


def test_a_refusal_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    with caplog.at_level(logging.WARNING):
        assert request_amx(counters, Kernel(refuses=errno.EPERM)) is Amx.REFUSED
    assert refusals(counters) == 1
    (message,) = caplog.messages
    assert "Operation not permitted" in message
    assert entry_for(message), "the catalog has its cure"


ASKS = """
from vllm_ssdkv.connector.worker.amx import request_amx
from vllm_ssdkv.base.metrics import Counters
print(request_amx(Counters()))
"""

USES_A_TILE = """
import ctypes, mmap
code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("c4e2784907" "c4e27b49c0" "c4e27849c0" "c3"))
palette, bytes_of_row, rows = 0, 16, 48
tiles = bytearray(64)
tiles[palette], tiles[bytes_of_row], tiles[rows] = 1, 64, 16
address = lambda buffer: ctypes.addressof(ctypes.c_char.from_buffer(buffer))
ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address(code))(address(tiles))
"""
"""``ldtilecfg [rdi]; tilezero tmm0; tilerelease; ret``."""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """In a process that nobody has asked in before."""
    return subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_this_machine_grants_what_torch_finds_too() -> None:
    """By the real calls."""
    (found,) = run(ASKS).stdout.splitlines()[-1:]
    (by_torch,) = run("import torch; print(torch.cpu._init_amx())").stdout.splitlines()
    assert found == (Amx.PERMITTED if by_torch == "True" else Amx.ABSENT)


@pytest.mark.skipif(MACHINE != "x86_64", reason="the program is made of x86-64 instructions")
def test_tiles_work_once_asked_for() -> None:
    """A process that uses one is ended by a signal, but for one that has asked and was told yes."""
    assert run(USES_A_TILE).returncode == -signal.SIGILL
    done = run(ASKS + USES_A_TILE)
    permitted = done.stdout.splitlines()[-1:] == [Amx.PERMITTED]
    assert permitted == ("amx_tile" in Path("/proc/cpuinfo").read_text().split())
    assert done.returncode == (0 if permitted else -signal.SIGILL)
