"""Requests that go on with more input when they have answered: vLLM's resumable requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from tests.connector.conftest import Make
from tests.connector.rank import BLOCK
from tests.connector.simulation import GARBAGE, STATE, Simulation, drafts_like
from tests.connector.symbols import Symbols, answer, state_after
from vllm_ssdkv.connector.scheduler.request_state import RequestState


def prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 500) for _ in range(length)]


def go_on(run: Simulation, session: Request, tokens: list[int]) -> None:
    """The session's next turn."""
    more = Request(session.request_id, tokens, session.sampling_params, None, resumable=True)
    run.scheduler.add_request(more)


def steps(run: Simulation, count: int) -> None:
    for _ in range(count):
        run.step()
        run.end_io()


def test_a_session_that_lacks_a_slot_keeps_nobody_waiting(page: Make) -> None:
    """It cannot be sent back between its turns; whoever comes behind it would wait for ever."""
    run = page(slots=7, hbm_blocks=40)
    session = run.add("a", prompt(40), 1, resumable=True)
    steps(run, 4)
    run.add("b", prompt(20, 3), 28)
    steps(run, 2)
    go_on(run, session, prompt(45, 1))
    steps(run, 2)
    state = run.ours.requests["a"]
    assert state.cut_off
    steps(run, 60)
    assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    go_on(run, session, prompt(20, 4))
    run.add("c", prompt(20, 5), 5)
    steps(run, 60)
    assert {"b", "c"} <= run.finished
    run.abort("a")
    run.run()
    run.check_answers("bc")
    run.check_idle()


def test_what_a_session_computes_with_drafts_is_not_stored_in_mode_reuse(reuse: Make) -> None:
    """Nobody may find it: see ``BlockKeys.private``."""
    run = reuse(slots=60, hbm_blocks=60, drafts=drafts_like("ngram"))
    run.right = 0.0
    run.add("a", prompt(100), 2, resumable=True)
    run.add("b", prompt(60, 1), 2)
    steps(run, 10)
    assert run.index.counters["allocated"] == 60 // BLOCK
    run.abort("a")
    run.run()
    run.check_idle()


def test_what_a_session_computes_with_states_is_not_stored(
    reuse: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn may end while the step after its last token is under way: the next one goes on from a
    state that has seen that token, and vLLM offers what comes of it."""
    run = reuse(slots=200, hbm_blocks=80, windows=(None, STATE), depth=2)
    tokens = prompt(22, 1)
    last = answer(tokens, 4)[-1]
    session = run.add("a", tokens, 30, resumable=True)
    params = session.sampling_params
    assert params is not None
    params.stop_token_ids, params._all_stop_token_ids = [last], {last}
    steps(run, 12)
    assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    stored: set[str] = set()
    wrong: list[bool] = []
    complete, compute = run.ours.groups.completed, run._compute_state

    def watch(state: RequestState, *others: Any) -> Iterator[tuple[int, bytes, int]]:  # noqa: ANN401
        stored.add(state.request_id)
        return complete(state, *others)

    def go_wrong(name: str, group: int, start: int, right: Symbols) -> None:
        if name != "a":
            compute(name, group, start, right)
            return
        blocks = run.scheduler.kv_cache_manager.get_block_ids(name)[group]
        held = run.hbm[blocks[(start - 1) // BLOCK]]
        wrong.append(held != state_after(right[start - 1], group, BLOCK))
        run.hbm[blocks[(len(right) - 1) // BLOCK]] = [GARBAGE] * BLOCK

    monkeypatch.setattr(run.ours.groups, "completed", watch)
    monkeypatch.setattr(run, "_compute_state", go_wrong)
    go_on(run, session, prompt(40, 2))
    run.add("b", prompt(60, 3), 2)
    steps(run, 12)
    assert wrong, "the second turn has run"
    assert wrong[0], "vLLM goes on from the right state: sessions could be stored"
    assert stored == {"b"}
    run.abort("a")
    run.run()
    run.check_idle()
