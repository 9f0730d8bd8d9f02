"""Parameters of requests, checked by hand so that errors have OpenAI's shape and words."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request

from vllm_ssdkv.base.sizes import KIB, parse_duration
from vllm_ssdkv.batch.api_error import ApiError
from vllm_ssdkv.batch.files import KEPT_S
from vllm_ssdkv.batch.jobs import NewBatch
from vllm_ssdkv.batch.transfers import chunks

MAX_BODY: Final = 64 * KIB
MIN_LIFETIME_S: Final = 3600
_CREATE: Final = frozenset(
    {"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"}
)


def query(request: Request, known: Collection[str]) -> dict[str, str]:
    """The query parameters, each given once.

    Raises:
        ApiError: 400, one is unknown or repeated.
    """
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise ApiError(
                400, f"Unknown parameter: '{name[:64]}'.", name[:64], "unknown_parameter"
            )
        if name in found:
            raise ApiError(400, f"'{name}' is given more than once.", name)
        found[name] = value
    return found


def limit(given: Mapping[str, str], default: int, most: int) -> int:
    """The page size.

    Raises:
        ApiError: 400, no number from 1 to ``most``.
    """
    text = given.get("limit")
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or not 1 <= int(text) <= most:
        raise ApiError(400, f"'limit' must be a number from 1 to {most}.", "limit")
    return int(text)


def choice(given: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """One of a few words; the first is the default.

    Raises:
        ApiError: 400, another word.
    """
    value = given.get(name, allowed[0])
    if value not in allowed:
        raise ApiError(400, f"'{name}' must be one of {', '.join(allowed)}.", name)
    return value


def lifetime(anchor: object, seconds: object, param: str) -> int:
    """Seconds that a file is to be kept, from the two halves of ``expires_after``.

    Raises:
        ApiError: 400, they are wrong.
    """
    if anchor is None and seconds is None:
        return KEPT_S
    if anchor != "created_at":
        raise ApiError(400, "'anchor' must be 'created_at'.", f"{param}.anchor")
    if isinstance(seconds, str) and re.fullmatch(r"[0-9]{1,9}", seconds, re.ASCII):
        seconds = int(seconds)
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int)
        or not MIN_LIFETIME_S <= seconds <= KEPT_S
    ):
        raise ApiError(
            400,
            f"'seconds' must be a number from {MIN_LIFETIME_S} to {KEPT_S}.",
            f"{param}.seconds",
        )
    return seconds


def window(value: object) -> int:
    """Seconds of a completion window: ``24h`` as at OpenAI, or any other number and unit.

    Raises:
        ApiError: 400, it is none, or longer than 30 days.
    """
    try:
        return parse_duration(value)
    except ValueError:
        raise ApiError(
            400,
            "'completion_window' must be '24h', or another number of s, m, h or d, 30d at most.",
            "completion_window",
        ) from None


def metadata(value: object) -> dict[str, str] | None:
    """Up to 16 pairs of texts.

    Raises:
        ApiError: 400, it is something else.
    """
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > 16:
        raise ApiError(400, "'metadata' must be an object with 16 keys at most.", "metadata")
    for key, text in value.items():
        if len(key) > 64 or not isinstance(text, str) or len(text) > 512:
            raise ApiError(
                400,
                "'metadata' maps keys of up to 64 characters to strings of up to 512.",
                "metadata",
            )
    return dict(value)


async def json_body(request: Request) -> dict[str, Any]:
    """The JSON object of a request's body, of which no more than ``MAX_BODY`` bytes are read.

    Raises:
        ApiError: 400, it is none; 408, it comes too slowly; 413, it is larger.
    """
    data = bytearray()
    async for chunk in chunks(request):
        data += chunk
        if len(data) > MAX_BODY:
            raise ApiError(413, f"The body is larger than {MAX_BODY} bytes.")
    try:
        value = msgspec.json.decode(bytes(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body is not a JSON object.")
    return value


def new_batch(body: Mapping[str, Any], endpoints: Collection[str]) -> NewBatch:
    """Parse the body of ``POST /v1/batches``.

    Raises:
        ApiError: 400, something is missing, unknown or wrong.
    """
    for name in body:
        if name not in _CREATE:
            raise ApiError(
                400, f"Unknown parameter: '{name[:64]}'.", name[:64], "unknown_parameter"
            )
    for name in ("input_file_id", "endpoint", "completion_window"):
        if body.get(name) is None:
            raise ApiError(
                400, f"Missing required parameter: '{name}'.", name, "missing_required_parameter"
            )
    endpoint = body["endpoint"]
    if not isinstance(endpoint, str) or endpoint not in endpoints:
        raise ApiError(
            400,
            f"'endpoint' must be one that this server's model has: {', '.join(sorted(endpoints))}.",
            "endpoint",
            "invalid_value",
        )
    if not isinstance(body["input_file_id"], str):
        raise ApiError(400, "'input_file_id' must be a string.", "input_file_id")
    after = body.get("output_expires_after")
    if after is None:
        after = {}
    if not isinstance(after, dict):
        raise ApiError(400, "'output_expires_after' must be an object.", "output_expires_after")
    return NewBatch(
        endpoint=endpoint,
        input_file=body["input_file_id"],
        completion_window=str(body["completion_window"]),
        window_s=window(body["completion_window"]),
        metadata=metadata(body.get("metadata")),
        output_expires_s=lifetime(
            after.get("anchor"), after.get("seconds"), "output_expires_after"
        ),
    )
