"""Every file, module and class that a document, a docstring or a comment names exists."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.kit.sources import parsed
from tests.test_repository import ROOT, VENDORED, tracked

SUFFIXES = "py|pyi|cpp|hpp|sv|svh|sh|md|toml|lock|tcl"
FILE = re.compile(
    rf"(?<![\w/.$~<>{{}}*:-])((?:[\w.-]+/)*[\w-]+\.(?:{SUFFIXES}))\b(?!`?, [0-9a-f]{{7}}\b)"
)
"""A file's name. What a commit follows is the file of another project."""

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([\w.]+)`")
CLASS = re.compile(r"`([A-Z][a-z]+(?:[A-Z][a-z]*)+)(?:\(\))?`")
COMMENTS = {".cpp": "//", ".hpp": "//", ".sv": "//", ".svh": "//", ".sh": "#", ".yaml": "#"}

ELSEWHERE = {
    "B.py": "an example in a guide",
    "tables.md": "an example in a guide",
    "convert_hf_to_gguf.py": "llama.cpp",
    "llama.cpp": "a project's name",
    "pytorch_backend.py": "FlexGen",
    "zero_inference/run_model.py": "DeepSpeed",
    "utils.py": "what there is not",
    "_native.py": "a test's own",
}
"""Files that are named and are not ours."""

FOREIGN_CLASSES = {"Localhost", "KVCacheCoordinator"}

GONE = "Gone" + "Class"


def read(name: str) -> Iterator[tuple[int, str]]:
    """Lines of documents, docstrings and comments of a file, with their numbers."""
    suffix = Path(name).suffix
    if suffix not in {".md", ".py", ".pyi", *COMMENTS}:
        return
    text = (ROOT / name).read_text()
    if suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
    elif suffix in (".py", ".pyi"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            documents = token.type == tokenize.STRING and '"""' in token.string[:4]
            if documents or token.type == tokenize.COMMENT:
                yield from enumerate(token.string.splitlines(), token.start[0])
    elif suffix in COMMENTS:
        for number, line in enumerate(text.splitlines(), 1):
            yield number, line.partition(COMMENTS[suffix])[2]


@cache
def endings() -> frozenset[str]:
    """Paths of all files from each of their folders on: `store/open.py` names one of them."""
    paths = [name.split("/") for name in tracked()]
    return frozenset("/".join(path[i:]) for path in paths for i in range(len(path)))


@cache
def identifiers() -> frozenset[str]:
    """Names that occur in code, and parts of the strings that are no docstrings."""
    found: set[str] = set()
    for name in tracked():
        suffix = Path(name).suffix
        if suffix in (".py", ".pyi"):
            for node in ast.walk(parsed(ROOT / name)):
                match node:
                    case ast.Name(id=word) | ast.Attribute(attr=word):
                        found.add(word)
                    case ast.ClassDef(name=word) | ast.FunctionDef(name=word):
                        found.add(word)
                    case ast.alias(name=word):
                        found.update(word.split("."))
                    case ast.Constant(value=str(text)) if " " not in text:
                        found.update(re.findall(r"\w+", text))
        elif suffix in (".cpp", ".hpp", ".sv", ".svh"):
            found.update(re.findall(r"\w+", re.sub(r"//.*", "", (ROOT / name).read_text())))
    return frozenset(found)


@cache
def sentences() -> list[tuple[str, int, str]]:
    """All of ours: file, line, text."""
    # The changelog says what was; vendored code speaks for itself.
    names = [name for name in tracked() if not name.startswith((VENDORED, "CHANGELOG"))]
    return [(name, *line) for name in names for line in read(name)]


def missing_files(name: str, text: str) -> list[str]:
    return [
        path
        for path in FILE.findall(text)
        if path not in endings()
        and path not in ELSEWHERE
        and not path.startswith(("vllm/", "build/", "../"))
        and not (ROOT / name).parent.joinpath(path).exists()
    ]


def missing_names(text: str) -> list[str]:
    """Classes and modules that the text names and that no code has."""
    named = {*ROLE.findall(text), *CLASS.findall(text)}
    return [
        word
        for word in sorted(named)
        if (last := word.rpartition(".")[2]) not in identifiers()
        and last not in FOREIGN_CLASSES
        and word.replace(".", "/") + ".py" not in endings()
        and word.replace(".", "/") + "/__init__.py" not in endings()
    ]


def test_files_that_are_named_exist() -> None:
    found = [
        f"{name}:{number}: {path}"
        for name, number, line in sentences()
        for path in missing_files(name, line)
    ]
    assert found == []


def test_classes_and_modules_that_are_named_exist() -> None:
    found = [
        f"{name}:{number}: {word}"
        for name, number, line in sentences()
        if name.endswith((".md", ".py", ".pyi"))
        for word in missing_names(line)
    ]
    assert found == []


def test_what_is_gone_is_noticed() -> None:
    assert missing_files("docs/x.md", "see `store/no_such.py` and `store/open.py`") == [
        "store/no_such.py"
    ]
    assert missing_names(f"a :class:`{GONE}` or `{GONE}s`, an :class:`OptionModel`") == [
        GONE,
        f"{GONE}s",
    ]
