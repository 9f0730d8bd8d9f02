"""The input of a batch: one JSON object per line, read one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import msgspec

from vllm_ssdkv.errors import SSDKVError
from vllm_ssdkv.sizes import MIB

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"
ENDPOINTS: Final = (CHAT, COMPLETIONS, EMBEDDINGS)

MAX_LINE: Final = 16 * MIB
"""Bytes of one line. A longer one is bad, and is skipped without holding it in memory."""
MAX_CUSTOM_ID: Final = 512
"""Characters."""

_ALL: Final = ", ".join(ENDPOINTS)


class LineError(SSDKVError):
    """A line of the input is no request. Carries what OpenAI's error objects say.

    Attributes:
        code: One word for programs.
        param: Name of the field that is wrong, if it is one.
        custom_id: The line's, where it has one.
    """

    def __init__(
        self, code: str, message: str, param: str | None = None, custom_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class Line:
    """Where a line is.

    Attributes:
        number: From 1, as editors count.
        offset: Byte of the file at which it begins.
        length: Bytes without the line break.
        text: Its bytes; empty when there are more than ``MAX_LINE``.
    """

    number: int
    offset: int
    length: int
    text: bytes


def read_lines(file: BinaryIO, limit: int = MAX_LINE) -> Iterator[Line]:
    """The lines that hold something, in order; memory is bounded by ``limit``. Blocks on I/O.

    Raises:
        OSError: the file cannot be read.
    """
    offset = 0
    number = 0
    while piece := file.readline(limit + 1):
        number += 1
        size = len(piece)
        is_long = size > limit and not piece.endswith(b"\n")
        text = b"" if is_long else piece.rstrip(b"\r\n")
        while len(piece) > limit and not piece.endswith(b"\n"):
            # Read past it, a piece at a time.
            piece = file.readline(limit + 1)
            size += len(piece)
        if is_long or text.strip():
            yield Line(number, offset, size if is_long else len(text), text)
        offset += size


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request of a batch."""

    custom_id: str
    endpoint: str
    body: dict[str, Any]


def parse_request(text: bytes, endpoint: str | None) -> BatchRequest:
    """The request on a line.

    Args:
        text: The line; empty stands for one that was too long.
        endpoint: What every ``url`` of this batch has to be; None: any that there is.

    Raises:
        LineError: it is not one.
    """
    if not text:
        raise LineError("line_too_long", f"This line is longer than {MAX_LINE} bytes.")
    try:
        value: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError("invalid_json_line", f"This line is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise LineError("invalid_json_line", "This line is not a JSON object.")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise LineError(
            "invalid_custom_id",
            f"'custom_id' must be a string of 1 to {MAX_CUSTOM_ID} characters.",
            "custom_id",
        )

    def bad(code: str, message: str, param: str) -> LineError:
        return LineError(code, message, param, custom_id)

    if value.get("method") != "POST":
        raise bad("invalid_method", "'method' must be 'POST'.", "method")
    url = value.get("url")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise bad("invalid_url", f"'url' must be one of {_ALL}.", "url")
    if endpoint is not None and url != endpoint:
        raise bad("mismatched_url", f"'url' must be the batch's endpoint, {endpoint}.", "url")
    body = value.get("body")
    if not isinstance(body, dict):
        raise bad("invalid_body", "'body' must be an object.", "body")
    if body.get("stream"):
        raise bad("invalid_stream", "'stream' is not available in a batch.", "stream")
    return BatchRequest(custom_id, url, body)


def prompt_bytes(request: BatchRequest) -> bytes:
    """What stands for the prompt when prompts are compared: requests whose prompts begin alike
    have values that begin alike.

    What a chat template puts first (tools), and what keeps KV apart (model, salt), comes first.
    This is the text before the template: rendering and tokenizing twice would cost more than the
    difference is worth, which is where blocks begin.
    """
    body = request.body
    if request.endpoint == CHAT:
        prompt = body.get("messages")
    elif request.endpoint == COMPLETIONS:
        prompt = body.get("prompt")
    else:
        prompt = body.get("input")
    head = [
        body.get(name)
        for name in ("model", "cache_salt", "chat_template", "chat_template_kwargs", "tools")
    ]
    return msgspec.json.encode(head) + msgspec.json.encode(prompt)
