"""Questions over real text: where the answers lie, and what is right."""

from __future__ import annotations

import pytest

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.accuracy import suites
from vllm_ssdkv.profiling.accuracy.documents import DOCUMENTS, PROSE
from vllm_ssdkv.profiling.accuracy.suites import (
    NEEDLES,
    SUITES,
    Request,
    SuiteName,
    requests,
    right,
)

TOKENS = 6000


class Characters:
    """A tokenizer with a token for each character."""

    @staticmethod
    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        """Code points."""
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def asked(suite: SuiteName, count: int = 3) -> list[Request]:
    return requests(suite, Characters, TOKENS, count)


def said(ids: tuple[int, ...]) -> str:
    return "".join(map(chr, ids))


def parts(request: Request) -> list[str]:
    return [said(request.forced[begin:end]) for begin, end in request.parts]


@pytest.mark.parametrize("suite", SUITES)
def test_requests_have_the_length_that_was_asked_for(suite: SuiteName) -> None:
    found = asked(suite)
    assert found == asked(suite)
    assert len(found) == (len(DOCUMENTS) if suite == "text" else 3 * len(PROSE))
    lengths = [len(r.prompt) + len(r.forced) for r in found]
    assert TOKENS - 40 < min(lengths) <= max(lengths) <= TOKENS
    assert len({r.prompt[: TOKENS // 2] for r in found}) == len({r.group for r in found})


def test_documents_go_on_with_their_own_words() -> None:
    for request in asked("text"):
        assert len(request.forced) == 256
        whole = said(request.prompt + request.forced)
        assert DOCUMENTS[request.name]().startswith(whole)
        assert request.parts == ()


def test_a_needle_is_said_once_in_the_first_half() -> None:
    for request in asked("needles", len(NEEDLES)):
        prompt, answer = said(request.prompt), said(request.forced)
        assert prompt.endswith(f"\n\n{request.name}")
        assert prompt.count(request.name) == 2
        before = prompt[: prompt.index(f"{request.name}{answer}\n")]
        others = sum(len(f"\n\n{text} 12345.\n\n") for text in NEEDLES if text in before)
        assert len(before) - others < TOKENS // 2
        assert answer.removeprefix(" ").removesuffix(".").isdigit()
        assert parts(request) == [answer]


def test_fields_of_a_row_are_parts_by_themselves() -> None:
    for request in asked("json", 8):
        prompt = said(request.prompt)
        assert prompt.endswith(f'\n{{"name": "{request.name}",')
        line = next(
            text for text in prompt.splitlines() if text.startswith(f"name: {request.name}")
        )
        row = dict(field.split(": ") for field in line.split(", "))
        assert parts(request) == list(row.values())[1:]
        # The rows that are shown as JSON are others.
        assert prompt.count(request.name) == 2
        assert prompt.index(line) < TOKENS // 2
        assert said(request.forced).startswith(f' "city": "{row["city"]}", "trade": "')


@pytest.mark.parametrize(
    ("same", "count"),
    [
        ([True] * 6, 2),
        ([False, True, True, False, True, True], 2),
        ([True, True, False, True, True, True], 1),
        ([True, False, True, True, True, False], 0),
    ],
)
def test_a_part_is_right_when_all_of_its_tokens_are(same: list[bool], count: int) -> None:
    assert right(((1, 3), (4, 6)), same) == count


def test_a_document_that_is_too_short_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "text_of", lambda name: "short")
    with pytest.raises(BenchError, match="document licences: 5 tokens, not 6000"):
        asked("text")
