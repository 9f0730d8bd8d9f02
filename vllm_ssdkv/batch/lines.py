"""The input of a batch: one JSON object per line, read one at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.base.sizes import MIB

MAX_LINE: Final = 16 * MIB
"""Bytes of one line. A longer one is bad, and is skipped without holding it in memory."""

_CHUNK: Final = MIB
_BOM: Final = b"\xef\xbb\xbf"
"""Mark at the beginning of a file that some editors write before UTF-8."""
_BLANK: Final = re.compile(rb"\s*")


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
    """Place of a line in a file.

    Attributes:
        number: From 1, as editors count.
        offset: Byte of the file at which it begins, blanks left out.
        length: Bytes without the line break.
        text: Its bytes; empty when there are more than ``MAX_LINE``.
    """

    number: int
    offset: int
    length: int
    text: bytes


def read_lines(file: BinaryIO, limit: int = MAX_LINE) -> Iterator[Line]:
    """The lines that hold something, in order; memory is bounded by ``limit``. Blocks on I/O.

    Blank lines cost no more than reading them. A byte order mark before the first is passed over.

    Raises:
        OSError: the file cannot be read.
    """
    data = file.read(_CHUNK)
    at = len(_BOM) if data.startswith(_BOM) else 0
    start, number = 0, 1  # of data in the file; of the line that data[at] is in
    while True:
        blanks = _BLANK.match(data, at)
        end = at if blanks is None else blanks.end()
        number += data.count(b"\n", at, end)
        at = end
        if at == len(data):
            start, at = start + at, 0
            data = file.read(_CHUNK)
            if not data:
                return
            continue
        end = data.find(b"\n", at)
        if end < 0:
            data, at, start = data[at:], 0, start + at
            data += file.readline(max(0, limit + 1 - len(data)))
            end = len(data) - data.endswith(b"\n")
        if end - at <= limit:
            begin, text = start + at, data[at:end].rstrip()
            at = end
            if end >= len(data) - 1:  # what is yielded is not held here as well
                start, data, at = start + end, data[end:], 0
            yield Line(number, begin, len(text), text)
            text = b""
            continue
        size = end - at
        if end == len(data):  # it goes on: read past it, a piece at a time
            while piece := file.readline(_CHUNK):
                size += len(piece)
                if piece.endswith(b"\n"):
                    break
            yield Line(number, start + at, size, b"")
            number += 1
            data, at, start = b"", 0, start + at + size
        else:
            yield Line(number, start + at, size, b"")
            at = end
