"""A fingerprint's digest depends on every field and on nothing else."""

from __future__ import annotations

import hashlib
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.store.format.fingerprint import Fingerprint

values = st.one_of(st.text(max_size=12), st.integers(-(2**70), 2**70))
field_maps = st.dictionaries(st.text(max_size=8), values, max_size=6)


@given(field_maps)
def test_order_of_fields_does_not_matter(fields: dict[str, str | int]) -> None:
    backwards = Fingerprint(dict(reversed(fields.items())))
    assert backwards == Fingerprint(fields)
    assert backwards.digest == Fingerprint(fields).digest
    assert hash(backwards) == hash(Fingerprint(fields))


@given(field_maps, field_maps)
def test_digests_and_differences_tell_fingerprints_apart(
    a: dict[str, str | int], b: dict[str, str | int]
) -> None:
    same = a == b
    assert (Fingerprint(a).digest == Fingerprint(b).digest) is same
    assert (not Fingerprint(a).differences(Fingerprint(b))) is same


@given(field_maps)
def test_json_and_pickle_round_trip(fields: dict[str, str | int]) -> None:
    mine = Fingerprint(fields)
    assert Fingerprint.from_json(mine.canonical) == mine
    assert pickle.loads(pickle.dumps(mine)) == mine


def test_number_and_its_text_differ() -> None:
    assert Fingerprint({"layers": 1}).digest != Fingerprint({"layers": "1"}).digest


def test_canonical_bytes_never_change() -> None:
    mine = Fingerprint({"model": "é", "layers": 2})
    assert mine.canonical == b'{"layers":2,"model":"\\u00e9"}'
    assert mine.digest == hashlib.blake2b(mine.canonical, digest_size=16).digest()
    assert mine.digest.hex() == "fd61fbdd2ad7d844a9f902c2d4e1899e"


def test_differences_name_both_sides() -> None:
    mine = Fingerprint({"dtype": "bfloat16", "layers": 2, "tp": 1})
    other = Fingerprint({"dtype": "float16", "layers": 2, "rope": "x"})
    assert mine.differences(other) == [
        "dtype: 'bfloat16' != 'float16'",
        "rope: '(absent)' != 'x'",
        "tp: 1 != '(absent)'",
    ]


def test_a_fingerprint_cannot_change() -> None:
    source: dict[str, str | int] = {"layers": 2}
    mine = Fingerprint(source)
    source["layers"] = 3
    assert mine.fields == {"layers": 2}
    with pytest.raises(TypeError):
        mine.fields["layers"] = 4  # type: ignore[index]  # on purpose


@pytest.mark.parametrize("value", [True, 1.5, None, ["x"]])
def test_values_with_several_spellings_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="field"):
        Fingerprint({"field": value})  # type: ignore[dict-item]  # on purpose


@pytest.mark.parametrize(
    "data", [b"", b"[1]", b'{"a":1.5}', b'{"a":true}', b"\xff", b"{", b"[" * 100_000]
)
def test_other_json_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="fingerprint"):
        Fingerprint.from_json(data)
