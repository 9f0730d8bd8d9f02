"""Rules of drafts for blocks that are stored and found again."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from vllm.config import VllmConfig

from tests.connector.events import Make, end, hits, prompt, stored
from tests.connector.rank import BLOCK
from tests.connector.simulation import drafts_like
from vllm_ssdkv.connector.scheduler.speculation import NO_SPECULATION, Speculation


def speculation(config: VllmConfig, method: str, count: int = 3) -> Speculation:
    config = copy.copy(config)
    config.speculative_config = drafts_like(method, count)
    return Speculation.of(config, BLOCK)


def test_an_engine_without_drafts(configs: dict[str, VllmConfig]) -> None:
    config = copy.copy(configs["reuse"])
    config.speculative_config = None
    assert Speculation.of(config, BLOCK) == NO_SPECULATION
    assert NO_SPECULATION.usable(np.arange(3)).tolist() == [0, 1, 2]
    assert NO_SPECULATION.final(100, 100) == 100


def test_what_each_method_needs(configs: dict[str, VllmConfig]) -> None:
    config = configs["reuse"]
    assert speculation(config, "ngram") == Speculation(step_blocks=1)
    assert speculation(config, "eagle") == Speculation(drops_last=True, step_blocks=1)
    # 1 token, 9 drafts and 9 that the head looks ahead.
    assert speculation(config, "eagle", 9).step_blocks == -(-19 // BLOCK)


def test_kv_of_several_modules_is_final_later(configs: dict[str, VllmConfig]) -> None:
    config = copy.copy(configs["reuse"])
    drafts = drafts_like("mtp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(drafts), "use_multi_module_mtp", lambda self: True)
        config.speculative_config = drafts
        found = Speculation.of(config, BLOCK)
    assert (found.drops_last, found.not_final) == (True, 2)
    assert [found.final(*pair) for pair in ((34, 32), (34, 34), (1, 40))] == [30, 32, 0]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("method", "blocks"), [("ngram", 6), ("eagle", 5)])
def test_the_last_block_of_a_hit(reuse: Make, depth: int, method: str, blocks: int) -> None:
    run = reuse(depth=depth, drafts=drafts_like(method))
    stored(run, prompt(100))
    run.add("a", prompt(100), 20)
    end(run, "a")
    assert hits(run, "a") == [blocks]


@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_a_hit_of_one_block(reuse: Make, method: str) -> None:
    """Nothing is left of it for a drafter that works from hidden states: nobody waits for it."""
    run = reuse(drafts=drafts_like(method))
    stored(run, prompt(20))
    run.add("a", prompt(20), 20)
    end(run, "a")
    assert hits(run, "a") == ([] if method == "eagle" else [1])


@pytest.mark.parametrize("depth", [1, 2])
def test_decoded_blocks_are_stored(reuse: Make, depth: int) -> None:
    """But for those that became full in the last step, of which no other step hears."""
    run = reuse(depth=depth, drafts=drafts_like("ngram"))
    request = run.add("a", prompt(40), 100)
    end(run, "a")
    known = len(run.index.lookup(run.ours.keys_of(request)))
    assert (40 + 99) // BLOCK - 1 <= known <= (40 + 99) // BLOCK
