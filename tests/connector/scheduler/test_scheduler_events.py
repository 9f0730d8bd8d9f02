"""The scheduler's half in single events, each with what must follow; see ``simulation.py``."""

from __future__ import annotations

import time
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
from vllm.config import VllmConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from tests.connector.events import Make, begin, end, gauges, hits, prompt, stored
from tests.connector.rank import BLOCK
from tests.connector.simulation import CHUNK, WINDOW, Simulation
from tests.connector.symbols import answer
from vllm_ssdkv.base.errors import StoreFailedError
from vllm_ssdkv.connector.messages import RankReport
from vllm_ssdkv.connector.scheduler import context_recovery, scheduler
from vllm_ssdkv.store.index.journal import Journal
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.unread_slots import RETRY_S

ONE_REQUEST = -(-(WINDOW - 1 + CHUNK) // BLOCK) + 1
"""HBM blocks that page mode needs for one request, whatever its length."""

# ---- admission ----


@pytest.mark.parametrize(("slots", "together"), [(17, 1), (22, 2), (32, 2), (33, 3)])
def test_requests_wait_for_slots(page: Make, slots: int, together: int) -> None:
    run = page(slots=slots, hbm_blocks=40)
    for name in "abc":
        run.add(name, prompt(150, ord(name)), 20)  # 11 slots each
    most = 0
    while run.scheduler.has_requests():
        run.step()
        run.end_io()
        most = max(most, len(run.scheduler.running))
    assert most == together
    end(run, *"abc")


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_who_reads_no_prefix_cache_waits_too(page: Make, depth: int) -> None:
    """vLLM does not listen to a connector that has such a request wait."""
    run = page(slots=20, hbm_blocks=60, depth=depth)
    for name in "abcd":
        run.add(name, prompt(150, ord(name)), 40, sampling={"prompt_logprobs": 1})
    run.abort("c")
    end(run, *"abd")
    assert run.ours.counters.total("slot_waits") > 0


def test_what_was_reserved_and_not_used_is_given_back(page: Make) -> None:
    run = page(slots=40)
    run.add("a", prompt(20), 200)
    run.step()
    assert run.index.gauges()["reserved"] > 10
    run.abort("a")
    run.run()
    run.check_idle()


def test_a_session_may_outgrow_its_reservation(page: Make) -> None:
    run = page(slots=40)
    session = run.add("a", prompt(40), 4, resumable=True)
    for _ in range(10):
        run.step()
        run.end_io()
    assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    more = Request("a", prompt(150, 1), session.sampling_params, None, resumable=True)
    run.scheduler.add_request(more)
    for _ in range(12):
        run.step()
        run.end_io()
    assert session.num_computed_tokens > 40 + 150
    run.abort("a")
    run.run()
    run.check_idle()


# ---- sharing ----


def test_two_that_run_with_one_prompt_store_it_once(page: Make) -> None:
    run = page(slots=60, hbm_blocks=40)
    tokens = prompt(128)
    run.add("a", tokens, 4)
    run.step()
    run.add("b", tokens, 4)
    end(run, *"ab")
    # The block in which their answers end belongs to both as well.
    assert run.index.counters["allocated"] <= 9


def test_a_prompt_is_stored_once_in_reuse_mode(reuse: Make) -> None:
    run = reuse(slots=60, hbm_blocks=60)
    for name in "abc":
        run.add(name, prompt(128), 4)
    end(run, *"abc")
    assert run.index.counters["allocated"] == 8


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stored_prompt_hits(page: Make, reuse: Make, depth: int) -> None:
    for make in (page, reuse):
        run = make(depth=depth)
        stored(run, prompt(100))
        run.add("a", prompt(100), 4)
        run.add("b", prompt(64) + prompt(9, 1), 4)
        end(run, *"ab")
        assert (hits(run, "a"), hits(run, "b")) == ([6], [4])


@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_decoded_is_stored(page: Make, reuse: Make, depth: int) -> None:
    for make in (page, reuse):
        run = make(depth=depth)
        request = run.add("a", prompt(40), 100)
        end(run, "a")
        assert len(run.index.lookup(run.ours.keys_of(request))) == (40 + 99) // BLOCK


def test_what_is_still_being_loaded_is_nobody_elses(page: Make) -> None:
    """Workers know the checksums of a context when it has arrived."""
    run = page(slots=60, hbm_blocks=40)
    stored(run, prompt(150))
    run.add("hit", prompt(150), 4)
    run.step()
    other = run.add("computed", prompt(150), 4)
    other.skip_reading_prefix_cache = True
    theirs = {slot for plan in run.plans for load in plan.loads for slot in load.slots.tolist()}
    assert len(theirs) > 4
    for _ in range(3):
        run.step()
    assert run.ours.requests["computed"].slots
    assert not theirs & set(run.ours.requests["computed"].slots)
    end(run, "hit", "computed")


def test_salts_keep_prompts_apart(reuse: Make) -> None:
    run = reuse()
    for name, salt in (("a", None), ("b", "x"), ("c", "y"), ("d", "x")):
        run.add(name, prompt(100), 4, cache_salt=salt)
        run.run()
        run.scheduler.reset_prefix_cache()
    end(run, *"abcd")
    assert [hits(run, name) for name in "abcd"] == [[], [], [], [6]]


def test_keys_of_a_part(reuse: Make) -> None:
    run = reuse()
    request = run.add("a", prompt(100), 1)
    keys = run.ours.keys_of(request)
    assert len(keys) == 6
    assert run.ours.keys_of(request, 4, 1) == keys[1:4]
    assert run.ours.keys_of(request, 99, 5) == keys[5:]


# ---- writes that fail ----


def test_a_failed_write_is_never_found(page: Make, reuse: Make) -> None:
    for make in (page, reuse):
        run = make(slots=60)
        run.add("a", prompt(100), 4)
        run.step()
        for rank in run.ranks:
            rank.end_write(good=True)
            rank.end_write(good=False)
        run.run()
        run.scheduler.reset_prefix_cache()
        run.add("b", prompt(100), 4)
        end(run, *"ab")
        # The first block, then the hole.
        assert hits(run, "b") == [1]
        assert run.ours.counters.total("slots_dropped", cause="write_error") == 1


def test_one_rank_that_fails_fails_the_slot(reuse: Make) -> None:
    run = reuse(slots=60, ranks=2)
    run.add("a", prompt(40), 4)
    run.step()
    first, second = run.ranks
    first.end_write(good=True)
    run.step()
    assert not run.index.counters["dropped"]
    second.end_write(good=False)
    run.run()
    run.scheduler.reset_prefix_cache()
    run.add("b", prompt(40), 4)
    end(run, *"ab")
    assert hits(run, "b") == []


def test_what_finds_no_room_in_dram_is_skipped(reuse: Make) -> None:
    run = reuse(slots=60)
    run.ranks[0].no_frames = 1000
    run.add("a", prompt(100), 4)
    run.run()
    run.ranks[0].no_frames = 0
    assert run.index.gauges()["ready"] == 0
    end(run, "a")


def test_page_mode_starts_again_when_a_block_was_not_held(page: Make) -> None:
    run = page(slots=60)
    run.add("a", prompt(100), 20)
    run.step()
    run.ranks[0].no_frames = 1
    run.step()
    assert not run.ranks[0].no_frames
    end(run, "a")
    assert run.ours.counters.total("recomputed_requests", cause="context") == 1


def test_page_mode_gives_up_where_nothing_can_be_held(
    page: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_recovery, "LOST_S", 0.0)
    run = page(slots=60)
    run.add("a", prompt(100), 20)
    run.ranks[0].no_frames = 1000
    with pytest.raises(StoreFailedError, match="request a was lost 8 times in a row"):
        run.run()
    assert run.ours.counters.total("recomputed_requests", cause="context") == 9


# ---- contexts that cannot be read ----


@pytest.mark.parametrize("depth", [1, 2])
def test_a_context_with_a_bad_slot_is_computed_again(page: Make, depth: int) -> None:
    run = page(slots=60, depth=depth)
    run.add("a", prompt(150), 30)
    while len(run.delivered["a"]) < 10:
        run.step()
        run.end_io()
    slot = run.ranks[0].contexts["a"][2]
    run.ranks[0].broken.add(slot)
    # Every token that is delivered is a right one, those of steps under way included.
    right = answer(prompt(150), 30)
    while run.scheduler.has_requests():
        run.step()
        run.end_io()
        assert run.delivered["a"] == right[: len(run.delivered["a"])]
    end(run, "a")
    assert run.ours.counters.total("recomputed_requests", cause="context") == 1
    # It went on from the two blocks before the bad one.
    assert hits(run, "a") == [2]


def test_only_the_request_with_the_bad_slot_is_sent_back(page: Make) -> None:
    run = page(slots=60, hbm_blocks=40)
    run.add("a", prompt(150, 1), 30)
    run.add("b", prompt(150, 2), 30)
    begin(run, "b")
    run.ranks[0].broken.add(run.ranks[0].contexts["b"][1])
    end(run, *"ab")
    assert run.requests["a"].num_preemptions == 0
    assert run.requests["b"].num_preemptions == 1


def test_a_reset_of_the_cache_frees_slots_to_be_trimmed(reuse: Make) -> None:
    run = reuse(slots=60, on_reset="forget")
    stored(run, prompt(100))
    assert all(plan.trim is None for plan in run.plans)
    assert run.ours.reset()
    run.add("a", prompt(20), 4)
    plan = run.step()
    assert plan is not None
    assert plan.trim is not None
    assert sorted(plan.trim.tolist()) == list(range(60))
    end(run, "a")
    assert run.plans[-1].trim is None


@pytest.mark.parametrize("mode", ["page", "reuse"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_load_is_tried_once_more(
    configs: dict[str, VllmConfig], mode: str, depth: int
) -> None:
    run = Simulation(configs[mode], depth=depth)
    stored(run, prompt(100))
    run.add("a", prompt(100), 4)
    while not run.ranks[0].loads:
        run.step()
    run.ranks[0].broken.add(int(run.ranks[0].loads[0].slots[3]))
    end(run, "a")
    # Of the second load there are the blocks before the bad one.
    assert hits(run, "a") == [6, 3]
    assert run.ours.counters.total("recomputed_requests", cause="hit") == 1


@pytest.mark.parametrize("mode", ["page", "reuse"])
def test_loads_that_keep_failing_are_given_up(configs: dict[str, VllmConfig], mode: str) -> None:
    run = Simulation(configs[mode])
    stored(run, prompt(100))
    run.add("a", prompt(100), 4)
    for _ in range(20):
        run.step()
        for rank in run.ranks:
            rank.end_load(False, run.hbm, run.content)
    end(run, "a")
    assert len(hits(run, "a")) == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_load_in_an_hbm_for_one(page: Make, depth: int) -> None:
    """vLLM keeps the blocks of the failed load reserved; they must not keep the request out."""
    blocks = ONE_REQUEST + 1 + (depth - 1) * CHUNK // BLOCK
    run = page(depth=depth, hbm_blocks=blocks, slots=17)
    stored(run, prompt(150))
    run.add("a", prompt(150), 20)
    run.add("b", prompt(150) + prompt(20, 1), 20)
    while not run.ranks[0].loads:
        run.step()
    run.ranks[0].end_load(False, run.hbm, run.content)
    end(run, *"ab")


def test_a_failed_load_in_front_of_one_that_holds_hbm(page: Make) -> None:
    """vLLM looks at nobody behind a request that does not fit."""
    run = page(hbm_blocks=ONE_REQUEST + 3, slots=60)
    stored(run, prompt(130, 1), prompt(64, 2))
    run.add("a", prompt(130, 1) + prompt(60, 3), 20)
    run.add("b", prompt(64, 2) + prompt(60, 4), 20)
    while len(run.ranks[0].loads) < 2:
        run.step()
    run.ranks[0].end_load(False, run.hbm, run.content)
    end(run, *"ab")


def test_loads_leave_room_to_go_on(page: Make) -> None:
    """Loads are admitted only while one of them can still compute its next chunk."""
    run = page(hbm_blocks=ONE_REQUEST + 3, slots=80)
    known = [prompt(112, seed) for seed in range(4)]
    stored(run, *known)
    for name, tokens in zip("abcd", known, strict=True):
        run.add(name, tokens + prompt(60, ord(name)), 20)
    end(run, *"abcd")
    assert all(hits(run, name) == [7] for name in "abcd")


def test_a_request_that_is_given_up_while_it_loads(page: Make, reuse: Make) -> None:
    for make in (page, reuse):
        for good in (True, False):
            run = make()
            stored(run, prompt(100))
            run.add("a", prompt(100), 4)
            run.step()
            run.abort("a")
            run.step()
            # The load still writes to HBM, so its slots stay.
            assert run.index.gauges()["pinned"] >= 6
            for rank in run.ranks:
                rank.end_load(good, run.hbm, run.content)
            run.run()
            run.check_idle()


# ---- devices ----


def test_a_lost_device_takes_its_slots_along(page: Make) -> None:
    run = page(slots=60)
    run.add("a", prompt(150), 30)
    begin(run, "a")
    run.lose_device(0)
    run.step()
    steps = len(run.plans)
    end(run, "a")
    gauges = run.index.gauges()
    assert gauges["lost"] + gauges["masked"] == 30
    run.add("b", prompt(150), 4)
    end(run, "b")
    handed_out = np.concatenate([plan.save.slots for plan in run.plans[steps:]])
    assert len(handed_out)
    # Each was on the other device when it was written: the workers look.
    assert (1,) in {segment.lanes for segment in run.placement.segments}


def test_a_slow_device_gets_less_of_what_is_stored_later(page: Make) -> None:
    run = page(slots=60, ranks=2)
    run.add("a", prompt(150), 30)
    end(run, "a")
    run.ranks[0].report.speeds.append((1, 0.5))
    run.ranks[1].report.speeds.append((1, 0.2))
    run.add("b", prompt(100), 30)
    end(run, "b")
    assert gauges(run)["device_share|device=device1"] == pytest.approx(1 / 6)
    shares = {s.lanes.count(1) / len(s.lanes) for s in run.placement.segments}
    assert min(shares) == pytest.approx(1 / 6)
    for rank in run.ranks:
        rank.report.speeds.append((1, 1.0))
    run.add("c", prompt(100), 2)
    end(run, "c")
    assert gauges(run)["device_share|device=device1"] == 0.5


def test_a_store_too_small_to_spare_a_slow_device_does_not(page: Make) -> None:
    """With its share at a fifth, ten slots are left of seventeen; requests need eleven."""
    run = page(slots=17)
    run.ranks[0].report.speeds.append((0, 0.2))
    run.add("a", prompt(20), 4)
    end(run, "a")
    assert run.rebalancer.weights == [0.2, 1.0]
    for name in "bcd":  # segments are striped anew one after the other
        run.add(name, prompt(150, ord(name)), 20)
        end(run, name)
    assert run.rebalancer.weights == [1.0, 1.0]
    assert run.rebalancer.placement.slots == 17
    run.ranks[0].report.speeds.append((0, 0.5))  # known, and no help
    run.add("e", prompt(150), 20)
    end(run, "e")
    assert run.rebalancer.weights == [1.0, 1.0]


def test_a_store_that_can_serve_nobody_says_so(page: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """When nobody waits any more for the device to come back."""
    monkeypatch.setattr(scheduler, "RETURN_S", 0.0)
    run = page(slots=20)
    run.lose_device(1)
    run.add("a", prompt(20), 4)
    end(run, "a")  # needs two slots, ten are left
    run.add("b", prompt(200), 20)
    with pytest.raises(StoreFailedError, match="device1") as caught:
        run.run()
    assert "needs 14 slots, 10 can be had" in str(caught.value)
    assert "Replace them and restart" in str(caught.value)


# ---- the end of things ----


def test_preempted_and_resumed_in_one_step(page: Make) -> None:
    run = page(slots=60)
    run.add("a", prompt(150), 30)
    while len(run.delivered["a"]) < 5:
        run.step()
        run.end_io()
    run.preempt_all()
    run.step()
    assert run.requests["a"].num_preemptions == 1
    end(run, "a")
    assert hits(run, "a") == [9]


@pytest.mark.parametrize("on_reset", ["keep", "forget"])
@pytest.mark.parametrize("told", [False, True], ids=["HBM alone", "connector too"])
@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_a_reset_hides_the_store_until_weights_are_digested(
    page: Make, reuse: Make, on_reset: str, told: bool, depth: int
) -> None:
    for make in (page, reuse):
        run = make(on_reset=on_reset, depth=depth, ranks=2)
        stored(run, prompt(100))
        assert run.scheduler.reset_prefix_cache(reset_connector=told)
        forgotten = told and on_reset == "forget"
        assert run.index.gauges()["ready"] == (0 if forgotten else 6)
        run.step()
        assert all(rank.resets == 0 for rank in run.ranks), "nobody computes: weights may be away"
        run.add("a", prompt(100), 4)
        end(run, "a")
        assert all(rank.resets >= 1 for rank in run.ranks)
        run.empty_hbm()
        run.add("b", prompt(100), 4)
        end(run, "b")
        assert (hits(run, "a"), hits(run, "b")) == ([] if forgotten else [6], [6])
        dropped = run.rebalancer._counters.total("slots_dropped", cause="reset")
        assert dropped == (6 if forgotten else 0)


def test_requests_compute_where_no_digest_comes(reuse: Make) -> None:
    """A rank that does not tell keeps the store hidden, and nobody waits for it for long."""
    run = reuse()
    stored(run, prompt(100))
    assert run.scheduler.reset_prefix_cache()
    run.ranks[0].resets = 1  # it takes the digest for taken, and tells of none
    run.add("a", prompt(120), 4)
    end(run, "a")
    run.empty_hbm()
    run.add("b", prompt(120), 4)
    end(run, "b")
    assert hits(run, "a") == hits(run, "b") == []
    assert run.index.gauges()["ready"] == 6, "nothing is stored"


@pytest.mark.parametrize("on_reset", ["keep", "forget"])
def test_a_reset_beside_a_load(page: Make, reuse: Make, on_reset: str) -> None:
    """vLLM cannot reset HBM then. The load goes on, and nothing raises or hangs."""
    for make in (page, reuse):
        run = make(on_reset=on_reset)
        stored(run, prompt(100))
        run.add("a", prompt(100), 4)
        run.step()
        assert run.ranks[0].loads
        assert not run.scheduler.reset_prefix_cache(reset_connector=True)
        assert run.ours.reset(), "the connector has been reset"
        end(run, "a")
        assert run.began["a"] == 96


@pytest.mark.parametrize("on_reset", ["keep", "forget"])
@pytest.mark.parametrize("reset", ["no", "before", "after"])
def test_a_restart_finds_what_was_durable(
    reuse: Make, tmp_path: Path, reset: str, on_reset: str
) -> None:
    def index() -> SlotIndex:
        journal = Journal(
            tmp_path / "journal", store=UUID(int=1), fingerprint=bytes(16), num_slots=40
        )
        return SlotIndex(40, journal)

    run = reuse(index=index(), on_reset=on_reset)
    if reset == "before":
        assert run.scheduler.reset_prefix_cache(reset_connector=True)
    stored(run, prompt(100))
    if reset == "after":
        assert run.scheduler.reset_prefix_cache(reset_connector=True)
    run.ours.close()
    again = reuse(index=index())
    again.ranks = run.ranks
    again.content = run.content
    again.add("a", prompt(100), 4)
    end(again, "a")
    assert hits(again, "a") == ([] if (reset, on_reset) == ("after", "forget") else [6])
    again.ours.close()


def test_all_blocks_of_a_report_are_one_write(reuse: Make, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", store=UUID(int=1), fingerprint=bytes(16), num_slots=40)
    run = reuse(index=SlotIndex(40, journal))
    stored(run, prompt(100))
    counters = journal.counters
    assert counters["appended_records"] == 6
    assert counters["writes"] < 6
    run.ours.close()


def test_the_engine_keeps_stepping_until_writes_are_known(reuse: Make) -> None:
    run = reuse()
    run.add("a", prompt(100), 1)
    while "a" not in run.finished:
        run.step()
    assert run.ours.unfinished()
    assert run.scheduler.has_requests()
    run.end_io()
    for _ in range(3):
        run.step()
    assert not run.ours.unfinished()
    assert not run.scheduler.has_requests()


@pytest.mark.parametrize("depth", [1, 2])
def test_who_is_kept_while_the_engine_is_paused_asks_for_no_steps(
    page: Make, reuse: Make, depth: int
) -> None:
    for make in (page, reuse):
        run = make(depth=depth)
        for name in "ab":
            run.add(name, prompt(100, ord(name)), 50)
        for _ in range(6):
            run.step()
        run.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for _ in range(8):
            run.step()
            run.end_io()
        assert run.ours.requests
        assert not run.ours.unfinished()
        run.scheduler.set_pause_state(PauseState.UNPAUSED)
        end(run, *"ab")


# ---- slots that could not be read ----


@pytest.mark.parametrize("mode", ["page", "reuse"])
def test_a_load_that_failed_takes_nothing_from_the_store(
    page: Make, reuse: Make, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request computes what could not be read, and others find it all when it can."""
    run = {"page": page, "reuse": reuse}[mode](slots=60, ranks=2)
    stored(run, prompt(100))
    keys = run.ours.keys_of(run.requests["stored 0"])
    before = run.index.lookup(keys).tolist()
    assert len(before) == 6
    run.ranks[1].failing.add(before[2])
    run.add("b", prompt(100), 1)
    end(run, "b")
    assert hits(run, "b") == [6, 2], "one try of all, and one of what is still found"
    run.ranks[1].failing.clear()
    now = time.monotonic() + RETRY_S
    monkeypatch.setattr(run.ours._parts.unread, "_clock", lambda: now)
    run.empty_hbm()
    run.add("c", prompt(100), 1)
    end(run, "c")
    assert hits(run, "c") == [6]
    assert run.ours.counters.total("slots_dropped", cause="read_error") == 0
    assert run.index.gauges()["masked"] == 0


def test_a_context_that_could_not_be_read_takes_nothing_from_the_store(page: Make) -> None:
    """It is computed again from the block on that could not be read: there is no second failure."""
    run = page(slots=60)
    run.add("a", prompt(100), 30)
    begin(run, "a")
    run.end_io()
    run.step()
    rank = run.ranks[0]
    rank.failing.add(rank.contexts["a"][1])
    end(run, "a")
    assert run.ours.counters.total("slots_dropped", cause="read_error") == 0
    assert run.ours.counters.total("recomputed_requests", cause="context") == 1
    assert len(run.index.lookup(run.ours.keys_of(run.requests["a"]))) >= 6


# ---- slots that the scrub found bad ----


def test_a_bad_slot_is_dropped_once_whoever_tells(reuse: Make) -> None:
    run = reuse(slots=60, ranks=2)
    keys = run.ours.keys_of(run.add("a", prompt(100), 4))
    run.run()
    stored = run.index.lookup(keys).tolist()
    assert len(stored) == 6
    slot, epoch = stored[2], run.index.epoch(stored[2])
    # The scrub of each rank, a load, and one that read the slot's last life.
    run.ours.reported(
        [
            (0, RankReport(bad=[(slot, epoch), (stored[3], run.index.epoch(stored[3]) - 1)])),
            (1, RankReport(bad=[(slot, epoch), (slot, -1)])),
        ],
        (),
    )
    assert run.ours.counters.total("slots_dropped", cause="read_error") == 1
    assert run.index.gauges()["ready"] == 5
    # Whoever told of it hears that it was stored; nobody hears so of a copy in an old life.
    mended = [(0, RankReport(mended=[(stored[0], 1), (stored[1], 9)]))]
    run.ours.reported(mended, ())
    plan = run.ours.plan(SchedulerOutput.make_empty())
    assert plan.believed == [(slot, epoch), (stored[0], 1)]
    for rank in run.ranks:
        rank.broken.add(slot)
    run.scheduler.reset_prefix_cache()
    run.add("b", prompt(100), 4)
    end(run, *"ab")
    assert hits(run, "b") == [2]
