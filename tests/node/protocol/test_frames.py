"""Headers of frames, limits and versions."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.base.errors import ProtocolError
from vllm_ssdkv.node.protocol.frames import (
    DEFAULT_LIMITS,
    HEADER_BYTES,
    HELLO_LIMITS,
    VERSIONS,
    Control,
    Flag,
    FrameLimits,
    Header,
    negotiate,
)

U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
HEADERS = st.builds(
    Header,
    kind=U16,
    version=U16,
    flags=st.sampled_from([Flag.NONE, Flag.ANSWER, Flag.ANSWER | Flag.ERROR]),
    descriptors=U16,
    sequence=U32,
    call_id=U64,
    body_bytes=U32,
    payload_bytes=U32,
)


@given(HEADERS)
def test_a_header_is_read_as_it_was_written(header: Header) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES == 32
    assert Header.unpack(packed) == header


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_are_a_header_or_refused(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert Header.unpack(data).pack() == data


@pytest.mark.parametrize("flags", [Flag.ERROR, 4, 0x8000, 7])
def test_flags_that_mean_nothing_are_refused(flags: int) -> None:
    data = bytearray(Header(16).pack())
    data[8:10] = int(flags).to_bytes(2, "little")
    with pytest.raises(ProtocolError, match="flags") as error:
        Header.unpack(data)
    assert error.value.cause == "flags"


def test_who_speaks_tls_is_told_apart() -> None:
    with pytest.raises(ProtocolError, match="has keys and speaks TLS"):
        Header.unpack(b"\x16\x03\x01" + bytes(29))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"sequence": 6}, "sequence"),
        ({"sequence": 8}, "sequence"),
        ({"body_bytes": HELLO_LIMITS.body + 1}, "size"),
        ({"payload_bytes": 1}, "size"),
        ({"descriptors": 5}, "files"),
        ({"kind": 0}, "kind"),
        ({"kind": 15}, "kind"),
        ({"kind": Control.HEARTBEAT, "body_bytes": 1}, "kind"),
        ({"kind": Control.CREDIT, "flags": Flag.ANSWER}, "kind"),
        ({"kind": Control.GOODBYE, "descriptors": 1}, "kind"),
        ({"kind": Control.REFUSED, "body_bytes": 4096}, "kind"),
    ],
)
def test_what_does_not_belong_is_refused_with_its_cause(
    changes: dict[str, int], cause: str
) -> None:
    good = Header(16, sequence=7, body_bytes=100)
    good.check(HELLO_LIMITS, 7)
    with pytest.raises(ProtocolError) as error:
        replace(good, **changes).check(HELLO_LIMITS, 7)
    assert error.value.cause == cause


@given(HEADERS, U32)
def test_what_passes_is_within_its_limits(header: Header, sequence: int) -> None:
    limits = FrameLimits(1000, 1000)
    try:
        header.check(limits, sequence)
    except ProtocolError:
        return
    assert header.sequence == sequence
    assert max(header.body_bytes, header.payload_bytes) <= 1000


def test_the_largest_message_fits() -> None:
    """Three lists of 65536 numbers and one of keys: a whole `Save`."""
    assert DEFAULT_LIMITS.body >= (3 * 8 + 32) * 65536 + 4096


@given(st.integers(1, 20), st.integers(0, 20), st.integers(1, 20), st.integers(0, 20))
def test_the_newest_common_version_is_taken(a: int, more_a: int, b: int, more_b: int) -> None:
    common = set(range(a, a + more_a + 1)) & set(range(b, b + more_b + 1))
    ours = range(a, a + more_a + 1)
    if common:
        assert negotiate(ours, b, b + more_b) == max(common)
    else:
        with pytest.raises(ProtocolError, match="install releases"):
            negotiate(ours, b, b + more_b)


def test_versions_that_do_not_meet_are_named() -> None:
    with pytest.raises(ProtocolError, match=r"speaks versions 7 to 9 .* this one 1 to"):
        negotiate(VERSIONS, 7, 9)
