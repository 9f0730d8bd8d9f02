"""Sizes: what people write is read, what has two meanings is refused, and one style is printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.base.sizes import GIB, MIB, approximate_size, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        (1e12, 10**12),
        ("4096", 4096),
        ("64GiB", 64 << 30),
        ("64 GB", 64 * 10**9),
        ("64g", 64 << 30),
        ("64G", 64 << 30),
        ("64gb", 64 * 10**9),
        ("500M", 500 << 20),
        ("1.5TiB", 3 << 39),
        ("0.5T", 1 << 39),
        ("512MiB", 512 << 20),
        ("0.1 GB", 10**8),
        (" 7 kib ", 7168),
        ("12B", 12),
        ("12 b", 12),
    ],
)
def test_sizes_as_people_write_them(text: object, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("64 Gigs", "unknown unit 'Gigs'; known: KiB, MiB, .* KB, MB, .* K, M, G, T, B"),
        ("64Gb", "'Gb' may mean bits; for bytes write GiB or GB"),
        ("64Mib", "'Mib' may mean bits"),
        ("64Mbit", "'Mbit' may mean bits"),
        ("1,5GiB", "a comma may begin decimals or separate thousands"),
        ("1,000", "a comma may begin"),
        ("1.5", "a fraction needs a unit"),
        ("GiB", "not a number"),
        ("-1GiB", "not a number"),
        ("1e3GiB", "not a number"),
        ("", "not a number"),
        (-1, "between 0 and"),
        ("9999999TiB", "between 0 and"),
        (1.5, "not a whole number of bytes"),
        (float("nan"), "not a whole number of bytes"),
        (float("inf"), "not a whole number of bytes"),
        (True, "neither a number nor a text"),
        (None, "neither a number nor a text"),
        ([], "neither a number nor a text"),
    ],
)
def test_what_is_no_size_or_has_two_meanings_is_refused(value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_size(value)


@given(st.integers(0, 1 << 50) | st.integers(0, 1 << 14).map(lambda n: n * 10**9))
def test_formatted_sizes_are_read_back(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


@given(st.integers(0, 1 << 50))
def test_rounded_sizes_are_near(nbytes: int) -> None:
    assert abs(parse_size(approximate_size(nbytes)) - nbytes) <= nbytes / 20


def test_sizes_read_well() -> None:
    exact = (64 * GIB, 3 << 39, 16 * MIB, 1000, 10**10, 999)
    assert [format_size(n) for n in exact] == [
        "64 GiB",
        "1.5 TiB",
        "16 MiB",
        "1 KB",
        "10 GB",
        "999 B",
    ]
    assert [approximate_size(n) for n in (10**9, 16 * MIB, 999)] == ["953.7 MiB", "16 MiB", "999 B"]
