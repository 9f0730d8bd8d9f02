"""The output of a batch: a JSON object per request, as OpenAI and ``vllm run-batch`` write it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

import msgspec

from vllm_ssdkv.batch.lines import LineError


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer, or of many.

    Attributes:
        cached: Prompt tokens whose KV was found in a cache instead of computed.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.completion + other.completion,
        )


NO_TOKENS: Final = Usage()


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of an endpoint.

    Attributes:
        status: HTTP status.
        body: JSON, without a line break.
    """

    status: int
    body: bytes
    usage: Usage = NO_TOKENS

    @property
    def succeeded(self) -> bool:
        """Check whether it belongs into the output file; else it belongs into the error file."""
        return self.status == 200


def answer_line(custom_id: str, reply: Reply) -> bytes:
    """The line of a request that was answered, with success or an HTTP error."""
    response = {
        "status_code": reply.status,
        "request_id": _identifier("req"),
        "body": msgspec.Raw(reply.body),
    }
    return _line(custom_id, response, None)


def run_batch_line(custom_id: str, reply: Reply) -> bytes:
    """The line of an answered request as ``vllm run-batch`` has it: errors are not in the body."""
    if reply.succeeded:
        return answer_line(custom_id, reply)
    response = {
        "status_code": reply.status,
        "request_id": _identifier("req"),
        "body": None,
    }
    return _line(custom_id, response, msgspec.Raw(reply.body))


def failure_line(problem: LineError, number: int | None = None) -> bytes:
    """The line of a request that was never sent; ``number`` is its line in the input."""
    error: dict[str, object] = {
        "code": problem.code,
        "message": str(problem),
        "param": problem.param,
    }
    if number is not None:
        error["line"] = number
    return _line(problem.custom_id, None, error)


def _identifier(kind: str) -> str:
    return f"batch_{kind}_{secrets.token_hex(12)}"


def _line(custom_id: str | None, response: object, error: object) -> bytes:
    value = {
        "id": _identifier("req"),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(value) + b"\n"
