"""Verified hits: the last block is computed and compared; a difference suspends the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.connector.events import Make, begin, end, gauges, hits, prompt, stored
from tests.connector.rank import BLOCK
from tests.connector.simulation import Simulation
from vllm_ssdkv.base.errors import StoreError, StoreFailedError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.messages import COMPARED
from vllm_ssdkv.connector.scheduler.hit_verifier import FIRST_HITS
from vllm_ssdkv.connector.scheduler.suspension import Suspension
from vllm_ssdkv.store.index.slot_index import SlotIndex, SlotState

BLOCKS = 100 // BLOCK


@pytest.fixture(params=["page", "reuse", "sparse"])
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.getfixturevalue(request.param)
    return found


def ask(run: Simulation, name: str, tokens: list[int] | None = None) -> int:
    """Blocks that were in HBM or loaded when the request began."""
    run.add(name, tokens or prompt(100), 4)
    run.run()
    run.empty_hbm()
    return run.began[name] // BLOCK


def verified(run: Simulation, result: str = "same") -> float:
    return run.ours.counters.total("verified_hits", result=result)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_the_first_hits_and_one_in_so_many(make: Make, depth: int, ranks: int) -> None:
    run = make(slots=80, hbm_blocks=60, depth=depth, ranks=ranks, verify_hits=6)
    stored(run, prompt(100))
    began = [ask(run, str(number)) for number in range(14)]
    short, whole = BLOCKS - 1, BLOCKS
    first = [short] * FIRST_HITS
    assert began == [*first, whole, whole, short, *[whole] * 5, short, whole]
    assert verified(run) == (FIRST_HITS + 2) * ranks
    assert all(rank.compared == FIRST_HITS + 2 for rank in run.ranks)
    end(run, *map(str, range(14)))


def test_the_next_hit_after_a_reset(make: Make) -> None:
    run = make(slots=80, hbm_blocks=60, verify_hits=100)
    stored(run, prompt(100))
    for number in range(FIRST_HITS + 1):
        ask(run, str(number))
    for told in (False, True):
        assert run.scheduler.reset_prefix_cache(reset_connector=told)
        assert [ask(run, f"{told} {n}") for n in range(2)] == [BLOCKS - 1, BLOCKS]
    assert verified(run) == FIRST_HITS + 2


def test_none_are_verified(make: Make) -> None:
    run = make(slots=60, hbm_blocks=60, verify_hits=0)
    stored(run, prompt(100))
    assert [ask(run, name) for name in "abc"] == [BLOCKS] * 3
    assert verified(run) == 0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_a_hit_of_one_block_is_computed_while_it_is_loaded(
    make: Make, depth: int, ranks: int
) -> None:
    run = make(slots=60, hbm_blocks=60, depth=depth, ranks=ranks, verify_hits=100)
    stored(run, prompt(20))
    began = [ask(run, str(number), prompt(20)) for number in range(FIRST_HITS + 2)]
    assert began == [*[0] * FIRST_HITS, 1, 1]
    assert verified(run) == FIRST_HITS * ranks
    names = [load.request_id for plan in run.plans for load in plan.loads]
    assert names.count(COMPARED) == FIRST_HITS
    end(run, *map(str, range(FIRST_HITS + 2)))


def test_a_stored_block_that_comes_late_is_compared_then(make: Make) -> None:
    run = make(slots=60, hbm_blocks=60, verify_hits=1)
    stored(run, prompt(20))
    run.add("a", prompt(20), 8)
    for _ in range(4):
        run.step()
    assert run.delivered["a"]
    assert not any(plan.compare for plan in run.plans)
    end(run, "a")
    assert verified(run) == 1


@pytest.mark.parametrize("steps", range(5))
def test_a_request_that_ends_before_its_block_has_come_leaves_nothing(
    make: Make, steps: int
) -> None:
    run = make(slots=60, hbm_blocks=60, verify_hits=1)
    stored(run, prompt(20))
    run.add("a", prompt(20), 8)
    for _ in range(steps):
        run.step()
    run.abort("a")
    run.run()
    run.check_idle()
    assert verified(run) == verified(run, "differs") == 0
    run.empty_hbm()
    ask(run, "b", prompt(20))
    assert verified(run) == 1


def test_one_block_at_a_time_is_loaded_beside_requests(make: Make) -> None:
    run = make(slots=60, hbm_blocks=60, verify_hits=100)
    stored(run, prompt(20), prompt(20, 7))
    run.add("a", prompt(20), 8)
    run.step()
    run.add("b", prompt(20, 7), 8)
    end(run, "a", "b")
    assert [run.began[name] // BLOCK for name in "ab"] == [0, 1]
    assert verified(run) == 1


def test_the_next_one_waits_for_that_of_a_request_that_has_ended(make: Make) -> None:
    run = make(slots=60, hbm_blocks=60, verify_hits=1)
    stored(run, prompt(20), prompt(20, 7))
    run.add("a", prompt(20), 8)
    run.step()
    run.abort("a")
    run.add("b", prompt(20, 7), 8)
    run.step()
    end(run, "b")
    assert run.began["b"] // BLOCK == 1


def test_a_block_that_has_left_the_window_is_skipped(page: Make) -> None:
    run = page(slots=60, hbm_blocks=60, verify_hits=1)
    stored(run, prompt(20))
    run.add("a", prompt(20), 6 * BLOCK)
    while len(run.delivered["a"]) < 5 * BLOCK:
        run.step()
    assert not any(plan.compare for plan in run.plans)
    end(run, "a")
    assert (verified(run), verified(run, "skipped")) == (0, 1)


def test_a_hit_that_ends_in_decoded_blocks_puts_it_off(sparse: Make) -> None:
    """They were decoded from a part of their context, and a prompt attends to all of it: the first
    hit that can be is verified."""
    run = sparse(slots=80, hbm_blocks=60, verify_hits=100)
    run.add("a", prompt(100), 3 * BLOCK)
    run.run()
    run.empty_hbm()
    longer = [*prompt(100), *run.requests["a"].output_token_ids, *prompt(10, 5)]
    for number in range(2 * FIRST_HITS):
        assert ask(run, f"long {number}", longer) > BLOCKS
    assert verified(run) == 0
    began = [ask(run, f"short {number}") for number in range(FIRST_HITS + 1)]
    assert began == [*[BLOCKS - 1] * FIRST_HITS, BLOCKS]
    assert verified(run) == FIRST_HITS


def test_a_block_that_has_left_dram_is_skipped(make: Make) -> None:
    run = make(slots=60, hbm_blocks=60, verify_hits=1)
    stored(run, prompt(100))
    for rank in run.ranks:
        rank.cold.update(rank.slots)
    assert ask(run, "a") == BLOCKS - 1
    assert (verified(run), verified(run, "skipped")) == (0, 1)
    end(run, "a")


def test_another_one_is_verified_in_place_of_a_skipped_one(make: Make) -> None:
    run = make(slots=100, hbm_blocks=60, verify_hits=100)
    stored(run, prompt(100))
    for number in range(FIRST_HITS - 1):
        ask(run, str(number))
    for rank in run.ranks:
        rank.cold.update(range(100))
    ask(run, "skipped")
    assert (verified(run), verified(run, "skipped")) == (FIRST_HITS - 1, 1)
    for rank in run.ranks:
        rank.cold.clear()
    assert [ask(run, name) for name in "ab"] == [BLOCKS - 1, BLOCKS]
    assert verified(run) == FIRST_HITS


def test_windows_are_cut_where_all_layers_can_go_on(reuse: Make) -> None:
    run = reuse(slots=200, hbm_blocks=120, verify_hits=1, windows=(None, 40))
    stored(run, prompt(100))
    assert ask(run, "a") == BLOCKS - 1
    assert verified(run) == 1
    end(run, "a")


def test_a_request_that_ends_meanwhile_leaves_nothing(make: Make) -> None:
    run = make(slots=60, hbm_blocks=60, verify_hits=1)
    stored(run, prompt(100))
    run.add("a", prompt(100), 4)
    run.step()
    run.abort("a")
    run.run()
    run.check_idle()


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("when", range(4))
def test_weights_that_change_meanwhile_are_no_difference(make: Make, when: int, depth: int) -> None:
    """Blocks computed with other weights say nothing of stored ones."""
    run = make(slots=60, hbm_blocks=60, depth=depth, verify_hits=1)
    stored(run, prompt(100))
    run.add("a", prompt(100), 4)
    for _ in range(when):
        run.step()
        run.end_io()
    run.reload(1)
    run.run()
    run.check_idle()
    assert not run.suspensions


class TestDifference:
    """A worker says that a stored block is not what it computes."""

    @staticmethod
    def suspended(make: Make, **options: object) -> Simulation:
        run = make(slots=60, hbm_blocks=60, verify_hits=1, **options)
        stored(run, prompt(100))
        ask(run, "before")
        assert verified(run) == 1
        run.ranks[0].distrusts = True
        assert ask(run, "a") <= BLOCKS - 1
        return run

    @pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
    def test_nothing_is_found_and_nothing_deleted(self, make: Make, depth: int) -> None:
        run = self.suspended(make, depth=depth)
        run.check_answers("a")
        ready = run.index.gauges()["ready"]
        assert ready >= BLOCKS
        assert [ask(run, name) for name in "bc"] == [0, 0]
        run.check_answers("bc")
        assert run.index.gauges()["ready"] >= ready
        (reason,) = run.suspensions
        assert "request a" in reason
        assert gauges(run)["store_suspended"] == 1
        assert verified(run, "differs") == 1
        assert not run.ours.verifier

    def test_a_hit_of_one_block_shows_it_as_well(self, make: Make) -> None:
        run = make(slots=60, hbm_blocks=60, verify_hits=1)
        stored(run, prompt(20))
        run.ranks[0].distrusts = True
        assert ask(run, "a", prompt(20)) == 0
        assert "request a" in run.suspensions[0]
        assert [one.fence_block for plan in run.plans for one in plan.compare] == [0]
        run.check_answers("a")
        assert ask(run, "b", prompt(20)) == 0

    def test_the_request_itself_is_computed_anew(self, reuse: Make) -> None:
        """Its first blocks are not to be trusted: vLLM is told of an invalid one."""
        run = self.suspended(reuse)
        _, comparison = (one for plan in run.plans for one in plan.compare)
        steps = [plan for plan in run.plans if plan.step > 0 and not plan.idle]
        assert comparison.fence_block
        assert len(steps) > 3 + -(-100 // 48), "the whole prompt, once more"
        run.check_answers("a")

    def test_requests_that_run_with_stored_blocks_are_computed_anew(self, make: Make) -> None:
        run = make(slots=100, hbm_blocks=100, verify_hits=FIRST_HITS + 1)
        stored(run, prompt(100), prompt(100, 7))
        for number in range(FIRST_HITS):
            ask(run, str(number))
        run.add("runs", prompt(100), 60)
        begin(run, "runs")
        assert hits(run, "runs") == [BLOCKS]
        run.ranks[0].distrusts = True
        run.add("shows", prompt(100, 7), 4)
        run.run()
        assert run.suspensions
        run.check_answers(["runs", "shows"])
        assert "runs" in run.suspensions[0]

    @pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
    def test_blocks_stored_before_are_there_when_it_is_resumed(
        self, make: Make, depth: int
    ) -> None:
        """Neither the verified block nor those that requests compute later take their place."""
        run = make(slots=100, hbm_blocks=60, verify_hits=1, depth=depth)
        stored(run, prompt(100))
        ask(run, "before")
        keys = run.keys_of(prompt(100))[:BLOCKS]
        before = run.index.lookup(keys).tolist()
        assert len(before) == BLOCKS
        run.ranks[0].distrusts = True
        ask(run, "a")
        assert run.suspensions
        ask(run, "b")
        assert run.index.lookup(keys).tolist() == before

    @pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
    def test_nothing_that_this_engine_computed_unverified_is_found_later(
        self, make: Make, depth: int
    ) -> None:
        """A store that is taken back must not have it, whichever is wrong."""
        run = make(slots=200, hbm_blocks=60, verify_hits=1, depth=depth)
        stored(run, prompt(100), prompt(100, 7))
        ask(run, "same")
        assert verified(run) == 1
        ask(run, "new", prompt(100, 8))
        assert len(run.index.lookup(run.keys_of(prompt(100, 8)))) >= BLOCKS
        run.ranks[0].distrusts = True
        longer = prompt(100, 7) + prompt(60, 9)
        ask(run, "longer", longer)
        assert run.suspensions
        ask(run, "later", prompt(100, 10))
        for tokens, found in (
            (prompt(100), BLOCKS),
            (longer, BLOCKS),
            (prompt(100, 8), 0),
            (prompt(100, 10), 0),
        ):
            assert len(run.index.lookup(run.keys_of(tokens))) == found
        run.check_answers(["same", "new", "longer", "later"])

    def test_what_hbm_has_is_not_found_either(self, reuse: Make) -> None:
        """Blocks that were loaded and not verified may be there, too."""
        run = reuse(slots=100, hbm_blocks=100, verify_hits=FIRST_HITS + 1)
        stored(run, prompt(100), prompt(100, 7))
        for number in range(FIRST_HITS):
            ask(run, str(number))
        run.add("loads", prompt(100), 4)
        run.run()
        assert hits(run, "loads") == [BLOCKS]
        run.ranks[0].distrusts = True
        run.add("shows", prompt(100, 7), 4)
        run.run()
        assert run.suspensions
        assert ask(run, "again") == 0

    def test_in_page_mode_requests_use_what_is_free(self, page: Make) -> None:
        run = self.suspended(page)
        kept = [s for s in range(60) if run.index.state(s) is SlotState.READY]
        for number in range(20):
            tokens = prompt(100, 5 + number)
            assert ask(run, f"after {number}", tokens) == 0
        run.check_answers(f"after {number}" for number in range(20))
        assert all(run.index.state(slot) is SlotState.READY for slot in kept)
        assert run.index.live_records.journalled == BLOCKS, "a later start knows no others"

    def test_in_page_mode_a_full_store_says_why_nobody_can_go_on(self, page: Make) -> None:
        run = page(slots=30, hbm_blocks=60, verify_hits=1)
        stored(run, *(prompt(100, number) for number in range(5)))
        ask(run, "good", prompt(100, 3))  # a verified hit: what was stored before it stays
        run.ranks[0].distrusts = True
        run.add("a", prompt(100, 4), 4)
        with pytest.raises(StoreFailedError, match=r"suspended and has no room.*ssdkv resume"):
            run.run()
        assert run.suspensions

    def test_in_reuse_mode_nothing_is_added(self, reuse: Make) -> None:
        run = self.suspended(reuse)
        before = run.index.counters["published"]
        ask(run, "b", prompt(100, 9))
        assert run.index.counters["published"] == before


def test_a_store_that_was_suspended_before(tmp_path: Path) -> None:
    """It is opened as it was left."""
    index, counters, saved = SlotIndex(8, None), Counters(), []
    suspension = Suspension(index, counters, saved.append, [tmp_path], "a reason")
    assert suspension
    assert f"ssdkv resume {tmp_path}" in suspension.way_out
    suspension.begin("another reason")
    assert (suspension.reason, saved) == ("a reason", [])
    assert not Suspension(index, counters, saved.append, [tmp_path])


def test_a_suspension_that_cannot_be_saved_holds_until_the_end(tmp_path: Path) -> None:
    def save(reason: str) -> None:
        raise StoreError("store.json: No space left on device")

    counters = Counters()
    suspension = Suspension(SlotIndex(8, None), counters, save, [tmp_path])
    suspension.begin("a reason")
    assert suspension
    assert counters.total("suspensions_not_saved") == 1
