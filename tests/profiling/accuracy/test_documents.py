"""Documents that every machine has, and what is said where one is missing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.accuracy import documents
from vllm_ssdkv.profiling.accuracy.documents import DOCUMENTS, text_of


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("licences", "GNU GENERAL PUBLIC LICENSE"),
        ("reference", 'The "assert" statement'),
        ("inspect", "def getsourcefile("),
        ("argparse", "class ArgumentParser("),
    ],
)
def test_a_document_is_long_and_what_it_says(name: str, words: str) -> None:
    text = text_of(name)
    assert words in text
    # Tokens of real text have four letters or so: enough for 8,192 of them.
    assert len(text) > 60_000


def test_no_paragraph_of_the_reference_comes_twice() -> None:
    paragraphs = text_of("reference").split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs)


def test_all_are_tested_above() -> None:
    assert set(DOCUMENTS) == {"licences", "reference", "inspect", "argparse"}


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(BenchError, match="document 'novel': any of licences, reference"):
        text_of("novel")


def test_missing_licences_are_named_with_their_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(documents, "LICENCES", tmp_path)
    with pytest.raises(BenchError, match=r"GFDL-1\.3 cannot be read .*package base-files"):
        text_of("licences")


def test_a_missing_reference_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(BenchError, match=r"document reference: .*libpython3-stdlib"):
        text_of("reference")


def test_a_python_without_sources_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match="this Python has no source of its module argparse"):
        text_of("argparse")
