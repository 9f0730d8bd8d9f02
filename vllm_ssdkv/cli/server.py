"""Requests to a running server of the OpenAI API."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated, Any, Final

import typer

from vllm_ssdkv.base.errors import BatchError

URL: Final = "http://127.0.0.1:8000/v1"
_REQUEST_S: Final = 60.0

Url = Annotated[
    str, typer.Option("--url", envvar="OPENAI_BASE_URL", help="The server's base URL, with /v1.")
]
Key = Annotated[str, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="The server's key.")]


class AnswerError(BatchError):
    """The server answered with an error; the text has its status and message."""


class UnreachableError(BatchError):
    """No server answers at the URL; the text has the reason."""


def call(
    url: str,
    key: str,
    path: str,
    method: str = "GET",
    body: bytes | None = None,
    seconds: float = _REQUEST_S,
) -> dict[str, Any]:
    """The JSON object that the server answers. Blocks for at most ``seconds`` without a byte.

    Raises:
        AnswerError: it answers with an error, or with something else.
        UnreachableError: it cannot be reached.
        BatchError: the URL is none of a server.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise BatchError(f"{url}: not an http or https URL")
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        request = urllib.request.Request(
            f"{url.rstrip('/')}{path}", data=body, method=method, headers=headers
        )
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            value = json.load(answer)
    except urllib.error.HTTPError as error:
        raise AnswerError(f"{url}: {error.code}: {_message(error.read())}") from None
    except OSError as error:
        why = getattr(error, "reason", error)
        raise UnreachableError(f"{url} cannot be reached ({why})") from None
    except ValueError as error:
        raise AnswerError(f"{url}: {error}") from None
    if not isinstance(value, dict):
        raise AnswerError(f"{url}{path}: the answer is no JSON object")
    return value


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace") or "no message"
