"""The answers of a batch of files so far: appended as they come, found again by the next run."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from vllm_ssdkv.base.durable_file import create_temporary, sync_directory, write_all
from vllm_ssdkv.base.errors import BatchError
from vllm_ssdkv.base.sizes import MIB


class _Line(msgspec.Struct, omit_defaults=True):
    """An answer, or a mark: a request was begun, or was put back and may be begun again."""

    custom_id: str | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")
    begun: str | None = None
    put_back: str | None = None


class PartialOutput:
    """``OUT.<digest>.part`` next to the output file; the digest names input and model.

    It also has a mark of each request that was begun, so that one of which the engine dies is
    known. A kill loses no whole line. A line that is torn, and what follows it, is dropped by the
    next run. One process at a time. Every method blocks on I/O.
    """

    def __init__(self, input_file: Path, output: Path, model: str) -> None:
        """Open it, or make it with mode 0600, and find what was answered.

        Raises:
            BatchError: another process writes it.
            OSError: it cannot be opened.
        """
        with input_file.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(model.encode()))
        self._output: Final = output
        self._path: Final = output.with_name(f"{output.name}.{digest.hexdigest()[:16]}.part")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(self._path, flags, 0o600), "r+b", buffering=0)
        self._places: dict[str, tuple[int, int]] = {}
        self.failed = 0
        """Of the answers found here, those that are an error."""
        self._attempts: Counter[str] = Counter()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end = self._find()
            self._file.truncate(self._end)
        except BlockingIOError:
            self._file.close()
            raise BatchError(f"{self._path}: another process writes it") from None
        except BaseException:
            self._file.close()
            raise

    def _find(self) -> int:
        end = 0
        with self._path.open("rb", buffering=MIB) as file:
            for line in file:
                try:
                    found = msgspec.json.decode(line, type=_Line)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    break
                if not line.endswith(b"\n"):
                    break
                if found.custom_id is not None:
                    self._places[found.custom_id] = (end, len(line))
                    self.failed += bytes(found.error) != b"null"
                elif found.begun is not None:
                    self._attempts[found.begun] += 1
                elif found.put_back is not None:
                    self._attempts[found.put_back] -= 1
                else:
                    break
                end += len(line)
        return end

    @property
    def answered(self) -> frozenset[str]:
        """The ``custom_id`` of every request that has its answer."""
        return frozenset(self._places)

    def attempts(self, custom_id: str) -> int:
        """Times that a request was begun, and neither answered nor put back."""
        return 0 if custom_id in self._places else self._attempts[custom_id]

    def begin(self, custom_id: str) -> None:
        """A request is under way: if the engine dies now, it may be why.

        Raises:
            OSError: it is not marked.
        """
        self._write(msgspec.json.encode(_Line(begun=custom_id)) + b"\n")
        self._attempts[custom_id] += 1

    def put_back(self, custom_ids: Iterable[str]) -> None:
        """These are under way no more, and killed nobody.

        Raises:
            OSError: some are not marked.
        """
        for custom_id in custom_ids:
            self._write(msgspec.json.encode(_Line(put_back=custom_id)) + b"\n")
            self._attempts[custom_id] -= 1

    def append(self, custom_id: str, line: bytes) -> None:
        """Add an answer; a kill does not take it back, a power loss may.

        Raises:
            OSError: it was not added.
        """
        place = (self._end, len(line))
        self._write(line)
        self._places[custom_id] = place

    def _write(self, line: bytes) -> None:
        write_all(self._file.fileno(), line, self._end)
        self._end += len(line)

    def publish(self, order: Sequence[str]) -> None:
        """Write the output file, answers in this order, and remove this one.

        Raises:
            KeyError: a request has no answer.
            OSError: the output was not written; what is here stays.
        """
        fd, temporary = create_temporary(self._output)
        try:
            with os.fdopen(fd, "wb", buffering=MIB) as output:
                for name in order:
                    offset, length = self._places[name]
                    output.write(os.pread(self._file.fileno(), length, offset))
                output.flush()
                os.fsync(output.fileno())
            temporary.rename(self._output)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(self._output.parent)
        self._path.unlink()
        self.close()

    def close(self) -> None:
        """Give it up; the next run goes on. Idempotent."""
        self._file.close()
