"""Getting the key of an encrypted store from where the options say. Never shows what it read."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import selectors
import signal
import stat
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.encryption import EncryptionConfig
from vllm_ssdkv.store.integrity.store_key import KEY_BYTES, StoreKey

COMMAND_DEADLINE_S: Final = 30.0

_MOST_BYTES: Final = 4096
"""More than any spelling of a key."""

_WANTED: Final = (
    f"a key is {KEY_BYTES} random bytes: as they are, as {2 * KEY_BYTES} hexadecimal digits, or in "
    "base64. `openssl rand -hex 32` makes one"
)


def read_key(config: EncryptionConfig) -> StoreKey:
    """The key. Blocks: on the file, or on the command for at most its deadline.

    Raises:
        ConfigError: there is none, or it is not a key; names the option and the way out.
    """
    if config.key_file is not None:
        return _parse(f"encryption.key_file {config.key_file}", _from_file(Path(config.key_file)))
    if config.key_env is not None:
        return _parse(f"encryption.key_env {config.key_env}", _from_environment(config.key_env))
    command = config.key_command or ()
    return _parse(f"encryption.key_command {command[0]}", from_command(command))


def _parse(source: str, data: bytes) -> StoreKey:
    """Raises ConfigError; says how long the data are, never what they are."""
    if len(data) == KEY_BYTES and not all(32 <= byte < 127 for byte in data):
        return StoreKey(data)
    # A raw key is almost never printable. A password is, and so are half as many hex digits.
    text = data.strip()
    for decode in (binascii.unhexlify, _base64):
        with contextlib.suppress(ValueError):
            secret = decode(text)
            if len(secret) == KEY_BYTES:
                return StoreKey(secret)
    raise ConfigError(f"{source}: {len(data)} bytes that are no key; {_WANTED}")


def _base64(text: bytes) -> bytes:
    standard = text.replace(b"-", b"+").replace(b"_", b"/").rstrip(b"=")
    return base64.b64decode(standard + b"=" * (-len(standard) % 4), validate=True)


def _from_file(path: Path) -> bytes:
    where = f"encryption.key_file {path}"
    try:
        # Not blocking: a pipe of that name must not hold up the start.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{where}: not a regular file")
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077:
            raise ConfigError(f"{where}: mode {mode:04o} lets others at the key: chmod 600 {path}")
        return os.read(fd, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from error
    finally:
        os.close(fd)


def _from_environment(name: str) -> bytes:
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(
            f"encryption.key_env: the environment variable {name} is not set or empty, in a "
            "process of the engine; set it before vLLM starts"
        )
    return os.fsencode(value)


def from_command(command: Sequence[str], deadline_s: float = COMMAND_DEADLINE_S) -> bytes:
    """Read the key that a command writes to its standard output. Its standard error stays the
    engine's.

    Raises:
        ConfigError: it cannot be run, fails, writes too much, or does not end in time.
    """
    where = f"encryption.key_command {command[0]}"
    try:
        # A session of its own, so that whatever it starts can be ended with it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from error
    end = time.monotonic() + deadline_s
    with process:  # closes its output
        try:
            data = _read_until(process.stdout, end)
            code = process.wait(max(0.0, end - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)  # it was not waited for: the id is still its own
            raise ConfigError(f"{where}: did not end within {deadline_s:g} s") from None
    if code:
        raise ConfigError(f"{where}: ended with status {code}; its messages are above")
    return data


def _read_until(output: IO[bytes] | None, end: float) -> bytes:
    """Read to the end, or as much as a key can have. Raises TimeoutError."""
    data = b""
    if output is None:
        return data
    fd = output.fileno()
    with selectors.DefaultSelector() as ready:
        ready.register(fd, selectors.EVENT_READ)
        while len(data) < _MOST_BYTES:
            if not ready.select(max(0.0, end - time.monotonic())):
                raise TimeoutError
            piece = os.read(fd, _MOST_BYTES - len(data))
            if not piece:
                break
            data += piece
    return data
