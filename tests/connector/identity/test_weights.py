"""Weights and adapters that change in a running engine: nothing is found that others computed.

The simulation's workers compute other KV with other weights; what they compute from KV of others,
as vLLM lets requests do, must never be found.
"""

from __future__ import annotations

import random

import pytest
from vllm.lora.request import LoRARequest

from tests.connector.events import Make, begin, prompt
from tests.connector.rank import BLOCK
from tests.connector.simulation import MIXED, Simulation

BLOCKS = 100 // BLOCK
OLD, NEW, OTHER = range(3)
READS_NOTHING = {"prompt_logprobs": 1}
"""Options of requests for which vLLM does not look into its prefix cache."""


@pytest.fixture(params=["page", "reuse"])
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.getfixturevalue(request.param)
    return found


def ask(run: Simulation, *, right: bool = True, lora: LoRARequest | None = None) -> int:
    """Blocks that were found for a prompt of 100 tokens, whose answer must be ``right``."""
    name = f"request {len(run.requests)}"
    run.add(name, prompt(100), 4, lora_request=lora)
    run.run()
    if right:
        run.check_answers([name])
        assert name not in run.mixed
    check(run)
    return run.began[name] // BLOCK


def check(run: Simulation) -> None:
    """Whatever can be found is what its key stands for."""
    for rank in run.ranks:
        for slot in rank.slots.values():
            if slot.key in run.content:
                assert slot.symbols == run.content[slot.key]
                assert MIXED not in slot.symbols
    run.check_idle()


def forget_hbm(run: Simulation) -> None:
    """As ``LLM.reset_prefix_cache()`` does, of which vLLM does not tell connectors."""
    assert run.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_weights_find_their_own(make: Make, depth: int, ranks: int) -> None:
    """Also when the old ones come back. Only HBM's own cache is reset."""
    run = make(slots=60, hbm_blocks=60, depth=depth, ranks=ranks)
    for weights in (OLD, NEW, OLD, NEW, OTHER, OLD):
        run.reload(weights)
        ask(run)  # which tells of the weights
        forget_hbm(run)
        assert ask(run) == BLOCKS
        forget_hbm(run)


def test_what_is_found_first_after_a_reload(make: Make) -> None:
    """The scheduler hears of new weights with the first load or store: that load is refused."""
    run = make(slots=60, hbm_blocks=60)
    assert [ask(run), forget_hbm(run), ask(run)] == [0, None, BLOCKS]
    forget_hbm(run)
    run.reload(NEW)
    assert ask(run) == 0
    forget_hbm(run)
    assert ask(run) == BLOCKS, "what the first request computed is of the new weights alone"
    forget_hbm(run)
    assert run.ours.counters.total("weights_changed") == 1


def test_an_edit_that_only_a_digest_shows(make: Make) -> None:
    """It is taken at the reset after the edit. What was stored since the digest before may be of
    either weights, and is not found by anybody."""
    run = make(slots=60, hbm_blocks=60)
    for rank in run.ranks:
        rank.blind = True
    assert [ask(run), forget_hbm(run), ask(run)] == [0, None, BLOCKS]
    run.reload(NEW)
    run.empty_hbm()
    run.add("old keys", prompt(100, 1), 4)
    run.run()
    forget_hbm(run)
    assert ask(run) == 0
    forget_hbm(run)
    assert ask(run) == BLOCKS, "these are of the new weights alone"
    run.reload(OLD)
    forget_hbm(run)
    assert ask(run) == BLOCKS, "what was stored before the last digest of the old ones"
    run.add("again", prompt(100, 1), 4)
    run.run()
    run.check_answers(["again"])
    assert run.began["again"] == 0
    check(run)


def test_nobody_resets_hbm(reuse: Make) -> None:
    """vLLM goes on with KV of the old weights in HBM. What comes of that is not stored."""
    run = reuse(slots=60, hbm_blocks=60)
    ask(run)
    run.reload(NEW)
    longer = prompt(100) + prompt(60, 1)
    for name in ("a", "b"):
        run.add(name, longer, 4)
        run.run()
        check(run)
        assert name in run.mixed
    forget_hbm(run)
    run.add("c", longer, 4)
    run.run()
    run.check_answers("c")
    forget_hbm(run)
    run.add("d", longer, 4)
    run.run()
    run.check_answers("d")
    assert run.began["d"] == (len(longer) - 1) // BLOCK * BLOCK


def test_a_request_that_leaves_hbm_alone(make: Make) -> None:
    """It computes anew what HBM has of the old weights, which vLLM goes on giving to others."""
    run = make(slots=60, hbm_blocks=60)
    ask(run)
    run.reload(NEW)
    ask(run, right=False)
    run.add("reads nothing", prompt(100), 4, sampling=READS_NOTHING)
    run.run()
    check(run)
    assert run.began["reads nothing"] == 0
    run.add("longer", prompt(100) + prompt(60, 1), 4)
    run.run()
    check(run)
    forget_hbm(run)
    assert ask(run) == BLOCKS
    forget_hbm(run)
    run.add("again", prompt(100) + prompt(60, 1), 4)
    run.run()
    run.check_answers(["again"])
    check(run)


def test_a_request_that_runs_meanwhile(make: Make) -> None:
    """Its KV is of both weights, and nobody else's."""
    run = make(slots=60, hbm_blocks=60)
    run.add("a", prompt(100), 60)
    begin(run, "a")
    run.reload(NEW)
    run.run()
    check(run)
    assert "a" in run.mixed
    forget_hbm(run)
    assert ask(run) == 0
    forget_hbm(run)
    run.reload(OLD)
    ask(run)
    forget_hbm(run)
    assert ask(run) == BLOCKS


def adapter(number: int = 1, *, again: bool = False) -> LoRARequest:
    return LoRARequest("helpful", number, "/adapter", load_inplace=again)


def test_an_adapter_whose_files_are_replaced_after_it_was_loaded(make: Make) -> None:
    """It is known by what is in memory, not by what its files say."""
    run = make(slots=60, hbm_blocks=60)
    run.files[1] = OLD
    run.load_adapter(1)
    run.files[1] = NEW
    assert ask(run, lora=adapter()) == 0
    forget_hbm(run)
    assert ask(run, lora=adapter()) == BLOCKS
    forget_hbm(run)
    run.unload_adapter(1)  # as for others, or by a restart
    assert ask(run, lora=adapter(), right=False) == 0
    forget_hbm(run)
    assert ask(run, lora=adapter()) == BLOCKS
    forget_hbm(run)
    run.files[1] = OLD
    run.unload_adapter(1)
    run.load_adapter(1)
    ask(run, lora=adapter(), right=False)
    forget_hbm(run)
    assert ask(run, lora=adapter()) == BLOCKS


def test_an_adapter_that_was_loaded_before_its_first_request(make: Make) -> None:
    """The first request waits until the workers have told of it, and finds what is stored."""
    run = make(slots=60, hbm_blocks=60)
    run.files[1] = OLD
    ask(run, lora=adapter())
    forget_hbm(run)
    run.unload_adapter(1)
    ask(run)  # in whose step the workers tell of it
    forget_hbm(run)
    run.load_adapter(1)
    assert ask(run, lora=adapter()) == BLOCKS


def test_an_adapter_that_is_read_anew_for_every_request(make: Make) -> None:
    run = make(slots=60, hbm_blocks=60)
    run.files[1] = OLD
    for _ in range(3):
        assert ask(run, lora=adapter(again=True)) == 0
        forget_hbm(run)


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_in_any_order(make: Make, depth: int, ranks: int) -> None:
    """Requests, reloads and adapters at random: what is found was computed by what finds it."""
    found = 0
    for seed in range(25):
        draw = random.Random(seed)
        run = make(
            slots=draw.choice([40, 80]),
            hbm_blocks=60,
            depth=depth,
            ranks=ranks,
            verify_hits=draw.choice([0, 1, 2]),
        )
        run.files = {1: OLD, 2: NEW}
        for number in range(60):
            event = draw.randrange(15)
            if event == 0:
                run.reload(draw.randrange(3))
            elif event == 1:
                run.files[draw.randrange(1, 3)] = draw.randrange(3)
            elif event == 2:
                run.unload_adapter(draw.randrange(1, 3))
            elif event == 3:
                run.preempt_all()
            elif event == 4:
                run.scheduler.reset_prefix_cache(reset_connector=draw.choice([False, True]))
            elif event == 5 and run.requests:
                run.abort(draw.choice(list(run.requests)))
            elif event < 9:
                lora = draw.choice([None, adapter(1), adapter(2), adapter(2, again=True)])
                tokens = prompt(draw.randrange(40, 120))
                sampling = draw.choice([{}, {}, READS_NOTHING])
                name, count = str(number), draw.randrange(1, 20)
                run.add(name, tokens, count, lora_request=lora, sampling=sampling)
            else:
                run.step()
                run.end_io(good=draw.randrange(5) > 0)
        run.run()
        check(run)
        found += sum(run.began.values())
    assert found > 0
