"""Sources of the key: a file, the environment, a command; and those that are refused."""

from __future__ import annotations

import base64
import os
import sys
import time
import traceback
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.encryption import EncryptionConfig
from vllm_ssdkv.store.integrity import key_source
from vllm_ssdkv.store.integrity.key_source import from_command, read_key
from vllm_ssdkv.store.integrity.store_key import StoreKey

SECRET = bytes(range(190, 222))
WANTED = StoreKey(SECRET).key_id
SPELLINGS = [
    SECRET.hex().encode(),
    SECRET.hex().upper().encode() + b"\n",
    base64.b64encode(SECRET),
    b" " + base64.b64encode(SECRET) + b"\r\n",
    base64.b64encode(SECRET).rstrip(b"="),
    base64.urlsafe_b64encode(SECRET),
]


def key_file(path: Path, data: bytes, mode: int = 0o600) -> EncryptionConfig:
    path.write_bytes(data)
    path.chmod(mode)
    return EncryptionConfig(key_file=str(path))


def refused(config: EncryptionConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        read_key(config)
    return str(caught.value)


@pytest.mark.parametrize("data", [SECRET, *SPELLINGS])
@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_file(tmp_path: Path, data: bytes, mode: int) -> None:
    assert read_key(key_file(tmp_path / "key", data, mode)).key_id == WANTED


@pytest.mark.parametrize("data", SPELLINGS)
def test_an_environment_variable(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setenv("SSDKV_TEST_KEY", data.decode())
    assert read_key(EncryptionConfig(key_env="SSDKV_TEST_KEY")).key_id == WANTED


@pytest.mark.parametrize("data", [SECRET, *SPELLINGS])
def test_a_command(data: bytes) -> None:
    script = f"import sys; sys.stdout.buffer.write({data!r})"
    config = EncryptionConfig(key_command=(sys.executable, "-c", script))
    assert read_key(config).key_id == WANTED


def test_a_link_to_a_file(tmp_path: Path) -> None:
    """As container platforms mount secrets."""
    key_file(tmp_path / "real", SECRET)
    (tmp_path / "key").symlink_to("real")
    assert read_key(EncryptionConfig(key_file=str(tmp_path / "key"))).key_id == WANTED


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o666])
def test_a_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    text = refused(key_file(path, SECRET, mode))
    assert f"mode {mode:04o} lets others at the key: chmod 600 {path}" in text


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, why in (("none", "No such file"), ("pipe", "not a regular"), ("", "not a regular")):
        path = tmp_path / name
        text = refused(EncryptionConfig(key_file=str(path)))
        assert text.startswith(f"encryption.key_file {path}: {why}")


def test_a_variable_that_is_not_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, ""):
        monkeypatch.delenv("SSDKV_TEST_KEY", raising=False)
        if value is not None:
            monkeypatch.setenv("SSDKV_TEST_KEY", value)
        assert "SSDKV_TEST_KEY is not set or empty" in refused(
            EncryptionConfig(key_env="SSDKV_TEST_KEY")
        )


@given(
    st.one_of(
        st.binary(max_size=80),
        st.text("0123456789abcdef", min_size=8, max_size=80).map(str.encode),
        st.text(st.characters(codec="ascii"), min_size=32, max_size=32).map(str.encode),
    )
)
def test_what_is_no_key_is_refused_and_not_shown(data: bytes) -> None:
    text = ""
    try:
        key_source._parse("there", data)
    except ConfigError as error:
        text = "".join(traceback.format_exception(error, limit=0))
    if text:
        assert f"there: {len(data)} bytes that are no key; a key is 32 random bytes" in text
        assume(len(data) >= 8)
        assert repr(data)[2:-1] not in text
        assert data.hex() not in text
    else:
        assert len(data) >= 32
        assert len(data) != 32 or not data.isascii() or not data.decode().isprintable()


@pytest.mark.parametrize("data", [b"correct horse battery staple ...", b"a" * 32, b"0" * 32])
def test_a_password_is_no_key(tmp_path: Path, data: bytes) -> None:
    assert len(data) == 32
    text = refused(key_file(tmp_path / "key", data))
    assert "openssl rand -hex 32" in text
    assert data.decode() not in text


# ---- commands ----


def test_a_command_that_cannot_be_run_is_named() -> None:
    text = refused(EncryptionConfig(key_command=("/no/such/program", "x")))
    assert text == "encryption.key_command /no/such/program: No such file or directory"


def test_a_command_that_fails_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    script = f"import sys; print({SECRET.hex()!r}); print('sealed', file=sys.stderr); sys.exit(3)"
    text = refused(EncryptionConfig(key_command=(sys.executable, "-c", script)))
    assert text.endswith("ended with status 3; its messages are above")
    assert SECRET.hex() not in text
    assert capfd.readouterr().err == "sealed\n"


def test_a_command_gets_no_input() -> None:
    assert (
        from_command([sys.executable, "-c", "import sys; print(len(sys.stdin.read()))"]) == b"0\n"
    )


@pytest.mark.parametrize(
    "command",
    [
        "sleep 60",
        "echo 00; sleep 60",
        "exec >&-; sleep 60",  # closes its output and goes on
        "sleep 60 & echo 00",  # leaves a child that holds the output
        "yes",
    ],
)
def test_a_command_that_does_not_end_costs_its_deadline(command: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=r"sh: did not end within 0\.3 s"):
        from_command(["/bin/sh", "-c", command], deadline_s=0.3)
    assert time.monotonic() - begin < 20
