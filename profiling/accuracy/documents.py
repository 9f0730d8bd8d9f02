"""Long texts that are on every machine: licences of Debian and Ubuntu, and Python's own sources.

None is part of this package, and none is downloaded. Their wording differs a little from one
version of Python to the next; compare figures of one machine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.errors import BenchError

LICENCES: Final = Path("/usr/share/common-licenses")
_TEXTS: Final = "GFDL-1.3", "GPL-3", "MPL-2.0"
"""One after the other: 8,192 tokens end in the middle of the second."""


def licences() -> str:
    """Licences as prose.

    Raises:
        BenchError: the machine has none.
    """
    try:
        return "\n\n".join(
            (LICENCES / name).read_text(encoding="utf-8", errors="replace") for name in _TEXTS
        )
    except OSError as error:
        raise BenchError(
            f"document licences: {error.filename} cannot be read ({error.strerror}); Debian and "
            "Ubuntu have it in the package base-files. Copy it there, or leave this document out"
        ) from error


def language_reference() -> str:
    """Python's language reference as ``help()`` prints it: prose with examples.

    Raises:
        BenchError: Python was installed without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise BenchError(
            f"document reference: {error}; install all of Python's standard library "
            "(Debian and Ubuntu: libpython3-stdlib), or leave this document out"
        ) from error
    # Topics contain each other's paragraphs: a model would copy them, and measure nothing else.
    paragraphs = (part for name in sorted(topics) for part in topics[name].split("\n\n"))
    return "\n\n".join(dict.fromkeys(part.strip("\n") for part in paragraphs))


def _source(module: str) -> str:
    found = importlib.util.find_spec(module)
    path = Path(found.origin) if found is not None and found.origin else None
    if path is None or path.suffix != ".py":
        raise BenchError(
            f"document {module}: this Python has no source of its module {module}; take one that "
            "has, or leave this document out"
        )
    return path.read_text(encoding="utf-8")


DOCUMENTS: Final[dict[str, Callable[[], str]]] = {
    "licences": licences,
    "reference": language_reference,
    "inspect": lambda: _source("inspect"),
    "argparse": lambda: _source("argparse"),
}
"""Documents by name: two of prose, two of code."""
PROSE: Final = "licences", "reference"


def text_of(name: str) -> str:
    """A document's text.

    Raises:
        BenchError: there is none of this name, or the machine does not have it.
    """
    if name not in DOCUMENTS:
        raise BenchError(f"document {name!r}: any of {', '.join(DOCUMENTS)}")
    return DOCUMENTS[name]()
