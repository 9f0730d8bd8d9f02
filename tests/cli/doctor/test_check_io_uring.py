"""Findings about io_uring, each case by its cause."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from tests.kit.waiting import until
from vllm_ssdkv import _io
from vllm_ssdkv.base.host import lockable_memory
from vllm_ssdkv.base.sizes import GIB, MIB
from vllm_ssdkv.cli.doctor import check_io_uring
from vllm_ssdkv.cli.doctor.check_result import Level


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (errno.ENOSYS, "Linux 5.13"),
        (errno.EPERM, "io_uring_disabled"),
        (errno.ENOMEM, "ulimit -l"),
        (errno.EINVAL, "Linux 5.13"),
    ],
)
def test_a_kernel_without_it_is_a_warning_with_a_cure(error: int, cure: str) -> None:
    finding = check_io_uring.kernel(error)
    assert finding.level is Level.WARN
    assert "threads engine serves" in finding.text
    assert cure in finding.cure


def test_a_build_without_it_is_a_warning_with_a_cure() -> None:
    assert check_io_uring.build(True).level is Level.OK
    finding = check_io_uring.build(False)
    assert finding.level is Level.WARN
    assert "liburing-dev" in finding.cure


def test_locked_memory() -> None:
    assert check_io_uring.memlock(None, 4 * GIB).level is Level.OK
    assert check_io_uring.memlock(8 * GIB, 4 * GIB).text == "up to 8 GiB"
    finding = check_io_uring.memlock(8 * MIB, 4 * GIB)
    assert finding.level is Level.WARN
    assert "8 MiB, less than buffers of 4 GiB" in finding.text
    assert "LimitMEMLOCK" in finding.cure


def test_the_limit_on_locked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [8 * MIB, 16 * MIB]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    status = tmp_path / "status"
    for mask, expected in (("0000000000004000", None), ("ffffffffffffbfff", 8 * MIB)):
        status.write_text(f"Name:\tx\nCapEff:\t{mask}\n")
        assert lockable_memory(status) == expected
    assert lockable_memory(tmp_path / "none") == 8 * MIB
    limits[0] = resource.RLIM_INFINITY
    assert lockable_memory(status) is None


def test_probes_leave_no_descriptor_and_thread_behind() -> None:
    def open_now() -> set[str]:
        return {
            f"{what} {name}" for what in ("fd", "task") for name in os.listdir(f"/proc/self/{what}")
        }

    before = open_now()
    found = {finding.subject: finding for finding in check_io_uring.io_uring()}
    until(lambda: not open_now() - before)
    usable = check_io_uring.io_uring_errno() == 0
    assert (found["io_uring"].level is Level.OK) == usable
    assert (found["io_uring engine"].level is Level.OK) == _io.has_uring
    if usable and _io.has_uring:
        assert "TASKRUN" in found["io_uring ring"].text or "default" in found["io_uring ring"].text
        assert "locked memory" in found
