"""Lines that are requests, that are none, and that ask for too much; without decoding."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.batch import request as request_module
from vllm_ssdkv.batch.lines import LineError
from vllm_ssdkv.batch.request import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    Limits,
    Request,
    Size,
    custom_id_of,
    parse_request,
)


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


def line(endpoint: str, **body: object) -> bytes:
    value = {"custom_id": "id", "method": "POST", "url": endpoint, "body": body}
    return json.dumps(value).encode()


def request(endpoint: str, **body: object) -> Request:
    return parse_request(line(endpoint, **body), endpoint)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(
    st.recursive(
        st.integers() | st.text('[]{}"\\', max_size=9),
        lambda inner: (
            st.lists(inner, max_size=2) | st.dictionaries(st.text('[{"\\'), inner, max_size=2)
        ),
        max_leaves=30,
    ),
    st.integers(0, 34),
    st.sampled_from([("kv_transfer_params", 4), ("metadata", 32)]),
)
def test_fields_have_a_depth(inner: object, around: int, field: tuple[str, int]) -> None:
    name, most = field
    for _ in range(around):
        inner = [inner]
    if depth(inner) <= most:
        assert request(COMPLETIONS, prompt="x", **{name: inner}).body()[name] == inner
        return
    with pytest.raises(LineError, match=f"'{name}' is nested more than {most} deep") as caught:
        request(COMPLETIONS, prompt="x", **{name: inner})
    error = caught.value
    assert (error.code, error.param, error.custom_id) == ("nested_too_deeply", name, "id")


def test_what_is_too_deep_for_any_reader_is_too_deep() -> None:
    head = b'{"custom_id": "id", "method": "POST", "url": "/v1/completions", "body": {"prompt": '
    with pytest.raises(LineError) as caught:
        parse_request(head + b"[" * 100_000 + b"]" * 100_000 + b"}}", COMPLETIONS)
    assert caught.value.code == "nested_too_deeply"


def test_prompts_that_begin_alike_have_bytes_that_begin_alike() -> None:
    def chat(question: str, **others: object) -> bytes:
        messages = [{"role": "system", "content": "s" * 99}, {"role": "user", "content": question}]
        return request(CHAT, model="m", messages=messages, **others).prompt()

    def common(a: bytes, b: bytes) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))

    assert common(chat("one"), chat("two")) > 99
    # What is no part of the prompt does not count; what keeps KV apart does, from the start.
    assert chat("one", max_tokens=5, user="u") == chat("one")
    assert common(chat("one"), request(CHAT, model="n").prompt()) < 40
    for apart in ({"cache_salt": "x"}, {"tools": [{"name": "t"}]}):
        assert common(chat("one"), chat("one", **apart)) < 40
    assert request(COMPLETIONS, prompt=[1, 2, 3]).prompt().endswith(b"[1, 2, 3]")
    assert request(EMBEDDINGS, input="text").prompt().endswith(b'"text"')


@pytest.mark.parametrize(
    ("endpoint", "body", "size"),
    [
        (CHAT, {"messages": "x" * 38, "n": 3, "max_tokens": 7}, Size(10, 3, 7)),
        (CHAT, {"messages": "x" * 38, "max_tokens": 7, "max_completion_tokens": 9}, Size(10, 1, 9)),
        (CHAT, {"messages": "x" * 38, "n": None, "max_tokens": "7"}, Size(10)),
        (COMPLETIONS, {"prompt": "x" * 38}, Size(10)),
        (COMPLETIONS, {"prompt": [5, 6, 7]}, Size(3)),
        (COMPLETIONS, {"prompt": [[5, 6], [7]], "n": 2}, Size(3, 4)),
        (COMPLETIONS, {"prompt": ["a" * 18, "b" * 16]}, Size(10, 2)),
        (EMBEDDINGS, {"input": ["a" * 18, "b" * 16], "max_tokens": 9}, Size(10, 2)),
        (EMBEDDINGS, {"messages": [{"role": "user", "content": "x" * 7}]}, Size(10)),
    ],
)
def test_a_line_tells_what_it_takes(endpoint: str, body: dict[str, Any], size: Size) -> None:
    assert request(endpoint, **body).size == size


LARGE = 150_000
SMALL = Limits(text=100, answers=4, logprobs=15, context=3)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"messages": [{}] * LARGE}, "line_too_complex"),
        ({"messages": [[]] * LARGE}, "line_too_complex"),
        ({"messages": ["x"] * LARGE}, "line_too_complex"),
        ({"messages": {f"{i}": 1 for i in range(LARGE)}}, "line_too_complex"),
        ({f"{i}": 1 for i in range(50_000)}, "field_too_long"),
        ({"chat_template": "x" * LARGE}, "field_too_long"),
        ({"user": "x" * 40_000, "guided_regex": "x" * 40_000}, "field_too_long"),
        ({"stop": ["x"] * 3000}, "field_too_long"),
        ({"bad_words": ["x" * 5000]}, "field_too_long"),
        ({"logit_bias": [1] * 11 * LARGE}, "line_too_complex"),
        ({"messages": [{"content": [{}] * 16_384}]}, "line_too_complex"),
        ({"messages": [{"content": "x"}] * 5500}, "line_too_complex"),
        ({"allowed_token_ids": [100_000] * 300_000}, "field_too_long"),
        ({"messages": "x", "logprobs": True, "top_logprobs": 9}, "too_many_logprobs"),
        ({"messages": "x", "prompt_logprobs": -1}, "too_many_logprobs"),
        ({"messages": "x", "prompt_logprobs": 5, "max_tokens": 1}, "too_many_logprobs"),
        ({"messages": "x", "use_beam_search": True, "n": 4}, "too_many_logprobs"),
        ({"messages": "x", "n": 5}, "too_many_answers"),
        ({"messages": "x", "n": "5"}, "invalid_n"),
        ({"messages": "x", "n": 5.0}, "invalid_n"),
        ({"messages": "x", "n": True}, "invalid_n"),
        ({"messages": "x" * 101}, "prompt_too_long"),
        ({"messages": "x", "model": "m" * 257}, "invalid_model"),
        ({"messages": "x", "model": ["m"]}, "invalid_model"),
        ({"messages": "x", "stream": "no"}, "invalid_stream"),
    ],
)
def test_a_line_that_asks_for_too_much_is_bad(body: dict[str, Any], code: str) -> None:
    with pytest.raises(LineError) as refused:
        parse_request(line(CHAT, **body), CHAT, SMALL)
    assert (refused.value.code, refused.value.custom_id) == (code, "id")
    assert len(str(refused.value)) < 300


def test_long_prompts_tools_and_numbers_are_fine() -> None:
    text = "x" * LARGE
    tools = [{"type": "function", "function": {"name": "f", "description": text}}]
    assert request(
        CHAT, messages=[{"role": "user", "content": '"{[' * 99}] * 3000, tools=[{}] * 90_000
    )
    assert request(CHAT, messages=text, tools=tools, allowed_token_ids=[5] * LARGE)
    assert request(COMPLETIONS, prompt=text)
    assert request(EMBEDDINGS, input=[text])


@pytest.mark.parametrize(
    ("endpoint", "body", "logprobs"),
    [
        (CHAT, {"messages": "x", "logprobs": False, "top_logprobs": None}, 0),
        (CHAT, {"messages": "x", "logprobs": True, "max_tokens": 7}, 14),
        (CHAT, {"messages": "x", "logprobs": True, "top_logprobs": 4, "max_tokens": 7, "n": 2}, 70),
        (CHAT, {"messages": "x", "logprobs": True, "top_logprobs": 1}, 2 * 99),
        (COMPLETIONS, {"prompt": [5] * 30, "logprobs": 2, "max_tokens": 7}, 21),
        (COMPLETIONS, {"prompt": [5] * 30, "logprobs": 2, "max_tokens": 7, "echo": True}, 111),
        (COMPLETIONS, {"prompt": "x" * 998, "prompt_logprobs": 0, "max_tokens": 7}, 99),
        (EMBEDDINGS, {"input": "x", "logprobs": 5}, 0),
    ],
)
def test_log_probabilities_are_counted(endpoint: str, body: dict[str, Any], logprobs: int) -> None:
    limits = Limits(context=99)
    assert parse_request(line(endpoint, **body), endpoint, limits).size.logprobs == logprobs


def test_a_name_written_otherwise_or_twice_counts() -> None:
    for text in (b'{"n": 1, "n": 9}', b'{"\\u006e": 9}'):
        value = line(CHAT).replace(b"{}", text)
        assert (
            parse_request(value, CHAT).size.answers == 9 == parse_request(value, CHAT).body()["n"]
        )


def test_what_is_in_a_text_is_not_counted() -> None:
    messages = '{"a": [1, 2]}\\" \\\\' * LARGE
    for body in ({"messages": messages}, {"messages": [{"role": "user", "content": messages}]}):
        assert request(CHAT, **body).body() == body


@given(
    st.recursive(
        st.none() | st.integers(0, 9) | st.text('\\\\"{[,a', max_size=9),
        lambda inner: st.lists(inner) | st.dictionaries(st.text('\\\\"{[,a', max_size=4), inner),
        max_leaves=30,
    ),
    st.integers(1, 40),
)
def test_parts_are_counted_piece_by_piece(value: object, chunk: int) -> None:
    """As many as there are, wherever the pieces end."""

    def counted(value: object) -> tuple[int, int]:
        if isinstance(value, dict | list):
            items = list(value.values()) if isinstance(value, dict) else value
            inner = [counted(item) for item in items]
            keys = len(value) if isinstance(value, dict) else 0
            parts = 1 + keys + sum(part for part, _ in inner)
            return parts, sum(commas for _, commas in inner) + max(0, len(items) - 1)
        return int(isinstance(value, str)), 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_module, "_CHUNK", chunk)
        found = request_module._counted(json.dumps(value).encode(), 10**6)
        assert found == counted(value)


def test_a_custom_id_is_found_where_nothing_else_is_right() -> None:
    assert custom_id_of(line(CHAT, messages=[[]] * LARGE)) == "id"
    assert custom_id_of(b'{"custom_id": "x", "body": ') is None
    assert custom_id_of(b'{"custom_id": 7}') is None
    assert custom_id_of(b"") is None
