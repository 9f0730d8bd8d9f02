"""Results of starts, one JSON object a line, sorted: the last one of each model and mode."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.errors import BenchError

MODES: Final = ("reuse", "page")
"""Modes that a start tries."""

SERVED: Final = "served"
REFUSED: Final = "refused"
FAILED: Final = "failed"
NO_STOCK: Final = "not started"
"""Stock vLLM does not start this tiny model, so there is nothing to compare with."""
NOT_RUN: Final = "not run"


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """Result of one model in one mode.

    Attributes:
        result: One of this module's constants.
        detail: Tokens that were found, or the sentence of a refusal or error.
    """

    family: str
    architecture: str
    mode: str
    vllm: str
    date: str
    result: str
    detail: str


def read_rows(path: Path) -> list[Row]:
    """Rows of a file; none if there is no file.

    Raises:
        BenchError: a line is not a row.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    try:
        return [Row(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise BenchError(f"{path}: {error}") from error


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write the last row of each model and mode."""
    last = {(row.architecture, row.mode): row for row in rows}
    lines = [json.dumps(asdict(row)) for row in sorted(last.values())]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
    fresh.replace(path)
