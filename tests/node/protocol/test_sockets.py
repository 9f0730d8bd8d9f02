"""Rules for listening and connecting: where, and with which keys."""

from __future__ import annotations

import datetime
import os
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from tests.node.protocol.linked import WAIT_S, linked
from vllm_ssdkv.base.errors import (
    CredentialsError,
    NodeError,
    NodeGoneError,
    NodeRefusedError,
    ProtocolError,
)
from vllm_ssdkv.base.node_address import Address, SocketAddress
from vllm_ssdkv.node.protocol.certificates import certificates
from vllm_ssdkv.node.protocol.channel import Channel
from vllm_ssdkv.node.protocol.credentials import Credentials, make_keys
from vllm_ssdkv.node.protocol.messages import Done
from vllm_ssdkv.node.protocol.sockets import Listener, check_credentials, connect

LOCAL = "tcp://127.0.0.1:0"


# ---- nobody serves or asks a network without keys ----


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1"])
def test_no_node_listens_on_a_network_without_keys(host: str) -> None:
    with pytest.raises(CredentialsError, match="ssdkv node keys DIR"):
        Listener(Address.parse(f"tcp://{host}:0"), None)


def test_no_engine_asks_a_network_without_keys() -> None:
    begin = time.monotonic()
    with pytest.raises(CredentialsError, match="ssdkv node keys DIR"):
        connect(Address.parse("tcp://192.0.2.1:7070"), None, WAIT_S)
    assert time.monotonic() < begin + 5


def test_a_name_counts_by_what_it_resolves_to(keys: Path) -> None:
    address = Address.parse("tcp://node.example:7070")
    check_credentials(address, SocketAddress(socket.AF_INET, ("127.0.0.1", 7070)), None)
    elsewhere = SocketAddress(socket.AF_INET, ("10.0.0.2", 7070))
    with pytest.raises(CredentialsError, match=r"node\.example:7070 is not .*10\.0\.0\.2"):
        check_credentials(address, elsewhere, None)
    check_credentials(address, elsewhere, Credentials.load(keys, "engine"))


# ---- keys ----


def outcomes(node: Credentials | None, engine: Credentials | None) -> tuple[NodeError, NodeError]:
    """Errors of a node and of an engine that connects and says something."""
    listener = Listener(Address.parse(LOCAL), node)
    of_engine: list[NodeError] = []
    of_node: list[NodeError] = []

    def serve() -> None:
        channel = listener.accept()
        assert channel is not None
        try:
            channel.handshake(WAIT_S)
            channel.receive(WAIT_S)
            channel.receive(WAIT_S)
        except NodeError as error:
            of_node.append(error)
        channel.close()

    thread = threading.Thread(target=serve)
    thread.start()
    channel: Channel | None = None
    try:
        channel = connect(listener.address, engine, WAIT_S)
        channel.send(Done(), timeout=WAIT_S)
        channel.receive(WAIT_S)
    except NodeError as error:
        of_engine.append(error)
    finally:
        if channel is not None:
            channel.close()
        thread.join(WAIT_S)
        listener.close()
    return of_node[0], of_engine[0]


def test_keys_of_another_pool_are_refused(keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path, 2)
    node, engine = outcomes(Credentials.load(keys, "node"), Credentials.load(tmp_path, "engine"))
    assert isinstance(node, NodeRefusedError)
    assert isinstance(engine, NodeRefusedError)
    assert "ssdkv node keys" in str(engine)


def test_a_node_takes_no_engine_with_keys_of_another_pool(keys: Path, tmp_path: Path) -> None:
    """Though the engine would take the node: its certificate alone is another pool's."""
    make_keys(tmp_path, 2)
    (tmp_path / "authority.pem").write_bytes((keys / "authority.pem").read_bytes())
    node, engine = outcomes(Credentials.load(keys, "node"), Credentials.load(tmp_path, "engine"))
    assert isinstance(node, NodeRefusedError)
    assert "is not taken" in str(node)
    assert isinstance(engine, NodeError)


def test_an_engine_cannot_pass_for_a_node(keys: Path) -> None:
    _, engine = outcomes(Credentials.load(keys, "engine"), Credentials.load(keys, "engine"))
    assert isinstance(engine, NodeRefusedError)
    assert "unsuitable certificate purpose" in str(engine)


def test_a_node_cannot_pass_for_an_engine(keys: Path) -> None:
    node, _ = outcomes(Credentials.load(keys, "node"), Credentials.load(keys, "node"))
    assert isinstance(node, NodeRefusedError)


def test_keys_on_one_side_only_are_said(keys: Path) -> None:
    node, engine = outcomes(Credentials.load(keys, "node"), None)
    assert "both sides need keys" in str(node)
    assert "one side may have keys" in str(engine)
    node, engine = outcomes(None, Credentials.load(keys, "engine"))
    assert isinstance(node, ProtocolError)
    assert "speaks TLS; this one has none" in str(node)
    assert "both sides need keys" in str(engine)


def test_old_keys_are_refused(keys: Path, tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    for name, content in certificates(now - 3 * day, now - day).items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o600)
    _, engine = outcomes(Credentials.load(tmp_path, "node"), Credentials.load(tmp_path, "engine"))
    assert isinstance(engine, NodeRefusedError)
    assert "expired" in str(engine)


def test_an_older_tls_is_refused(keys: Path) -> None:
    import ssl

    credentials = Credentials.load(keys, "engine")
    credentials.context(server=False).minimum_version = ssl.TLSVersion.TLSv1_2
    credentials.context(server=False).maximum_version = ssl.TLSVersion.TLSv1_2
    node, engine = outcomes(Credentials.load(keys, "node"), credentials)
    assert isinstance(node, NodeError)
    assert isinstance(engine, NodeError)


@pytest.mark.parametrize("name", ["authority.pem", "engine.pem", "engine-key.pem"])
def test_a_missing_key_is_named(tmp_path: Path, name: str) -> None:
    make_keys(tmp_path, 2)
    (tmp_path / name).unlink()
    with pytest.raises(CredentialsError, match=f"cannot read {tmp_path / name}"):
        Credentials.load(tmp_path, "engine")


def test_a_key_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path, 2)
    (tmp_path / "node-key.pem").chmod(0o644)
    with pytest.raises(CredentialsError, match="chmod 600"):
        Credentials.load(tmp_path, "node")
    # A group may: secrets of an orchestrator are so.
    (tmp_path / "node-key.pem").chmod(0o640)
    Credentials.load(tmp_path, "node")


def test_files_that_are_no_keys_are_named(tmp_path: Path) -> None:
    make_keys(tmp_path, 2)
    (tmp_path / "engine-key.pem").write_bytes((tmp_path / "node-key.pem").read_bytes())
    with pytest.raises(CredentialsError, match="are no keys of"):
        Credentials.load(tmp_path, "engine")
    (tmp_path / "authority.pem").write_text("nonsense")
    with pytest.raises(CredentialsError, match="are no keys of"):
        Credentials.load(tmp_path, "engine")


# ---- Unix sockets ----


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_a_socket_has_its_mode_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    before = os.umask(0)
    try:
        for umask in (0, 0o077):
            os.umask(umask)
            listener = Listener(Address.parse(f"unix://{tmp_path}/s"), None, mode=mode)
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == mode
            listener.close()
            assert not (tmp_path / "s").exists()
    finally:
        os.umask(before)


def test_a_socket_that_a_killed_node_left_is_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
    assert (tmp_path / "s").is_socket()
    listener = Listener(Address.parse(f"unix://{tmp_path}/s"), None)
    connect(listener.address, None, WAIT_S).close()
    listener.close()


def test_a_node_that_runs_keeps_its_socket(tmp_path: Path) -> None:
    address = Address.parse(f"unix://{tmp_path}/s")
    listener = Listener(address, None)
    with pytest.raises(NodeError, match="another node listens at"):
        Listener(address, None)
    connect(address, None, WAIT_S).close()
    listener.close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("mine")
    with pytest.raises(NodeError, match="is no socket"):
        Listener(Address.parse(f"unix://{tmp_path}/s"), None)
    assert (tmp_path / "s").read_text() == "mine"


def test_an_end_does_not_remove_the_socket_of_a_successor(tmp_path: Path) -> None:
    address = Address.parse(f"unix://{tmp_path}/s")
    first = Listener(address, None)
    (tmp_path / "s").unlink()
    second = Listener(address, None)
    first.close()
    connect(address, None, WAIT_S).close()
    second.close()


def test_a_place_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="cannot listen at"):
        Listener(Address.parse(f"unix://{tmp_path}/not/there/s"), None)
    listener = Listener(Address.parse(LOCAL), None)
    with pytest.raises(NodeError, match="cannot listen at"):
        Listener(listener.address, None)
    listener.close()


# ---- listening and connecting ----


def test_nobody_there_is_said_at_once(tmp_path: Path) -> None:
    listener = Listener(Address.parse(LOCAL), None)
    listener.close()
    for address in (listener.address, Address.parse(f"unix://{tmp_path}/s")):
        begin = time.monotonic()
        with pytest.raises(NodeGoneError, match="nobody answers at"):
            connect(address, None, WAIT_S)
        assert time.monotonic() < begin + 5


@pytest.mark.parametrize("kind", ["unix", "tls"])
def test_a_node_that_does_not_accept_has_a_deadline(tmp_path: Path, keys: Path, kind: str) -> None:
    """A queue of connections that nobody takes: a node that hangs, or is stopped."""
    text = f"unix://{tmp_path}/s" if kind == "unix" else LOCAL
    node = Credentials.load(keys, "node") if kind == "tls" else None
    engine = Credentials.load(keys, "engine") if kind == "tls" else None
    listener = Listener(Address.parse(text), node)
    waiting: list[Channel] = []

    def connect_until_it_fails() -> None:
        while True:
            waiting.append(connect(listener.address, engine, 0.2))

    begin = time.monotonic()
    with pytest.raises(NodeGoneError, match="deadline"):
        connect_until_it_fails()
    assert time.monotonic() < begin + 20
    for channel in waiting:
        channel.close()
    listener.close()


def test_a_listener_stops_while_it_waits(tmp_path: Path) -> None:
    listener = Listener(Address.parse(f"unix://{tmp_path}/s"), None)
    accepted: list[Channel | None] = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept()))
    thread.start()
    listener.stop()
    thread.join(WAIT_S)
    assert accepted == [None]
    assert listener.accept() is None
    listener.close()


def test_a_handshake_that_never_comes_has_a_deadline(keys: Path) -> None:
    listener = Listener(Address.parse(LOCAL), Credentials.load(keys, "node"))
    with socket.create_connection(("127.0.0.1", listener.address.port)):
        channel = listener.accept()
        assert channel is not None
        with pytest.raises(NodeGoneError, match="until the deadline"):
            channel.handshake(0.05)
        channel.close()
    listener.close()


def test_the_wire_shows_nothing_of_a_payload(tmp_path: Path, keys: Path) -> None:
    """Bytes on the wire under TLS are not those that were sent."""
    secret = b"a secret of sixty-four bytes" * 3
    seen = bytearray()
    node = Listener(Address.parse(LOCAL), Credentials.load(keys, "node"))
    tap = socket.create_server(("127.0.0.1", 0))

    def forward(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            seen.extend(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def run_tap() -> None:
        ours, _ = tap.accept()
        theirs = socket.create_connection(("127.0.0.1", node.address.port))
        other = threading.Thread(target=forward, args=(theirs, ours))
        other.start()
        forward(ours, theirs)
        other.join(WAIT_S)
        ours.close()
        theirs.close()

    received: list[bytes] = []

    def serve() -> None:
        channel = node.accept()
        assert channel is not None
        channel.handshake(WAIT_S)
        received.append(channel.receive(WAIT_S).error.encode())
        channel.close()

    threads = [threading.Thread(target=run_tap), threading.Thread(target=serve)]
    for thread in threads:
        thread.start()
    engine = connect(
        Address(None, "127.0.0.1", tap.getsockname()[1]), Credentials.load(keys, "engine"), WAIT_S
    )
    engine.send_error(1, secret.decode(), timeout=WAIT_S)
    threads[1].join(WAIT_S)
    engine.close()
    threads[0].join(WAIT_S)
    assert received == [secret]
    assert len(seen) > len(secret)
    assert b"secret" not in seen
    tap.close()
    node.close()


def test_keys_cannot_be_used_on_a_unix_socket_for_nothing(tmp_path: Path, keys: Path) -> None:
    """With keys for TCP, a Unix socket of the same node takes and needs none."""
    listener = Listener(Address.parse(f"unix://{tmp_path}/s"), Credentials.load(keys, "node"))
    channel = connect(listener.address, None, WAIT_S)
    served = listener.accept()
    assert served is not None
    served.handshake(WAIT_S)
    channel.send(Done(), timeout=WAIT_S)
    assert served.receive(WAIT_S).message == Done()
    for one in (channel, served):
        one.close()
    listener.close()


def test_both_ends_say_what_they_are(tmp_path: Path, keys: Path) -> None:
    with linked("unix", tmp_path, keys) as ends:
        assert ends.engine.is_unix
        assert ends.node.is_unix
        assert ends.engine.peer == f"unix://{tmp_path}/s"
    with linked("tcp", tmp_path, keys) as ends:
        assert not ends.node.is_unix
        assert ends.node.peer.startswith("tcp://127.0.0.1:")
