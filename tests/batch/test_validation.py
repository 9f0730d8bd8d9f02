"""Findings about a file that was read, here and in a process that may die of it."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.batch.served import DEADLINE_S
from tests.kit.waiting import until
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.batch import validator
from vllm_ssdkv.batch.request import COMPLETIONS, Limits
from vllm_ssdkv.batch.validation import Entry, plan
from vllm_ssdkv.batch.validator import Validator, ValidatorError


def line(custom_id: str, prompt: object, model: str = "m") -> bytes:
    body = {"model": model, "prompt": prompt}
    value = {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}
    return json.dumps(value).encode() + b"\n"


def test_a_plan_names_bad_lines_and_puts_them_last() -> None:
    data = b"".join([b"bad\n", line("a", "short"), b"\n", line("b", "longer")])
    found = plan(io.BytesIO(data), COMPLETIONS, 10)
    assert found.errors == []
    assert [entry.number for entry in found.entries] == [1, 2, 4]
    assert [entry.number for entry in found.in_order()] == [4, 2, 1]
    summary = found.summary
    assert (summary.lines, summary.bad_lines, summary.model) == (3, 1, "m")
    assert [(problem["line"], problem["code"]) for problem in summary.bad] == [
        (1, "invalid_json_line")
    ]
    two = plan(io.BytesIO(data + line("c", "x", "n")), None, 10)
    assert two.summary.model is None


@pytest.fixture
def validate() -> Iterator[Validator]:
    made = Validator(50_000, Limits(text=1000))
    yield made
    made.stop()


def ended(directory: Path) -> None:
    """No process has a file of this directory open any more."""
    until(
        lambda: not any(str(path).startswith(str(directory)) for path in opened_by_others()),
        seconds=DEADLINE_S,
    )


def opened_by_others() -> Iterator[str]:
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        if link.parts[2] != str(os.getpid()):
            try:
                yield os.readlink(link)
            except OSError:
                continue


def test_a_process_finds_the_same(tmp_path: Path, validate: Validator) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"".join([line("a", "x"), b"bad\n", line("b", [1, 2]), line("c", "y" * 2000)]))
    with path.open("rb") as file:
        expected = plan(file, COMPLETIONS, 50_000, Limits(text=1000))
    assert expected.summary.bad_lines == 2
    for _ in range(3):
        with validate.read(path, COMPLETIONS) as found:
            assert found.summary == expected.summary
            assert list(found.entries) == list(expected.in_order())
    path.write_bytes(b"\n" * (64 * MIB))
    with validate.read(path, COMPLETIONS) as found:
        assert [error["code"] for error in found.summary.errors] == ["empty_file"]
    ended(tmp_path)
    with pytest.raises(FileNotFoundError), validate.read(tmp_path / "none", COMPLETIONS):
        pass
    with pytest.raises(IsADirectoryError), validate.read(tmp_path, COMPLETIONS):
        pass


LARGE = b"".join(line(str(i), "x" * 10_000_000) for i in range(20))
"""Takes a second to read."""


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("MEMORY", 40 * MIB, "MiB of memory"),
        ("CPU_S", 1 - 2 * len(LARGE) // MIB, "takes too long"),
    ],
)
def test_reading_has_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int, why: str
) -> None:
    monkeypatch.setattr(validator, "MEMORY_PER_LINE", 0)
    monkeypatch.setattr(validator, name, value)
    path = tmp_path / "f"
    path.write_bytes(LARGE + LARGE)
    made = Validator(50_000, Limits())
    with pytest.raises(ValidatorError, match=why), made.read(path, COMPLETIONS):
        pass
    made.stop()


def test_who_reads_may_be_killed(tmp_path: Path, validate: Validator) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(LARGE)
    small.write_bytes(line("a", "x"))

    def read(path: Path) -> list[Entry]:
        with validate.read(path, COMPLETIONS) as found:
            return list(found.entries)

    def kill(path: Path) -> None:
        """The process that has this file open, as soon as one has."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            for link in Path("/proc").glob("[0-9]*/fd/*"):
                pid = int(link.parts[2])
                try:
                    if pid != os.getpid() and os.readlink(link) == str(path):
                        os.kill(pid, signal.SIGKILL)
                        return
                except (OSError, ProcessLookupError):
                    continue

    assert len(read(small)) == 1
    thread = threading.Thread(target=kill, args=(large,))
    thread.start()
    with pytest.raises(ValidatorError, match="SIGKILL"):
        read(large)
    thread.join()
    # Others, and the next one, are read.
    assert len(read(small)) == 1
    # So it is after the death of the one that forks.
    stop = threading.Timer(0.3, validate.stop)
    stop.start()
    with pytest.raises(ValidatorError, match="was killed"):
        read(large)
    stop.join()
    ended(tmp_path)
    with pytest.raises(ValidatorError, match="about to end"):
        read(small)
