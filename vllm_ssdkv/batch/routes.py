"""The routes ``/v1/files`` and ``/v1/batches``: HTTP in and out, nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable
from typing import Any, BinaryIO, Final, ParamSpec, TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from vllm_ssdkv.base.sizes import KIB, MIB
from vllm_ssdkv.batch import openapi, parameters
from vllm_ssdkv.batch.api_error import ApiError
from vllm_ssdkv.batch.files import file_object
from vllm_ssdkv.batch.jobs import batch_object
from vllm_ssdkv.batch.service import Service
from vllm_ssdkv.batch.transfers import Transfers, patient
from vllm_ssdkv.batch.upload import receive

Given = ParamSpec("Given")
Result = TypeVar("Result")

STATE: Final = "ssdkv_batch"
"""Name of the :class:`Service` in the app's state."""
PURPOSE: Final = "batch"
MAX_PAGE: Final = MIB
"""Bytes of a list; what has no room is on the next page."""
_READ: Final = 256 * KIB
_FILE_FIELDS: Final = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}

router = APIRouter()


def _service(request: Request) -> Service:
    service: Service | None = getattr(request.app.state, STATE, None)
    if service is None:
        raise ApiError(503, "The batch API of this server did not start; see its log.")
    return service


def _page(
    rows: list[sqlite3.Row], more: bool, shape: Callable[[sqlite3.Row], dict[str, Any]]
) -> Response:
    """The rows, or as many of the first ones as ``MAX_PAGE`` has room for."""
    shown: list[msgspec.Raw] = []
    size = 0
    for row in rows:
        text = msgspec.json.encode(shape(row))
        size += len(text)
        if shown and size > MAX_PAGE:
            more = True
            break
        shown.append(msgspec.Raw(text))
    page = {
        "object": "list",
        "data": shown,
        "first_id": rows[0]["id"] if shown else None,
        "last_id": rows[len(shown) - 1]["id"] if shown else None,
        "has_more": more,
    }
    return Response(msgspec.json.encode(page), media_type="application/json")


def _full(error: OSError | sqlite3.Error) -> ApiError:
    """The disk is full, or worse; the text of the error may name paths, so it is not sent."""
    return ApiError(507, f"The server cannot store this: {type(error).__name__}.")


async def _stored(
    call: Callable[Given, Result], *arguments: Given.args, **named: Given.kwargs
) -> Result:
    """Result of a call that blocks on I/O.

    Raises:
        ApiError: its own, or 507.
    """
    try:
        return await asyncio.to_thread(call, *arguments, **named)
    except (OSError, sqlite3.Error) as error:
        raise _full(error) from error


@router.post("/v1/files", openapi_extra=openapi.CREATE_FILE)
async def create_file(request: Request) -> Response:
    """Take a file in."""
    service = _service(request)
    owner = service.owner(request)
    try:
        with service.transfers.one(owner), service.files.upload(owner) as upload:
            form = await receive(request, service.files, upload)
            for name in form.fields.keys() - _FILE_FIELDS:
                raise ApiError(
                    400, f"Unknown parameter: '{name[:64]}'.", name[:64], "unknown_parameter"
                )
            if form.filename is None:
                raise ApiError(400, "'file' is a required property", "file")
            if form.fields.get("purpose") != PURPOSE:
                raise ApiError(400, f"'purpose' must be '{PURPOSE}'.", "purpose")
            lifetime = parameters.lifetime(
                form.fields.get("expires_after[anchor]"),
                form.fields.get("expires_after[seconds]"),
                "expires_after",
            )
            row = await asyncio.to_thread(
                service.files.keep, upload, owner, form.filename, PURPOSE, lifetime
            )
    except (OSError, sqlite3.Error) as error:
        raise _full(error) from error
    return JSONResponse(file_object(row))


@router.get("/v1/files", openapi_extra=openapi.LIST_FILES)
async def list_files(request: Request) -> Response:
    """A page of files."""
    service = _service(request)
    given = parameters.query(request, ("after", "limit", "order", "purpose"))
    newest_first = parameters.choice(given, "order", ("desc", "asc")) == "desc"
    rows, more = await _stored(
        service.files.page,
        service.owner(request),
        after=given.get("after"),
        limit=parameters.limit(given, 10_000, 10_000),
        newest_first=newest_first,
        purpose=given.get("purpose"),
    )
    return _page(rows, more, file_object)


@router.get("/v1/files/{file_id}")
async def retrieve_file(request: Request, file_id: str) -> Response:
    """One file."""
    service = _service(request)
    row = await _stored(service.files.get, service.owner(request), file_id)
    return JSONResponse(file_object(row))


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> Response:
    """Remove a file."""
    service = _service(request)
    await _stored(service.files.delete, service.owner(request), file_id)
    service.wake()  # batches may wait for room
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


@router.get("/v1/files/{file_id}/content")
async def file_content(request: Request, file_id: str) -> Response:
    """The bytes of a file."""
    service = _service(request)
    owner = service.owner(request)
    file, size = await _stored(service.files.open, owner, file_id)
    return _Download(file, size, service.transfers, owner)


class _Download(StreamingResponse):
    """A file on its way out, for as long as the client takes it."""

    def __init__(self, file: BinaryIO, size: int, transfers: Transfers, owner: bytes) -> None:
        super().__init__(
            self._pieces(),
            media_type="application/octet-stream",
            headers={"Content-Length": str(size), "X-Content-Type-Options": "nosniff"},
        )
        self._file = file
        self._transfers = transfers
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file, self._transfers.one(self._owner), contextlib.suppress(TimeoutError):
            await super().__call__(scope, receive, patient(send))

    async def _pieces(self) -> AsyncIterator[bytes]:
        while piece := await asyncio.to_thread(self._file.read, _READ):
            yield piece


@router.post("/v1/batches", openapi_extra=openapi.CREATE_BATCH)
async def create_batch(request: Request) -> Response:
    """Begin a batch."""
    service = _service(request)
    new = parameters.new_batch(await parameters.json_body(request), service.endpoints)
    row = await _stored(service.jobs.create, service.owner(request), new)
    service.wake()
    return JSONResponse(batch_object(row))


@router.get("/v1/batches", openapi_extra=openapi.LIST_BATCHES)
async def list_batches(request: Request) -> Response:
    """A page of batches, newest first."""
    service = _service(request)
    given = parameters.query(request, ("after", "limit"))
    rows, more = await _stored(
        service.jobs.page,
        service.owner(request),
        after=given.get("after"),
        limit=parameters.limit(given, 20, 100),
    )
    return _page(rows, more, batch_object)


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(request: Request, batch_id: str) -> Response:
    """One batch."""
    service = _service(request)
    row = await _stored(service.jobs.get, service.owner(request), batch_id)
    return JSONResponse(batch_object(row))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Ask for the end of a batch."""
    service = _service(request)
    row = await _stored(service.jobs.cancel, service.owner(request), batch_id)
    service.wake()
    return JSONResponse(batch_object(row))
