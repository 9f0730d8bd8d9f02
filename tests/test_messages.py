"""Every error and warning is in the catalog, with its cure, and nothing else is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.kit.sources import parsed
from tests.messages import is_of_the_system
from vllm_ssdkv.base import errors
from vllm_ssdkv.cli.explain.catalog import ANYTHING, Entry, entries, entry_for

PACKAGE = Path(__file__).parents[1] / "vllm_ssdkv"
ERRORS = {name for name in dir(errors) if name.endswith("Error")}
ERRORS |= {"Obstacle", "refusal_of_layer"}  # they make errors
LINES_OF_ANOTHER = ("compatibility.py", "speculation.py")
"""Obstacles there are lines of the error that says in which mode the connector cannot start."""
OF_COMMANDS = (
    "offline_store.py",
    "repair.py",
    "remove.py",
    "slot_check.py",
    "offline.py",
    "output_log.py",
    "shared_files.py",
    "resume.py",
)
"""Parts of ``ssdkv``'s own commands: they end with their message, which says the way out."""


@cache
def modules() -> tuple[tuple[Path, ast.Module], ...]:
    found = sorted(PACKAGE.rglob("*.py"))
    paths = [path for path in found if "cli" not in path.relative_to(PACKAGE).parts]
    return tuple((path, parsed(path)) for path in paths)


def text_of(node: ast.expr) -> str:
    """A message as it is in the code, with ``ANYTHING`` for what is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return ANYTHING


def said(levels: set[str]) -> Iterator[tuple[str, str]]:
    """Where something is logged or raised, and its text."""
    for path, module in modules():
        for node in ast.walk(module):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name, where = node.func, f"{path.name}:{node.lineno}"
            if isinstance(name, ast.Attribute) and ast.unparse(name.value) == "logger":
                if name.attr in levels:
                    text = re.sub(r"%(?:\.\d+)?[sdgfr]", ANYTHING, text_of(node.args[0]))
                    yield where, text.replace("%%", "%")
            elif isinstance(name, ast.Name) and name.id == "checked_options":
                yield where, text_of(node.args[2]) + ":" + ANYTHING  # its errors begin so
            elif isinstance(name, ast.Name) and name.id in ERRORS:
                elsewhere = OF_COMMANDS + (LINES_OF_ANOTHER if name.id == "Obstacle" else ())
                if path.name not in elsewhere:
                    yield where, text_of(node.args[0])


@cache
def all_texts() -> tuple[str, ...]:
    texts = (text for _, text in said({"info", "warning", "error", "exception"}))
    return tuple(re.sub(r"^(?:ssdkv|batches): ", "", text) for text in texts)


def test_every_message_has_its_cure() -> None:
    said_here = list(said({"warning", "error", "exception"}))
    assert len(said_here) > 150
    missing = [
        (where, text)
        for where, text in said_here
        if not is_of_the_system(text) and entry_for(text) is None
    ]
    assert missing == []


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.text)
def test_every_entry_is_a_message(entry: Entry) -> None:
    assert any(map(entry.pattern.match, all_texts()))
    assert entry.message.cure
