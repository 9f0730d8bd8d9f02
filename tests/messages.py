"""Messages that the catalog does not know, for tests that make faults."""

from __future__ import annotations

import logging
from typing import Final

from vllm_ssdkv.cli.explain.catalog import entry_for, letters

_OF_THE_SYSTEM: Final = 10
"""Letters of our own that a message has at least; below it is a path and the system's words."""


def is_of_the_system(message: str) -> bool:
    """Whether it says little that is ours; variable parts are ``ANYTHING``."""
    return len(letters(message)) < _OF_THE_SYSTEM


class Undocumented(logging.Handler):
    """Keeps warnings and errors that the catalog lacks. Benches are not part of an engine.

    Attributes:
        messages: These.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        bench = record.name.startswith("vllm_ssdkv.profiling")
        if not bench and entry_for(record.getMessage()) is None:
            self.messages.append(record.getMessage())
