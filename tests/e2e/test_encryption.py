"""Encryption at rest with the real vLLM: same tokens, across a restart, and for one key only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.stock import Stock
from tests.e2e.workload import SHORT, kv_tokens, page_mode, reuse_mode
from tests.kit.engine import Answer, Engine, Tokens
from vllm_ssdkv.base.errors import KeyMismatchError

BLOCK, WINDOW, CHUNK = 32, 128, 256
DRAM = "10MiB"
"""As SMALL_DRAM, and room for slots that are encrypted on their way out."""

SECRET = bytes(range(150, 182))


@dataclass
class Store:
    """An encrypted store and what an engine needs to open it."""

    mode: str
    model: Path
    places: list[dict[str, str]]
    key_file: Path

    def start(self, **encryption: object) -> Engine:
        """An engine with this store, and by default with its key."""
        chosen: dict[str, object] = encryption or {"encryption": {"key_file": str(self.key_file)}}
        paged = self.mode == "page"
        options = (
            page_mode(self.places, window=WINDOW, dram=DRAM, **chosen)
            if paged
            else reuse_mode(self.places, **chosen)
        )
        return Engine(
            self.model,
            ssdkv=options,
            kv_tokens=2 * kv_tokens(WINDOW, CHUNK) if paged else 8192,
            max_num_batched_tokens=CHUNK,
            max_model_len=4096,
            # Reuse mode: without HBM's own prefix cache every hit is ours.
            enable_prefix_caching=paged,
        )

    def everything(self) -> bytes:
        """All that lies on the devices."""
        files = (p for place in self.places for p in sorted(Path(place["path"]).iterdir()))
        return b"".join(path.read_bytes() for path in files)


@pytest.fixture(scope="module", params=["reuse", "page"])
def store(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    devices: Callable[..., list[dict[str, str]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Store:
    key_file = tmp_path_factory.mktemp("key") / "key"
    key_file.write_text(SECRET.hex())
    key_file.chmod(0o600)
    return Store(request.param, models["llama"], devices(2), key_file)


@pytest.fixture(scope="module")
def wanted(stock: Stock) -> list[Answer]:
    return stock.answers("llama", SHORT)


@pytest.fixture(scope="module")
def names(store: Store, wanted: list[Answer]) -> tuple[list[bytes], list[bytes]]:
    """Fill the store, and end the engine: block hashes of a prompt, and what is stored for them."""
    with store.start() as engine:
        got = engine.answers(SHORT)
        engine.settle()
        assert [a.tokens for a in got] == [a.tokens for a in wanted]
        engine.add("look", SHORT[0], max_tokens=1)
        (request,) = engine.scheduler.waiting
        found = (
            [bytes(h) for h in request.block_hashes],
            engine.scheduler.connector.scheduler.keys_of(request),
        )
        engine.abort("look")
        engine.settle()
    return found


def hits(batch: list[Tokens]) -> list[int]:
    """All blocks before the last token."""
    return [(len(prompt) - 1) // BLOCK * BLOCK for prompt in batch]


def test_block_hashes_do_not_leave_the_process(
    store: Store, names: tuple[list[bytes], list[bytes]]
) -> None:
    hashes, hidden = names
    assert len(hashes) == len(hidden) == len(SHORT[0]) // BLOCK
    everything = store.everything()
    assert all(name in everything for name in hidden)
    assert not any(block in everything for block in hashes)
    assert SECRET not in everything
    assert SECRET.hex().encode() not in everything


@pytest.mark.usefixtures("names")
def test_a_restart_hits_with_the_same_tokens(
    store: Store, wanted: list[Answer], log: list[str]
) -> None:
    with store.start() as engine:
        got = engine.answers(SHORT)
        assert [a.tokens for a in got] == [a.tokens for a in wanted]
        assert [a.cached for a in got] == hits(SHORT)
        assert engine.ssdkv("hit_tokens", tier="ssd") > 0
        assert engine.ssdkv("checksum_failures") == engine.ssdkv("header_mismatches") == 0
        if store.mode == "page":
            assert engine.ssdkv("context_pages_streamed", tier="ssd") > 0
    text = "\n".join(log)
    assert "encryption AES-256-GCM (OpenSSL" in text
    assert SECRET.hex() not in text


@pytest.mark.usefixtures("names")
def test_without_the_key_the_engine_does_not_start(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyMismatchError, match="the options give no key"):
        store.start(encryption=None)
    monkeypatch.setenv("SSDKV_TEST_KEY", SECRET[::-1].hex())
    with pytest.raises(KeyMismatchError, match="the options give the key"):
        store.start(encryption={"key_env": "SSDKV_TEST_KEY"})
