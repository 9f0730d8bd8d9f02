"""Images of requests: blocks are keyed by what they show, whatever clients call them."""

from __future__ import annotations

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from tests.connector.events import Make
from tests.connector.simulation import Simulation
from vllm_ssdkv.connector.scheduler import media_contents
from vllm_ssdkv.connector.scheduler.block_keys import BlockKeys
from vllm_ssdkv.connector.scheduler.media_contents import MediaContents

BLOCK = 16
AT = 40
"""First token of the image: two blocks are before it."""
TOKENS = list(range(3, 103))
LIKE_A_HASH = "0123456789abcdef" * 4
HASHER = get_request_block_hasher(BLOCK, sha256)


@pytest.fixture(autouse=True)
def seed() -> None:
    init_none_hash(sha256)


def image(shade: float) -> MultiModalKwargsItem:
    """Tensors that a processor makes of an image."""
    pixels, size = torch.full((3, 4, 4), shade), torch.tensor([4, 4])
    field = MultiModalBatchedField()
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(pixels, field),
            "sizes": MultiModalFieldElem([size, 7], field),
        }
    )


def named(name: str, item: MultiModalKwargsItem | None, at: int = AT) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(item, "image", name, PlaceholderRange(at, 20), name)


def request(*media: MultiModalFeatureSpec, name: str = "a") -> Request:
    return Request(
        name, TOKENS, SamplingParams(), None, mm_features=list(media), block_hasher=HASHER
    )


def keys() -> BlockKeys:
    return BlockKeys(bytes(32), media=MediaContents(BLOCK, seen=True))


@pytest.mark.parametrize("name", ["image-0", LIKE_A_HASH])
def test_another_image_of_the_same_name_is_another(name: str) -> None:
    """In another run of the engine: within one, see below."""
    one, other = (keys().of(request(named(name, image(s)))) for s in (0.1, 0.9))
    assert one[:2] == other[:2] == keys().of(request())[:2], "the text before it"
    assert not set(one[2:]) & set(other[2:])
    assert len({*one[2:], *keys().of(request())[2:]}) == 2 * (len(one) - 2)


def test_the_same_image_is_the_same_whatever_it_is_called() -> None:
    one, other = (keys().of(request(named(name, image(0.1)))) for name in ("a", LIKE_A_HASH))
    assert one == other


def test_texts_are_as_they_were() -> None:
    """Nothing is remembered of them, and nothing is hashed again."""
    store, asked = keys(), request()
    assert store.of(asked) == [bytes(h) for h in asked.block_hashes]
    assert store.known_blocks(asked) is None
    assert not store


def test_a_name_that_stood_for_two_images_is_trusted_no_more() -> None:
    """vLLM keeps what it has computed by that name, and nobody knows of which image."""
    store, first = keys(), request(named("x", image(0.1)))
    second = request(named("x", image(0.9)), name="b")
    store.arrived(first)
    before = store.to_store(first, 6, 0)
    assert store.known_blocks(first) is None
    assert before == store.of(first)
    store.arrived(second)
    for asked in (first, second, request(named("x", image(0.1)), name="c")):
        assert store.known_blocks(asked) == AT // BLOCK
        kept = store.to_store(asked, 6, 0)
        assert kept[:2] == before[:2]
        assert not set(kept[2:]) & set(before)
        assert store.to_store(asked, 6, 3) == kept[3:]
    assert not set(store.of(second)[2:]) & set(before)
    fresh = request(named("y", image(0.1)), name="d")
    assert store.to_store(fresh, 6, 0) == before


@pytest.mark.parametrize(("seen", "item"), [(False, image(0.1)), (True, None)])
def test_images_whose_tensors_are_elsewhere(seen: bool, item: MultiModalKwargsItem | None) -> None:
    store = BlockKeys(media=MediaContents(BLOCK, seen=seen))
    asked, again = (request(named("x", item), name=name) for name in ("a", "b"))
    assert store.known_blocks(asked) == AT // BLOCK
    assert store.of(asked)[:2] == store.of(request(name="text"))[:2]
    assert not set(store.of(asked)[2:]) & set(store.of(again)[2:])


def test_a_session_that_gets_another_image() -> None:
    store, session = keys(), request(named("x", image(0.1)))
    before = store.of(session)
    session.mm_features.append(named("y", image(0.9), at=80))
    session._all_token_ids.extend(range(200, 232))
    session.block_hashes.extend(session._block_hasher(session))
    whole = store.of(session)
    assert whole[: len(before)] == before
    assert len(whole) == (len(TOKENS) + 32) // BLOCK


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_contents, "MAX_NAMES", 3)
    media = MediaContents(BLOCK, seen=True)
    for number in range(10):
        media.note(request(named(str(number), image(0.1))))
    assert len(media._names) == 3


def found(run: Simulation, name: str, *media: MultiModalFeatureSpec) -> int:
    """Blocks that a request found, in HBM or in the store, once it has run."""
    run.add(name, TOKENS, 1, mm_features=list(media))
    run.run()
    run.check_idle()
    return run.began[name] // BLOCK


def test_blocks_behind_an_unknown_image_are_not_stored(reuse: Make) -> None:
    run = reuse()
    # Of a text model vLLM expects no media.
    run.scheduler.max_num_encoder_input_tokens = 64
    run.scheduler.encoder_cache_manager = EncoderCacheManager(64)
    assert found(run, "unknown", named("x", None)) == 0
    assert run.index.gauges()["ready"] == AT // BLOCK
    assert run.scheduler.reset_prefix_cache()
    assert found(run, "text") == AT // BLOCK, "a request without an image finds what is before it"
    assert run.scheduler.reset_prefix_cache()
    assert found(run, "text again") == (len(TOKENS) - 1) // BLOCK
