"""``ssdkv explain`` finds a message as people paste it; its page has an anchor for each."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from vllm_ssdkv.cli.docs.messages_page import messages_page
from vllm_ssdkv.cli.explain.catalog import anchors, entries, entry_in
from vllm_ssdkv.cli.main import app

SUSPENDED = "THE STORE IS SUSPENDED: a hit differs by 0.3 in layer 2"


@pytest.mark.parametrize(
    "before",
    [
        *("", "ssdkv: ", "vllm_ssdkv.base.errors.StoreError: "),
        "(EngineCore pid=77) WARNING 11-29 12:00:00 [verify.py:12] ssdkv: ",
    ],
)
def test_a_line_is_found_with_what_stands_before_it(before: str) -> None:
    entry = entry_in(before + SUSPENDED)
    assert entry is not None
    assert entry.text == "THE STORE IS SUSPENDED: …"


def test_cause_cure_and_page_are_printed() -> None:
    result = CliRunner().invoke(app, ["explain", *SUSPENDED.split()])
    assert result.exit_code == 0
    assert re.search(r"^Cause:   a verified hit differs", result.stdout, re.MULTILINE)
    assert re.search(
        r"^Cure:    Suspended stores \(docs/operations.md#", result.stdout, re.MULTILINE
    )
    assert CliRunner().invoke(app, ["explain", "THE STORE IS SUSPENDED"]).stdout == result.stdout
    found = json.loads(CliRunner().invoke(app, ["explain", SUSPENDED, "--json"]).stdout)
    assert found["page"] == "docs/messages.md#the-store-is-suspended"
    assert {"message", "why", "cure", "sees", "moves", "page"} == set(found)


def test_words_that_go_on_are_another_message() -> None:
    assert entry_in("THE STORE IS SUSPENDEDLY so") is None


def test_a_message_may_begin_like_an_option() -> None:
    line = "--block-size 24 is not a multiple of page_tokens (16)"
    result = CliRunner().invoke(app, ["explain", line])
    assert (result.exit_code, "Cure:" in result.stdout) == (0, True)


def test_an_unknown_message_ends_with_1_and_the_nearest() -> None:
    result = CliRunner().invoke(app, ["explain", "the store was suspended"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no such message" in result.stderr
    assert "THE STORE" not in result.stderr or "most like it" in result.stderr
    assert CliRunner().invoke(app, ["explain", "#" * 30]).stderr.endswith("nothing is like it\n")


def test_every_message_is_found_by_its_own_text() -> None:
    for entry in entries():
        assert entry_in(f"12:00:00 ssdkv: {entry.text}") is not None, entry.text


def test_every_message_has_an_anchor_of_its_own() -> None:
    names = [anchor for _, anchor in anchors()]
    page = messages_page()
    assert len(set(names)) == len(names) > 200
    assert all(name and page.count(f'<a id="{name}"></a>') == 1 for name in names)
