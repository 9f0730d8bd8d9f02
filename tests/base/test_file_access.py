"""Access to files: their owner's, and the group's where a directory is shared by one."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_ssdkv.base.durable_file import replace_file
from vllm_ssdkv.base.file_access import create_directory, create_file, why_refused


@pytest.fixture(params=[0o022, 0o077, 0o002], autouse=True, ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """Modes do not follow the umask of whoever starts the engine."""
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("directory", "file", "inner"),
    [
        (0o2775, 0o660, 0o2770),  # a volume with fsGroup
        (0o770, 0o660, 0o2770),
        (0o775, 0o600, 0o700),  # a umask of 002 alone shares nothing
        (0o755, 0o600, 0o700),
        (0o700, 0o600, 0o700),
    ],
    ids=oct,
)
def test_what_is_made_is_as_shared_as_its_directory(
    tmp_path: Path, directory: int, file: int, inner: int
) -> None:
    tmp_path.chmod(directory)
    os.close(create_file(tmp_path / "file", os.O_RDWR))
    create_directory(tmp_path / "inner")
    replace_file(tmp_path / "file", b"new")
    replace_file(tmp_path / "inner" / "file", b"new")
    assert mode(tmp_path / "file") == mode(tmp_path / "inner" / "file") == file
    assert mode(tmp_path / "inner") & 0o2777 == inner


def test_a_refusal_names_both_users_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = tmp_path.stat()
    monkeypatch.setattr(os, "geteuid", lambda: owner.st_uid + 12345)
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    text = why_refused(tmp_path / "missing" / "file", denied)
    for part in (
        "Permission denied",
        f"{tmp_path} belongs to uid {owner.st_uid}",
        f"and gid {owner.st_gid}",
        f"mode {stat.S_IMODE(owner.st_mode):04o}",
        f"this process is uid {owner.st_uid + 12345};",
        "chmod -R g+rwX",
    ):
        assert part in text


def test_an_own_file_has_the_wrong_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    assert why_refused(tmp_path, denied) == f"Permission denied: {tmp_path} has mode 0500"
    tmp_path.chmod(0o700)


def test_other_reasons_are_left_as_they_are(tmp_path: Path) -> None:
    error = OSError(errno.EROFS, os.strerror(errno.EROFS))
    assert why_refused(tmp_path, error) == os.strerror(errno.EROFS)
