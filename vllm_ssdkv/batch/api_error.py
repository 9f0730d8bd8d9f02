"""Errors of the API in OpenAI's shape."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse

from vllm_ssdkv.base.errors import SSDKVError


class ApiError(SSDKVError):
    """A request that is answered with an error. The official clients raise by its status.

    Attributes:
        status: HTTP status.
        param: Name of the parameter that is wrong, if it is one.
        code: One word for programs.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def not_found(kind: str, identifier: str) -> ApiError:
    """No such object, or another key's: the two look the same from outside."""
    shown = identifier[:64].encode("ascii", "backslashreplace").decode()
    return ApiError(404, f"No such {kind} object: {shown}", "id")


async def respond(request: Request, error: Exception) -> JSONResponse:
    """The response that reports an :class:`ApiError`."""
    if not isinstance(error, ApiError):
        raise error
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    content = {
        "message": str(error),
        "type": kind,
        "param": error.param,
        "code": error.code,
    }
    # Of a body that comes too slowly no more is waited for. Others are taken in to their end, or
    # clients that send first and read then would not see the answer.
    headers = {"Connection": "close"} if error.status == 408 else None
    return JSONResponse({"error": content}, status_code=error.status, headers=headers)
