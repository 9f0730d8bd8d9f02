"""Before a batch runs: which lines of its file are requests, and in which order they run."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from vllm_ssdkv.batch.jobs import MAX_ERRORS
from vllm_ssdkv.batch.lines import Line, LineError, parse_request, prompt_bytes, read_lines
from vllm_ssdkv.batch.order import Order, arrange, block_hashes


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a batch once its file was read.

    Attributes:
        lines: Every line that holds something, without its text.
        order: The order of running; lines that are no request have no prompt, and come last.
        model: What the requests name, when they agree.
        errors: Error objects; if there are any, the batch cannot run.
        bad: Error objects of the first lines that are no request.
        bad_lines: Number of those lines.
    """

    lines: list[Line]
    order: Order
    model: str | None
    errors: list[dict[str, Any]]
    bad: list[dict[str, Any]] = field(default_factory=list)
    bad_lines: int = 0


def error_object(problem: LineError, number: int | None = None) -> dict[str, Any]:
    """An entry of ``errors.data``."""
    return {
        "code": problem.code,
        "message": str(problem),
        "param": problem.param,
        "line": number,
    }


def plan(file: BinaryIO, endpoint: str | None, max_requests: int) -> Plan:
    """Read the input of a batch; holds one line and some bytes per request. Blocks.

    A batch cannot run when nothing in it is a request, when it has too many lines, or when two
    have one ``custom_id``, as nobody could tell their answers apart. Single bad lines are left to
    the error file.

    Args:
        file: The input, at its beginning.
        endpoint: What each line has to name; None: any.
        max_requests: Lines that are accepted.

    Raises:
        OSError: the file cannot be read.
    """
    lines: list[Line] = []
    chains: list[array[int]] = []
    lengths: list[int] = []
    bad: list[dict[str, Any]] = []
    doubles: list[dict[str, Any]] = []
    bad_lines = 0
    models: set[object] = set()
    seen: set[bytes] = set()
    for line in read_lines(file):
        if len(lines) == max_requests:
            problem = LineError(
                "too_many_requests", f"The file has more than {max_requests} requests."
            )
            return Plan([], arrange([], []), None, [error_object(problem, line.number)])
        prompt = b""
        try:
            request = parse_request(line.text, endpoint)
            prompt = prompt_bytes(request)
            models.add(str(request.body.get("model")))
            _once(request.custom_id, seen)
        except LineError as problem:
            is_double = problem.code == "duplicate_custom_id"
            bad_lines += not is_double
            told = doubles if is_double else bad
            if len(told) < MAX_ERRORS:
                told.append(error_object(problem, line.number))
        lines.append(Line(line.number, line.offset, line.length, b""))
        chains.append(block_hashes(prompt))
        lengths.append(len(prompt))
    errors = doubles
    if not lines:
        errors = [error_object(LineError("empty_file", "The file holds no request."))]
    elif bad_lines == len(lines):
        errors = bad
    model = models.pop() if len(models) == 1 else None
    return Plan(
        lines,
        arrange(chains, lengths),
        None if model is None else str(model),
        errors,
        bad,
        bad_lines,
    )


def _once(custom_id: str, seen: set[bytes]) -> None:
    digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
    if digest in seen:
        raise LineError(
            "duplicate_custom_id",
            f"The custom_id '{custom_id[:64]}' was used before in this file.",
            "custom_id",
        )
    seen.add(digest)
