"""Reading the input: where lines are, what is a request, what is not; nothing large in memory."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.batch.lines import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    BatchRequest,
    LineError,
    parse_request,
    prompt_bytes,
    read_lines,
)
from vllm_ssdkv.batch.validation import plan

ENDS = st.sampled_from([b"\n", b"\r\n"])
PIECES = st.lists(st.tuples(st.binary(max_size=30).map(lambda b: b.strip(b"\r\n")), ENDS))


@given(PIECES, st.booleans())
def test_lines_are_where_they_say(pieces: list[tuple[bytes, bytes]], ends_open: bool) -> None:
    data = b"".join(text + end for text, end in pieces)
    if ends_open:
        data = data.removesuffix(b"\n").removesuffix(b"\r")
    lines = list(read_lines(io.BytesIO(data), limit=1000))
    for line in lines:
        assert data[line.offset : line.offset + line.length] == line.text
    expected = [
        (number, text.rstrip(b"\r"))
        for number, text in enumerate(data.split(b"\n"), 1)
        if text.strip()
    ]
    assert [(line.number, line.text.rstrip(b"\r")) for line in lines] == expected


@given(st.lists(st.integers(0, 40), max_size=12), st.booleans())
def test_lines_that_are_too_long_are_named_and_not_held(sizes: list[int], ends_open: bool) -> None:
    limit = 10
    data = b"".join(b"x" * size + b"\n" for size in sizes)
    if ends_open:
        data = data.removesuffix(b"\n")
    lines = list(read_lines(io.BytesIO(data), limit=limit))
    assert [line.number for line in lines] == [i for i, size in enumerate(sizes, 1) if size]
    for line in lines:
        size = sizes[line.number - 1]
        assert len(line.text) == (size if size <= limit else 0)
        assert line.length >= size
        assert (line.length > limit) == (size > limit)


def test_a_line_that_was_too_long_is_bad() -> None:
    with pytest.raises(LineError, match="longer than") as caught:
        parse_request(b"", None)
    assert caught.value.code == "line_too_long"


@given(
    st.one_of(
        st.binary(max_size=60),
        st.recursive(
            st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["custom_id", "method", "url", "body", "stream"]), inner
                )
            ),
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_bytes_are_a_request_or_a_line_error(text: bytes) -> None:
    try:
        request = parse_request(text, CHAT)
    except LineError:
        return
    assert request.endpoint == CHAT
    assert request.custom_id


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    with pytest.raises(LineError):
        parse_request(b"[" * 100_000, None)


def request(endpoint: str, body: dict[str, Any]) -> BatchRequest:
    return BatchRequest("id", endpoint, body)


def test_prompts_that_begin_alike_have_bytes_that_begin_alike() -> None:
    def chat(question: str, **others: object) -> bytes:
        messages = [{"role": "system", "content": "s" * 99}, {"role": "user", "content": question}]
        return prompt_bytes(request(CHAT, {"model": "m", "messages": messages, **others}))

    def common(a: bytes, b: bytes) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))

    assert common(chat("one"), chat("two")) > 99
    # What is no part of the prompt does not count; what keeps KV apart does, from the start.
    assert chat("one", max_tokens=5, user="u") == chat("one")
    for apart in ({"model": "n"}, {"cache_salt": "x"}, {"tools": [{"name": "t"}]}):
        assert common(chat("one"), chat("one", **apart)) < 40
    assert prompt_bytes(request(COMPLETIONS, {"prompt": [1, 2, 3]})).endswith(b"[1,2,3]")
    assert prompt_bytes(request(EMBEDDINGS, {"input": "text"})).endswith(b'"text"')


def test_a_plan_names_bad_lines_and_puts_them_last() -> None:
    def line(custom_id: str, prompt: str, model: str = "m") -> bytes:
        body = {"model": model, "prompt": prompt}
        value = {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}
        return json.dumps(value).encode()

    data = b"\n".join([b"bad", line("a", "short"), b"", line("b", "longer")])
    found = plan(io.BytesIO(data), COMPLETIONS, 10)
    assert found.errors == []
    assert [line.number for line in found.lines] == [1, 2, 4]
    assert [found.lines[i].number for i in found.order.positions] == [4, 2, 1]
    assert (found.bad_lines, found.model) == (1, "m")
    assert [(problem["line"], problem["code"]) for problem in found.bad] == [
        (1, "invalid_json_line")
    ]
    assert plan(io.BytesIO(data + line("c", "x", "n")[1:]), None, 10).model == "m"
    two = plan(io.BytesIO(data + b"\n" + line("c", "x", "n")), None, 10)
    assert two.model is None
