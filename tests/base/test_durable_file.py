"""Whole writes and atomic replacement, also when the kernel writes less or fails."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from vllm_ssdkv.base import durable_file
from vllm_ssdkv.base.durable_file import create_temporary, replace_file, write_all


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(durable_file.os, "pwrite", lambda fd, data, at: real(fd, data[:3], at))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    write_all(fd, b"0123456789", 2)
    assert os.pread(fd, 100, 0) == b"\0\x000123456789"
    os.close(fd)


def test_a_write_of_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_file.os, "pwrite", lambda _fd, _data, _at: 0)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match="No space"):
        write_all(fd, b"x", 0)
    os.close(fd)


def test_replacement_is_private_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    (tmp_path / "file.tmp").write_bytes(b"left by a crash")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("step", ["pwrite", "fsync", "rename"])
def test_a_failed_replacement_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(*_args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable_file.os, step, fail)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_temporary_file_does_not_follow_links(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    (tmp_path / "file.tmp").symlink_to(target)
    fd, temporary = create_temporary(tmp_path / "file")
    os.write(fd, b"data")
    os.close(fd)
    assert not temporary.is_symlink()
    assert target.read_bytes() == b"precious"
