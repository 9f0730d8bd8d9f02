"""Validation in processes of their own, so that no file holds up the server, whatever is in it.

Reading lines is work of Python's, and a thread that does it keeps the interpreter's lock from the
event loop. So a small process, which imports none of vLLM, forks another one for each file. That
has bounds on memory and time, and yields to the engine.

The small one runs ``python -m vllm_ssdkv.batch.validator`` with a socket as its standard input. A
message is a job, with the file and a pipe; what comes out of the pipe are messages of msgpack,
each after its length in 4 bytes. The first is a :class:`Summary` or a :class:`_Failure`, the
others are lists of entries in the order of running. Everything ends with the socket.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NoReturn

import msgspec

from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.base.sizes import KIB, MIB
from vllm_ssdkv.batch.request import Limits
from vllm_ssdkv.batch.validation import Entry, Summary, plan

MEMORY: Final = 256 * MIB
"""Bytes that reading a file may take; what is kept of each of its lines comes on top."""
MEMORY_PER_LINE: Final = 512
CPU_S: Final = 60
"""Seconds of a processor that a file may take, and one more per MiB. Most take 0.02 per MiB."""
WAIT: Final = 10
"""Factor from ``CPU_S`` to the time by the clock, on a busy machine."""
END_S: Final = 5.0
"""Time in which the process that forks others has to end."""
_JOB: Final = 16 * KIB
_AT_A_TIME: Final = 4096
_PREFIX: Final = 4


class ValidatorError(SSDKVError):
    """The process that read a file ended without a result; the text says why."""


class _Job(msgspec.Struct, frozen=True):
    endpoint: str
    max_requests: int
    limits: Limits
    memory: int
    cpu_s: int


class _Failure(msgspec.Struct, frozen=True, tag=True):
    """Cause of a missing result: an error of the operating system, or a text."""

    text: str
    errno: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """Content of a file, in numbers.

    Attributes:
        entries: Its lines, in the order of running, to be taken once.
    """

    summary: Summary
    entries: Iterator[Entry]


class Validator:
    """Has files read. Any thread may call.

    Attributes:
        stopped: Whether it reads no more.
    """

    def __init__(self, max_requests: int, limits: Limits) -> None:
        self._max_requests = max_requests
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self.stopped = False

    @contextlib.contextmanager
    def read(self, path: Path, endpoint: str) -> Iterator[Found]:
        """Read the input of a batch. Blocks; what reads it ends with the block, if not before.

        Raises:
            OSError: the file cannot be read.
            ValidatorError: the process ended without a result.
        """
        with path.open("rb") as file:
            cpu_s = CPU_S + os.fstat(file.fileno()).st_size // MIB
            memory = MEMORY + MEMORY_PER_LINE * self._max_requests
            job = _Job(endpoint, self._max_requests, self._limits, memory, cpu_s)
            out = self._begin(job, file)
        with out:
            yield _found(out)

    def _begin(self, job: _Job, file: BinaryIO) -> BinaryIO:
        """The end of the pipe from which the result comes."""
        ours, theirs = os.pipe()
        out = os.fdopen(ours, "rb")
        try:
            with self._lock:
                channel = self._start()
                data = [msgspec.json.encode(job)]
                socket.send_fds(channel, data, [file.fileno(), theirs])
        except ConnectionError as error:
            out.close()
            self._end()
            raise ValidatorError("the process that reads files has ended") from error
        except BaseException:
            out.close()
            raise
        finally:
            os.close(theirs)
        return out

    def _start(self) -> socket.socket:
        if self.stopped:
            raise ValidatorError("the server is about to end")
        if self._channel is None:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C is for the server, which ends this one
                )
        return self._channel

    def stop(self) -> None:
        """End what is being read, and read no more. Blocks for a moment."""
        self.stopped = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            if self._channel is not None and self._process is not None:
                self._channel.close()
                try:
                    self._process.wait(END_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            self._channel = self._process = None


def _found(out: BinaryIO) -> Found:
    messages = _messages(out)
    first = next(messages, None)
    if first is None:
        raise ValidatorError("the process that read the file was killed")
    head = msgspec.msgpack.decode(first, type=Summary | _Failure)
    if isinstance(head, _Failure):
        if head.errno:
            raise OSError(head.errno, head.text)
        raise ValidatorError(f"reading the file ended with {head.text}")
    return Found(head, _entries(messages, head.lines))


def _entries(messages: Iterator[bytes], expected: int) -> Iterator[Entry]:
    count = 0
    for message in messages:
        entries = msgspec.msgpack.decode(message, type=list[Entry] | _Failure)
        if isinstance(entries, _Failure):
            raise ValidatorError(f"reading the file ended with {entries.text}")
        count += len(entries)
        yield from entries
    if count != expected:
        raise ValidatorError(f"reading the file ended after {count} of {expected} lines")


def _messages(out: BinaryIO) -> Iterator[bytes]:
    while len(prefix := out.read(_PREFIX)) == _PREFIX:
        size = int.from_bytes(prefix, "little")
        message = out.read(size)
        if len(message) < size:
            return
        yield message


def _send(out: BinaryIO, message: object) -> None:
    data = msgspec.msgpack.encode(message)
    out.write(len(data).to_bytes(_PREFIX, "little") + data)


# ---- in the processes ----


def _read(job: _Job, file: BinaryIO, out: BinaryIO) -> None:
    """Read one file, and send what is found."""
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CPU, (job.cpu_s, job.cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (job.memory, job.memory))
    signal.alarm(WAIT * job.cpu_s)
    try:
        found = plan(file, job.endpoint, job.max_requests, job.limits)
    except OSError as error:
        _send(out, _Failure(str(error.strerror), error.errno or 0))
    except MemoryError:
        _send(out, _Failure(f"more than {job.memory // MIB} MiB of memory"))
    except Exception:  # noqa: BLE001 - told by the process that asked
        _send(out, _Failure(traceback.format_exc()[-2000:]))
    else:
        _send(out, found.summary)
        entries = iter(()) if found.errors else found.in_order()
        while some := list(itertools.islice(entries, _AT_A_TIME)):
            _send(out, some)
    out.flush()


class _Server:
    """The small process: forks one for each job, and says of what it died, if it did."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._running: dict[int, BinaryIO] = {}
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> NoReturn:
        """Serve until the socket is closed; then end all."""
        selector = selectors.DefaultSelector()
        selector.register(self._channel, selectors.EVENT_READ)
        selector.register(self._woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._channel:
                    self._take()
                else:
                    os.read(self._woken, KIB)
                    self._reap()

    def _take(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._channel, _JOB, 2)
        if not data:
            for pid in self._running:
                os.kill(pid, signal.SIGKILL)
            sys.exit()
        file, out = os.fdopen(descriptors[0], "rb"), os.fdopen(descriptors[1], "wb")
        pid = os.fork()
        if pid:
            file.close()
            self._running[pid] = out
            return
        try:
            # A pipe has an end when all who may write to it have closed it.
            self._channel.close()
            for other in self._running.values():
                other.close()
            _read(msgspec.json.decode(data, type=_Job), file, out)
        finally:
            os._exit(0)

    def _reap(self) -> None:
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            with self._running.pop(pid) as out, contextlib.suppress(BrokenPipeError):
                if os.WIFSIGNALED(status):
                    why = signal.Signals(os.WTERMSIG(status)).name
                    _send(out, _Failure(f"{why} (SIGXCPU, SIGALRM: it takes too long)"))
                    out.flush()


if __name__ == "__main__":
    _Server(socket.socket(fileno=sys.stdin.fileno())).run()
