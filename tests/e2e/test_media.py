"""Images that clients name as they like: an answer is that of the image, whatever it is called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.e2e.models import VOCAB, make_blip2, prompts
from tests.e2e.workload import reuse_mode
from tests.kit.engine import Answer, Engine

BLOCK = 32
TEXT = [token % (VOCAB - 1) for token in prompts((90,), seed=8)[0]]
IMAGE_TOKENS = 16
WHOLE = (len(TEXT) + IMAGE_TOKENS - 1) // BLOCK * BLOCK
"""Tokens that a request finds that finds all it can."""
ROUNDING = 1e-3
SHADE = Image.linear_gradient("L").convert("RGB").resize((40, 30))
CIRCLE = Image.radial_gradient("L").convert("RGB").resize((40, 30))
NOISE = Image.effect_noise((40, 30), 90).convert("RGB")


def ask(engine: Engine, image: Image.Image | None, name: str | None, salt: str = "") -> Answer:
    """The answer to a text behind an image; with a ``salt`` nothing is found."""
    prompt: dict[str, object] = {"prompt_token_ids": TEXT}
    if salt:
        prompt["cache_salt"] = salt
    if image is not None:
        prompt["multi_modal_data"] = {"image": image}
    if name is not None:
        prompt["multi_modal_uuids"] = {"image": [name]}
    (output,) = engine.llm.generate([prompt], engine.sampling(4, logprobs=1), use_tqdm=False)
    engine.settle()
    (text,) = output.outputs
    chances = [{t: p.logprob for t, p in position.items()} for position in text.logprobs]
    return Answer(tuple(text.token_ids), int(output.num_cached_tokens or 0), tuple(chances))


def name_of(engine: Engine, image: Image.Image) -> str:
    """vLLM's own name of an image, which a client can compute as well."""
    prompt = {"prompt_token_ids": TEXT, "multi_modal_data": {"image": image}}
    engine.llm.llm_engine.add_request("named", prompt, engine.sampling(1))
    (request,) = engine.scheduler.requests.values()
    engine.run()
    engine.settle()
    return str(request.mm_features[0].identifier)


def alike(one: Answer, other: Answer) -> bool:
    return one.tokens == other.tokens and all(
        a == pytest.approx(b, abs=ROUNDING)
        for a, b in zip(one.logprobs, other.logprobs, strict=True)
    )


def started(model: Path, store: list[dict[str, object]]) -> Engine:
    return Engine(
        model,
        ssdkv=reuse_mode(store),
        kv_tokens=4096,
        max_model_len=512,
        block_size=BLOCK,
        enable_prefix_caching=False,
    )


def test_names_of_images_say_nothing(
    devices: Callable[..., list[dict[str, object]]], tmp_path: Path
) -> None:
    model, store = make_blip2(tmp_path / "model", image_tokens=IMAGE_TOKENS), devices(1)
    with started(model, store) as engine:
        cold = ask(engine, SHADE, "image-0")
        hashed = ask(engine, SHADE, None)
        assert (cold.cached, hashed.cached) == (0, WHOLE), "the same image, warm"
        assert alike(cold, hashed)
        text = ask(engine, None, None)
        assert (text.cached, ask(engine, None, None).cached) == (0, len(TEXT) // BLOCK * BLOCK)
        own_name = name_of(engine, SHADE)
    with started(model, store) as engine:
        wanted = ask(engine, CIRCLE, "alone", salt="alone")
        got = ask(engine, CIRCLE, "image-0")
        assert got.cached == 0
        assert alike(got, wanted)
        assert not alike(got, cold)
        wanted = ask(engine, NOISE, "alone too", salt="alone")
        got = ask(engine, NOISE, own_name)
        assert got.cached == 0, "a name that looks like vLLM's own hash"
        assert alike(got, wanted)
        again = ask(engine, SHADE, "yesterday's")
        assert again.cached == WHOLE, "the same image, after a restart"
        assert alike(again, cold)
