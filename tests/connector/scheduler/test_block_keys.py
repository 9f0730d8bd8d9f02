"""Keys of blocks: bound to weights, settings and adapters; hidden where the store is encrypted."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.messages import RankReport
from vllm_ssdkv.connector.scheduler.block_keys import BlockKeys
from vllm_ssdkv.connector.scheduler.identities import HbmIdentities, RankIdentities
from vllm_ssdkv.connector.scheduler.request_identities import RequestIdentities
from vllm_ssdkv.connector.scheduler.scheduler_parts import EngineFacts
from vllm_ssdkv.store.format.fingerprint import Fingerprint

HASHES = [bytes([n]) * 32 for n in range(5)]
SECRET = bytes(range(32))
NAMESPACE = bytes(range(32, 64))


def request(adapter: int = 0, *, again: bool = False, name: str = "r") -> Request:
    lora = LoRARequest("an adapter", adapter, "/adapter", load_inplace=again) if adapter else None
    found = SimpleNamespace(
        request_id=name,
        block_hashes=HASHES,
        lora_request=lora,
        mm_features=[],
        prompt_embeds=None,
        cache_salt=None,
        resumable=False,
        _block_hasher=lambda one: HASHES[len(one.block_hashes) :],
    )
    return cast(Request, found)


def bound(identity: bytes) -> list[bytes]:
    return [bytes(a ^ b for a, b in zip(h, identity, strict=True)) for h in HASHES]


def hidden(data: bytes) -> bytes:
    return hashlib.blake2b(data, key=SECRET, digest_size=32).digest()


def with_adapter(digest: bytes) -> bytes:
    return hashlib.blake2b(NAMESPACE + digest, digest_size=32).digest()


def keys_with(adapters: dict[int, bytes], name_key: bytes = b"") -> BlockKeys:
    return BlockKeys(NAMESPACE, name_key, adapter=lambda number: adapters.get(number, b""))


def test_keys_are_bound_to_the_namespace() -> None:
    assert BlockKeys().of(request()) == HASHES
    keys = BlockKeys(NAMESPACE)
    assert keys.of(request()) == bound(NAMESPACE)
    assert keys.of(request(), 4, 1) == bound(NAMESPACE)[1:4]
    assert keys.of(request(), 2, 2) == []
    assert not keys, "nothing is remembered of requests without an adapter"


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=4))
def test_hashes_of_any_length_give_keys_of_32_bytes(hashes: list[bytes]) -> None:
    asked = request()
    asked.block_hashes = hashes  # type: ignore[assignment]  # bytes as they are
    found = BlockKeys(NAMESPACE).of(asked)
    assert [len(key) for key in found] == [32] * len(hashes)


def test_keys_are_hidden_under_the_stores_key() -> None:
    named = [hidden(key) for key in bound(NAMESPACE)]
    assert BlockKeys(NAMESPACE, SECRET).of(request()) == named
    with_it = [hidden(key) for key in bound(with_adapter(b"weights"))]
    assert keys_with({1: b"weights"}, SECRET).of(request(1)) == with_it


def test_an_adapter_is_known_by_its_weights() -> None:
    adapters = {1: b"weights", 2: b"weights", 3: b"others"}
    keys = keys_with(adapters)
    one, two, three, base = (keys.of(request(n, name=str(n))) for n in (1, 2, 3, 0))
    assert one == two == bound(with_adapter(b"weights"))
    assert len({*one, *three, *base}) == 3 * len(HASHES)


def test_nothing_is_found_with_an_adapter_that_nobody_has_told_of() -> None:
    adapters: dict[int, bytes] = {}
    keys, asked = keys_with(adapters), request(1)
    assert keys.of(asked) == []
    assert keys.to_store(asked, 5, 0) == []
    adapters[1] = b"weights"
    assert keys.to_store(asked, 5, 0) == keys.of(asked) == bound(with_adapter(b"weights"))


def test_what_is_found_and_what_is_loaded_have_one_key() -> None:
    adapters = {1: b"old"}
    keys, asked = keys_with(adapters), request(1)
    old = keys.of(asked)
    adapters[1] = b"new"
    assert keys.of(asked) == old
    keys.forget(asked.request_id)
    assert keys.of(asked) == bound(with_adapter(b"new")), "a request that starts again"


def test_what_both_weights_computed_is_nobody_elses() -> None:
    adapters = {1: b"old"}
    keys, runs, waits = keys_with(adapters), request(1), request(1, name="told later")
    old = keys.of(runs)
    adapters[1] = b"new"
    keys.adapter_changed([runs, waits])
    mixed = keys.to_store(runs, 5, 0)
    assert keys.to_store(runs, 3, 1) == mixed[1:3]
    assert len({*old, *mixed, *keys.of(waits)}) == 3 * len(HASHES)
    assert keys.private(runs)
    assert not keys.private(waits)
    keys.adapter_changed([waits])
    assert keys.private(waits), "it was bound when it was told of"
    for name in ("r", "told later"):
        keys.forget(name)
    assert not keys


def test_new_weights_find_nothing_older() -> None:
    keys, runs, comes = keys_with({1: b"adapter"}), request(), request(name="comes")
    old, with_it = keys.of(runs), keys.of(request(1, name="adapted"))
    keys.rebind(bytes(32), [runs])
    assert keys.of(comes) == HASHES
    assert not {*keys.to_store(runs, 5, 0)} & {*old, *HASHES}
    assert not {*keys.of(request(1, name="adapted"))} & {*with_it}
    assert keys.to_store(comes, 5, 0) == HASHES


def test_an_adapter_that_is_read_anew_for_every_step() -> None:
    keys, asked = keys_with({1: b"weights"}), request(1, again=True)
    assert keys.of(asked) == []
    assert keys.private(asked)
    own = keys.to_store(asked, 5, 0)
    assert len({*own, *bound(with_adapter(b"weights"))}) == 2 * len(HASHES)


def test_what_a_resumable_request_computes_with_drafts_is_its_own() -> None:
    """A turn that ends among accepted drafts leaves their KV where the next input's belongs."""
    once, resumable = request(), request(name="s")
    resumable.resumable = True
    assert BlockKeys().to_store(resumable, 5, 0) == HASHES
    keys = BlockKeys(apart=True)
    assert [keys.private(each) for each in (once, resumable)] == [False, True]
    assert keys.to_store(once, 5, 0) == HASHES
    stored = keys.to_store(resumable, 5, 0)
    assert not set(stored) & set(HASHES)
    assert keys.to_store(resumable, 5, 2) == stored[2:]
    assert keys.of(resumable) == HASHES
    keys.forget("s")
    assert not keys
    assert not set(keys.to_store(resumable, 5, 0)) & set(stored)


def test_blocks_that_a_choice_decoded_bind_it() -> None:
    keys, chose, exact = keys_with({1: b"weights"}), request(), request(name="exact")
    plain = keys.of(exact)
    assert keys.of(chose) == plain
    keys.bind_choice(chose, 2, b"choice")
    keys.bind_choice(chose, 4, b"choice")
    found = keys.of(chose)
    assert found[:2] == plain[:2]
    assert not set(found[2:]) & set(plain)
    for start in range(5):
        for stop in range(start, 6):
            assert keys.of(chose, stop, start) == keys.to_store(chose, stop, start)
            assert keys.of(chose, stop, start) == found[start:stop]
    for block in range(2, 5):
        assert keys.chosen(exact, block, b"choice") == [found[block]]
        assert keys.chosen(exact, block, b"other") not in ([found[block]], [plain[block]])
        assert keys.chosen(request(1, name="1"), block, b"choice") != [found[block]]
    assert keys.chosen(exact, 5, b"choice") == []
    keys.forget(chose.request_id)
    assert keys.of(chose) == plain


def embedded(
    dtype: torch.dtype = torch.bfloat16,
    tokens: Sequence[bool] | None = None,
    salt: str | None = None,
    row: int = 1,
) -> list[bytes]:
    """Keys of a prompt of embeddings, some of whose positions may have tokens in their place."""
    init_none_hash(sha256)
    rows = torch.full((40, 2), row, dtype=torch.int16).view(dtype)
    mask = None if tokens is None else list(tokens)
    return BlockKeys(NAMESPACE).of(
        Request(
            "a",
            None if mask is None else [0] * 40,
            SamplingParams(),
            None,
            prompt_embeds=rows,
            prompt_is_token_ids=mask,
            cache_salt=salt,
            block_hasher=get_request_block_hasher(8, sha256),
        )
    )


def test_embeddings_are_told_apart_from_tokens_and_from_other_types() -> None:
    """The tokens of positions with embeddings are 0 to vLLM, as those of text may be."""
    cases = [
        embedded(),
        embedded(torch.float16),
        embedded(row=2),
        embedded(salt="tenant"),
        embedded(tokens=[True] * 40),
        embedded(tokens=[False] * 20 + [True] * 20),
        embedded(tokens=[True] * 20 + [False] * 20),
    ]
    assert len({key for keys in cases for key in keys}) == len(cases) * 5
    assert embedded() == embedded()
    assert embedded(tokens=[True] * 40) == embedded(tokens=[True] * 40)


class TestRanks:
    """Reports of ranks."""

    @staticmethod
    def of(**settings: str) -> RankIdentities:
        return RankIdentities(Fingerprint(settings), [b"one", b"two"])

    def test_the_namespace_is_of_all_ranks_and_settings(self) -> None:
        found = {
            self.of().namespace,
            self.of(vllm="0.32").namespace,
            self.of(vllm="0.33").namespace,
            RankIdentities(Fingerprint({}), [b"two", b"one"]).namespace,
            RankIdentities(Fingerprint({}), [b"one"]).namespace,
        }
        assert len(found) == 5
        assert self.of(vllm="0.32").namespace in found

    def test_weights_of_one_rank(self) -> None:
        ranks = self.of()
        before = ranks.namespace
        assert ranks.told([(0, RankReport())]) == (False, set())
        assert ranks.told([(1, RankReport(weights=b"new", changes=1))]) == (True, set())
        assert ranks.changes == (0, 1)
        assert ranks.namespace != before
        ranks.told([(1, RankReport(weights=b"two", changes=2))])
        assert (ranks.namespace, ranks.changes) == (before, (0, 2))

    def test_an_adapter_is_known_when_all_ranks_have_it(self) -> None:
        ranks = self.of()
        assert ranks.told([(0, RankReport(adapters={7: (b"a", 1)}))]) == (False, {7})
        assert ranks.adapter(7) is None
        ranks.told([(1, RankReport(adapters={7: (b"b", 4)}))])
        found = ranks.adapter(7)
        assert found is not None
        assert (found.digests, found.changes) == ((b"a", b"b"), (1, 4))
        assert ranks.adapter_digest(7) == b"ab"
        ranks.told([(0, RankReport(adapters={7: (b"", 2)}))])
        assert ranks.adapter(7) is None
        assert ranks.adapter_digest(7) == b""

    def test_requests_wait_the_longer_the_further_vllm_plans(self) -> None:
        def waited(ahead: int) -> int:
            engine = EngineFacts(16, 256, 2, steps_ahead=ahead)
            found = RequestIdentities(self.of(), engine, b"", Counters())
            return sum(found.awaits(request(1), step) is not None for step in range(20))

        assert [waited(ahead) - waited(1) for ahead in (2, 5)] == [1, 4]


def hbm_with(*named: tuple[bytes, int]) -> HbmIdentities:
    """Identities of an HBM with blocks from 100 on. ``named``: hash and group of each."""
    hbm, known = HbmIdentities(NAMESPACE), BlockHashToBlockMap()
    blocks = [SimpleNamespace(block_hash=None)]
    for number, (block_hash, group) in enumerate(named, 100):
        name = make_block_hash_with_group_id(BlockHash(block_hash), group)
        known.insert(name, KVCacheBlock(number))
        blocks.append(SimpleNamespace(block_hash=cast(Any, name)))
    pool: Any = SimpleNamespace(blocks=blocks, cached_block_hash_to_block=known)
    hbm.pool, hbm.groups = pool, 2
    return hbm


def forget_what_is_gone(hbm: HbmIdentities, identity: bytes) -> None:
    """Have blocks computed that HBM does not keep, until something is forgotten."""
    for number in range(5000):
        hbm.holds([number.to_bytes(32, "big")], identity)
    assert hbm.remembered < 4200


class TestHbm:
    """Identities of the blocks that HBM keeps."""

    def test_without_changes_nothing_is_remembered(self) -> None:
        hbm = HbmIdentities(NAMESPACE)
        hbm.holds(HASHES, NAMESPACE)
        assert not hbm.began_with(HASHES, NAMESPACE)
        assert hbm.remembered == 0

    def test_blocks_of_other_weights_are_told_apart(self) -> None:
        hbm, new = hbm_with(*((one, 0) for one in HASHES)), bytes(32)
        hbm.weights_changed(new)
        assert hbm.began_with(HASHES[:1], new), "of which nothing was said"
        hbm.holds(HASHES[:2], new, (range(100, 105), []))
        assert not hbm.began_with(HASHES[:2], new)
        assert hbm.began_with(HASHES[:3], new)
        assert hbm.began_with(HASHES[:2], NAMESPACE)
        hbm.holds(HASHES[1:2], b"")
        assert hbm.began_with(HASHES[:2], new), "what several have computed is nobody's"

    def test_an_adapters_blocks_are_told_from_others(self) -> None:
        hbm = hbm_with(*((one, 0) for one in HASHES))
        hbm.holds(HASHES, b"adapter", (range(100, 105), []))
        assert hbm.began_with(HASHES, b"another in its place")
        assert not hbm.began_with(HASHES, b"adapter")

    def test_an_older_block_of_the_same_hash_counts(self) -> None:
        hbm, new = HbmIdentities(NAMESPACE), bytes(32)
        hbm.groups = 2
        known = BlockHashToBlockMap()
        pool: Any = SimpleNamespace(blocks=[], cached_block_hash_to_block=known)
        hbm.pool = pool
        hbm.weights_changed(new)
        older, own = KVCacheBlock(5), KVCacheBlock(9)
        name = make_block_hash_with_group_id(BlockHash(HASHES[0]), 1)
        for block in (older, own):
            known.insert(name, block)
        hbm.holds(HASHES[:1], new, ([8], [9]))
        assert hbm.began_with(HASHES[:1], new), "vLLM gives others the older one"
        known.pop(name, older.block_id)
        hbm.holds(HASHES[:1], new, ([8], [9]))
        assert not hbm.began_with(HASHES[:1], new)

    def test_what_hbm_has_given_up_is_forgotten(self) -> None:
        hbm = hbm_with((HASHES[0], 0))
        hbm.holds(HASHES[:1], b"adapter", ([100], []))
        forget_what_is_gone(hbm, b"adapter")
        assert not hbm.began_with(HASHES[:1], b"adapter")
        assert hbm.began_with(HASHES[:1], NAMESPACE), "of what is there nothing is forgotten"

    @pytest.mark.parametrize("identity", [b"adapter", bytes(32)], ids=["adapter", "weights"])
    def test_a_hash_without_a_block_says_nothing(self, identity: bytes) -> None:
        """Full attention has a block under every other hash. Of a window's blocks, under each, the
        last one is there."""
        hbm = hbm_with((HASHES[1], 0), (HASHES[3], 0), (HASHES[3], 1))
        hbm.holds(HASHES[:4], identity, ([100, 101], [102]))
        forget_what_is_gone(hbm, identity)
        assert not hbm.began_with(HASHES[:4], identity)

    def test_an_older_block_of_a_window_counts(self) -> None:
        """It lies under a hash that names no block of full attention."""
        hbm, new = hbm_with((HASHES[1], 0), (HASHES[0], 1), (HASHES[1], 1)), bytes(32)
        hbm.weights_changed(new)
        hbm.holds(HASHES[1:2], new, ([100], [102]))
        assert not hbm.began_with(HASHES[1:2], new)
        assert hbm.began_with(HASHES[:2], new)


def hashed(tokens: list[int], lora: LoRARequest | None) -> Request:
    """A request of vLLM's own, with blocks of four tokens."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(4, sha256)
    return Request("a", tokens, SamplingParams(), None, lora_request=lora, block_hasher=hasher)


def test_an_adapter_is_the_same_whatever_it_is_called() -> None:
    """vLLM's hashes have its name and path in them."""
    names = (LoRARequest("kind", 1, "/adapter"), LoRARequest("helpful", 2, "/elsewhere"))
    requests = [hashed(list(range(13)), lora) for lora in names]
    assert requests[0].block_hashes != requests[1].block_hashes
    one, other = (keys_with({1: b"same", 2: b"same"}).of(request) for request in requests)
    assert len(one) == 3
    assert one == other
    assert one != keys_with({1: b"different"}).of(requests[0])
    assert one != keys_with({1: b"same"}).of(hashed(list(range(13)), None))
    assert one != keys_with({1: b"same"}).of(hashed(list(range(1, 14)), names[0]))


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 3), max_size=9)), max_size=6))
def test_keys_follow_tokens_that_come_and_are_taken_back(
    turns: list[tuple[int, list[int]]],
) -> None:
    """As of sessions, whose last tokens vLLM takes back before more come."""
    lora = LoRARequest("kind", 1, "/adapter")
    keys, request = keys_with({1: b"same"}), hashed([0], lora)
    for taken, more in turns:
        tokens = list(request.all_token_ids)[: max(1, request.num_tokens - taken)]
        request._all_token_ids[:] = tokens
        del request.block_hashes[len(tokens) // 4 :]
        request.append_output_token_ids(more)
        afresh = keys_with({1: b"same"}).of(hashed(list(request.all_token_ids), lora))
        assert keys.of(request) == afresh
    keys.forget("a")
    assert not keys
