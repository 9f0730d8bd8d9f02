"""Reading the input: where lines are; nothing large in memory, nothing for blanks or a mark."""

from __future__ import annotations

import codecs
import io

from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.batch.lines import read_lines

ENDS = st.sampled_from([b"\n", b"\r\n"])
PIECES = st.lists(st.tuples(st.binary(max_size=30).map(lambda b: b.strip(b"\r\n")), ENDS))


@given(PIECES, st.booleans(), st.booleans())
def test_lines_are_where_they_say(
    pieces: list[tuple[bytes, bytes]], ends_open: bool, has_mark: bool
) -> None:
    data = b"".join(text + end for text, end in pieces)
    if ends_open:
        data = data.removesuffix(b"\n").removesuffix(b"\r")
    data = data.removeprefix(codecs.BOM_UTF8)
    file = codecs.BOM_UTF8 + data if has_mark else data
    lines = list(read_lines(io.BytesIO(file), limit=1000))
    for line in lines:
        assert file[line.offset : line.offset + line.length] == line.text
    expected = [
        (number, text.strip()) for number, text in enumerate(data.split(b"\n"), 1) if text.strip()
    ]
    assert [(line.number, line.text) for line in lines] == expected


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


@given(st.lists(st.sampled_from([b"\n", b" ", b"\r\n", b"\t\n", b"x", b"  y \n"]), max_size=30))
def test_blanks_are_passed_over(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    expected = [(n, text.strip()) for n, text in enumerate(data.split(b"\n"), 1) if text.strip()]
    assert [(line.number, line.text) for line in read_lines(io.BytesIO(data))] == expected
