"""Result of a check of ``ssdkv doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity of a finding. Only ``fail`` keeps the product from working."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result.

    Attributes:
        subject: What was looked at, e.g. ``vllm`` or ``/mnt/nvme0: O_DIRECT``.
        text: What was found.
        cure: What to do about it; empty when nothing needs doing.
    """

    subject: str
    level: Level
    text: str
    cure: str = ""


def ok(subject: str, text: str) -> Finding:
    """Nothing needs doing."""
    return Finding(subject, Level.OK, text)


def warn(subject: str, text: str, cure: str) -> Finding:
    """It works, but slower or less safely than it could."""
    return Finding(subject, Level.WARN, text, cure)


def fail(subject: str, text: str, cure: str) -> Finding:
    """It does not work."""
    return Finding(subject, Level.FAIL, text, cure)
