"""``multipart/form-data`` on its way to disk: the file is never held in memory, nor anywhere else.

Starlette's own form parser spools files into the temporary directory first, whatever their size;
this one writes where the file is to stay, and stops at the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from vllm_ssdkv.base.sizes import KIB
from vllm_ssdkv.batch.api_error import ApiError
from vllm_ssdkv.batch.files import Files, Upload
from vllm_ssdkv.batch.transfers import chunks

MAX_FIELDS: Final = 16
MAX_FIELD: Final = 4 * KIB
"""Bytes of all fields that are no file together, headers included."""
MAX_FILENAME: Final = 255
_WRITE: Final = 256 * KIB


@dataclass
class Form:
    """Part of an upload that has arrived so far.

    Attributes:
        filename: Name that the client gives the file; only shown, never a path.
        data: Bytes of the file that wait to be written.
    """

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    data: bytearray = field(default_factory=bytearray)


class _Parts:
    """Callbacks of the parser: takes parts to the form they belong in."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self._header = [bytearray(), bytearray()]
        self._disposition = b""
        self._name = ""
        self._is_file = False
        self._value = bytearray()
        self._parts = 0
        self._text_bytes = 0
        self.ended = False

    def callbacks(self) -> Mapping[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._grow(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._grow(1, data[start:end]),
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": lambda data, start, end: self._data(data[start:end]),
            "on_part_end": self._end,
            "on_end": self._all,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_FIELDS:
            raise ApiError(400, f"More than {MAX_FIELDS} form fields.")
        self._disposition = b""

    def _count(self, size: int) -> None:
        self._text_bytes += size
        if self._text_bytes > MAX_FIELD:
            raise ApiError(
                400, f"Form fields other than the file take more than {MAX_FIELD} bytes."
            )

    def _grow(self, which: int, data: bytes) -> None:
        self._count(len(data))
        self._header[which] += data

    def _header_end(self) -> None:
        if bytes(self._header[0]).lower() == b"content-disposition":
            self._disposition = bytes(self._header[1])
        self._header = [bytearray(), bytearray()]

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = b"filename" in options
        self._value = bytearray()
        if not self._is_file:
            return
        if self._name != "file":
            raise ApiError(400, f"Unknown file field '{self._name[:64]}'.", self._name[:64])
        if self.form.filename is not None:
            raise ApiError(400, "There is more than one 'file'.", "file")
        name = shown_name(options[b"filename"].decode("utf-8", "replace"))
        if name in (".", ".."):
            raise ApiError(400, f"A file cannot be called '{name}'.", "file")
        self.form.filename = name

    def _data(self, data: bytes) -> None:
        if self._is_file:
            self.form.data += data
        else:
            self._count(len(data))
            self._value += data

    def _end(self) -> None:
        if not self._is_file:
            self.form.fields[self._name] = self._value.decode("utf-8", "replace")

    def _all(self) -> None:
        self.ended = True


def shown_name(name: str) -> str:
    """A file name without what could hurt where it is shown: its last part, printable, short."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in last if c.isprintable())[-MAX_FILENAME:] or "file"


async def receive(request: Request, files: Files, upload: Upload) -> Form:
    """Take a form in; its file goes into ``upload``. Memory is bounded by a MiB.

    Raises:
        ApiError: 400, not a form; 408, it comes too slowly; 413, too large.
        OSError: it could not be written.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError(400, "The request must be multipart/form-data with a boundary.")
    form = Form()
    parts = _Parts(form)
    try:
        parser = MultipartParser(boundary, parts.callbacks())  # type: ignore[arg-type]  # a mapping
        async for chunk in chunks(request):
            for start in range(0, len(chunk), _WRITE):
                parser.write(chunk[start : start + _WRITE])
                if len(form.data) >= _WRITE:
                    await _flush(files, upload, form)
        parser.finalize()
    except (FormParserError, ValueError) as error:
        raise ApiError(400, f"The form cannot be read: {str(error)[:200]}") from None
    if not parts.ended:
        raise ApiError(400, "The form has no end.")
    await _flush(files, upload, form)
    return form


async def _flush(files: Files, upload: Upload, form: Form) -> None:
    data, form.data = bytes(form.data), bytearray()
    if data:
        await asyncio.to_thread(files.append, upload, data)
