"""Permission for AMX tiles: asked for where there are some, by the calls that Linux documents."""

from __future__ import annotations

import ctypes
import errno
import logging
import platform
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from tests.messages import entry_for
from vllm_ssdkv.connector.amx import Amx, request_amx
from vllm_ssdkv.metrics import Counters

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
    assert entry_for(message), "docs/operations.md has its cure"


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.splitlines()[-1]


def test_this_machine_grants_what_torch_finds_too() -> None:
    """The real calls, in processes that nobody has asked for before."""
    found = run(
        "from vllm_ssdkv.connector.amx import request_amx;"
        "from vllm_ssdkv.metrics import Counters;"
        "print(request_amx(Counters()))"
    )
    by_torch = run("import torch; print(torch.cpu._init_amx())")
    assert found == (Amx.PERMITTED if by_torch == "True" else Amx.ABSENT)
