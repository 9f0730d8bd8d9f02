"""Parameters of the routes in ``/openapi.json``, which are checked by hand."""

from __future__ import annotations

from typing import Any, Final

from vllm_ssdkv.batch.files import KEPT_S
from vllm_ssdkv.batch.parameters import MIN_LIFETIME_S
from vllm_ssdkv.batch.request import ENDPOINTS


def _query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _object(required: list[str], **properties: object) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": False,
    }


def _body(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema}}}}


_TEXT: Final = {"type": "string"}
_ANCHOR: Final = {"const": "created_at"}
_SECONDS: Final = {"type": "integer", "minimum": MIN_LIFETIME_S, "maximum": KEPT_S}

LIST_FILES: Final = {
    "parameters": [
        _query("after", _TEXT),
        _query("limit", {"type": "integer", "minimum": 1, "maximum": 10_000}),
        _query("order", {"enum": ["desc", "asc"]}),
        _query("purpose", _TEXT),
    ]
}
LIST_BATCHES: Final = {
    "parameters": [
        _query("after", _TEXT),
        _query("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
    ]
}
CREATE_FILE: Final = _body(
    "multipart/form-data",
    _object(
        ["file", "purpose"],
        **{
            "file": {"type": "string", "format": "binary"},
            "purpose": {"const": "batch"},
            "expires_after[anchor]": _ANCHOR,
            "expires_after[seconds]": _SECONDS,
        },
    ),
)
CREATE_BATCH: Final = _body(
    "application/json",
    _object(
        ["input_file_id", "endpoint", "completion_window"],
        input_file_id=_TEXT,
        endpoint={"enum": list(ENDPOINTS)},
        completion_window={"type": "string", "pattern": "^[1-9][0-9]{0,6}[smhd]$"},
        metadata={
            "type": ["object", "null"],
            "maxProperties": 16,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
        output_expires_after=_object(["anchor", "seconds"], anchor=_ANCHOR, seconds=_SECONDS),
    ),
)
