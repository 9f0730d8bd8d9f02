"""Before a batch runs: which lines of its file are requests, and in which order they run."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import msgspec

from vllm_ssdkv.batch.lines import LineError, read_lines
from vllm_ssdkv.batch.order import Order, arrange, block_hashes
from vllm_ssdkv.batch.request import MAX_MODEL, NO_LIMITS, Limits, Size, parse_request

MAX_ERRORS: Final = 100
"""Errors reported for a batch that failed; the rest is likely more of the same."""


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A line that holds something: where it is, and what its request takes of the engine.

    Attributes:
        number: From 1, as editors count.
        offset: Byte of the file at which it begins.
        length: Bytes without the line break.
        tokens, answers, answer_tokens, logprobs: See :class:`Size`; 0 of a line that is no
            request.
    """

    number: int
    offset: int
    length: int
    tokens: int = 0
    answers: int = 0
    answer_tokens: int = 0
    logprobs: int = 0


class Summary(msgspec.Struct, frozen=True, tag=True):
    """Findings about a batch whose file was read, beside its lines.

    Attributes:
        lines: Lines that hold something.
        model: What the requests name, when they agree.
        blocks, shared_blocks: See :class:`Order`.
        errors: Error objects; if there are any, the batch cannot run.
        bad: Error objects of the first lines that are no request.
        bad_lines: Number of those lines.
    """

    lines: int
    model: str | None
    blocks: int
    shared_blocks: int
    errors: list[dict[str, Any]]
    bad: list[dict[str, Any]]
    bad_lines: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch whose file was read.

    Attributes:
        summary: What there is in it.
        entries: Its lines, in the order of the file.
        order: The order of running; lines that are no request have no prompt, and come last.
    """

    summary: Summary
    entries: list[Entry]
    order: Order

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Error objects; if there are any, the batch cannot run."""
        return self.summary.errors

    def in_order(self) -> Iterator[Entry]:
        """Its lines, in the order of running."""
        return (self.entries[position] for position in self.order.positions)


def error_object(problem: LineError, number: int | None = None) -> dict[str, Any]:
    """An entry of ``errors.data``."""
    return {
        "code": problem.code,
        "message": str(problem),
        "param": problem.param,
        "line": number,
    }


def plan(
    file: BinaryIO, endpoint: str | None, max_requests: int, limits: Limits = NO_LIMITS
) -> Plan:
    """Read the input of a batch; holds one line and some bytes per request. Blocks.

    A batch cannot run when nothing in it is a request, when it has too many lines, or when two
    have one ``custom_id``, as nobody could tell their answers apart. Single bad lines are left to
    the error file.

    Args:
        file: The input, at its beginning.
        endpoint: What each line has to name; None: any.
        max_requests: Lines that are accepted.
        limits: What a request may ask for.

    Raises:
        OSError: the file cannot be read.
    """
    reading = _Reading(endpoint, limits)
    for line in read_lines(file):
        if len(reading.entries) == max_requests:
            problem = LineError(
                "too_many_requests", f"The file has more than {max_requests} requests."
            )
            return _refused([error_object(problem, line.number)])
        reading.take(line.number, line.offset, line.length, line.text)
        del line  # or the next one would be read beside it
    return reading.plan()


def _refused(errors: list[dict[str, Any]]) -> Plan:
    return Plan(Summary(0, None, 0, 0, errors, [], 0), [], arrange([], []))


class _Reading:
    """Findings about a file so far."""

    def __init__(self, endpoint: str | None, limits: Limits) -> None:
        self._endpoint = endpoint
        self._limits = limits
        self.entries: list[Entry] = []
        self._chains: list[array[int]] = []
        self._lengths = array("Q")
        self._models: set[str | None] = set()
        self._seen: set[bytes] = set()
        self._bad: list[dict[str, Any]] = []
        self._doubles: list[dict[str, Any]] = []
        self._bad_lines = 0

    def take(self, number: int, offset: int, length: int, text: bytes) -> None:
        prompt, size = b"", Size(0, 0)
        try:
            request = parse_request(text, self._endpoint, self._limits)
            prompt, size = request.prompt(), request.size
            if len(self._models) < 2:
                self._models.add(request.model)
            self._once(request.custom_id)
        except LineError as problem:
            is_double = problem.code == "duplicate_custom_id"
            self._bad_lines += not is_double
            told = self._doubles if is_double else self._bad
            if len(told) < MAX_ERRORS:
                told.append(error_object(problem, number))
        self.entries.append(
            Entry(
                number,
                offset,
                length,
                size.tokens,
                size.answers,
                size.answer_tokens,
                min(size.logprobs, 2**62),
            )
        )
        self._chains.append(block_hashes(prompt))
        self._lengths.append(len(prompt))

    def _once(self, custom_id: str) -> None:
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            raise LineError(
                "duplicate_custom_id",
                f"The custom_id '{custom_id[:64]}' was used before in this file.",
                "custom_id",
            )
        self._seen.add(digest)

    def plan(self) -> Plan:
        lines = len(self.entries)
        if not lines:
            return _refused([error_object(LineError("empty_file", "The file holds no request."))])
        errors = self._doubles
        if self._bad_lines == lines:
            errors = self._bad
        model = self._models.pop() if len(self._models) == 1 else None
        order = arrange(self._chains, self._lengths)
        summary = Summary(
            lines,
            None if model is None else model[:MAX_MODEL],
            order.blocks,
            order.shared_blocks,
            errors,
            self._bad,
            self._bad_lines,
        )
        return Plan(summary, self.entries, order)
