"""Addresses of nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.base.errors import ConfigError, NodeGoneError
from vllm_ssdkv.base.node_address import Address, SocketAddress


@pytest.mark.parametrize(
    "text",
    [
        "unix:///run/ssdkv.sock",
        "unix:///run/with space/ssdkv.sock",
        "tcp://10.0.0.2:7070",
        "tcp://node-1.example:1",
        "tcp://[::1]:65535",
        "tcp://127.0.0.1:0",
    ],
)
def test_an_address_is_written_as_it_was_read(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/run/ssdkv.sock",
        "unix://run/ssdkv.sock",
        "unix:///run/",
        "unix:///run/s.sock?mode=0666",
        "unix:///" + "long" * 30,
        "unix:///a\0b",
        "tcp://10.0.0.2",
        "tcp://:7070",
        "tcp://10.0.0.2:70700",
        "tcp://10.0.0.2:port",
        "tcp://user@10.0.0.2:7070",
        "tcp://10.0.0.2:7070/store",
        "tcp://[::1:7070",
        "http://10.0.0.2:7070",
    ],
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write unix:///run/ssdkv\.sock or tcp://host:port"):
        Address.parse(text)


@given(st.text(max_size=40) | st.text(max_size=40).map("tcp://{}".format))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = Address.parse(text)
    except ConfigError:
        return
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.2", False),
        ("::ffff:10.0.0.2", False),
        ("fe80::1%eth0", False),
    ],
)
def test_loopback_is_what_never_leaves_the_machine(host: str, *, loopback: bool) -> None:
    assert SocketAddress(0, (host, 7070)).is_loopback is loopback


def test_a_host_without_an_address_is_said() -> None:
    with pytest.raises(NodeGoneError, match="has no address"):
        Address.parse("tcp://no-such-host.invalid:7070").resolve()
