"""Blocks that requests of a sparse engine have decoded: who finds them, and who does not."""

from __future__ import annotations

from typing import Any

from tests.connector.events import Make, hits, prompt
from tests.connector.rank import BLOCK
from tests.connector.simulation import Simulation

PROMPT = prompt(100)
DECODED = 60
BEFORE = len(PROMPT) // BLOCK
"""Blocks without a token that was decoded."""
ALL = (len(PROMPT) + DECODED) // BLOCK
EXACT: dict[str, object] = {"selector": "exact"}


def ask(
    run: Simulation,
    name: str,
    tokens: list[int],
    asked: dict[str, object] | None = None,
    max_tokens: int = 1,
) -> int:
    """Run one request to its end; blocks that it found."""
    sampling: dict[str, Any] = {}
    if asked is not None:
        sampling["extra_args"] = {"kv_transfer_params": {"ssdkv": asked}}
    run.add(name, tokens, max_tokens, sampling)
    run.run()
    run.check_answers([name])
    run.check_idle()
    return sum(hits(run, name))


def decoded(run: Simulation, asked: dict[str, object] | None = None) -> list[int]:
    """The prompt and what a request has decoded after it, and a token behind that."""
    assert ask(run, "first", PROMPT, asked, DECODED + 1) == 0
    return [*PROMPT, *run.delivered["first"], 7]


def test_exact_requests_find_the_prompt_alone(sparse: Make) -> None:
    run = sparse()
    tokens = decoded(run)
    assert ask(run, "exact", tokens, EXACT) == BEFORE
    assert ask(run, "exact again", tokens, EXACT) == ALL, "what it has computed itself"


def test_requests_that_choose_alike_share(sparse: Make) -> None:
    run = sparse()
    tokens = decoded(run)
    assert ask(run, "alike", tokens) == ALL
    assert ask(run, "asks for the same", tokens, {"selector": "bounds"}) == ALL
    assert ask(run, "other budget", tokens, {"budget": 0.5}) == BEFORE


def test_what_exact_requests_decode_is_for_everybody(sparse: Make) -> None:
    run = sparse()
    tokens = decoded(run, EXACT)
    assert ask(run, "sparse", tokens) == ALL
    assert ask(run, "exact", tokens, EXACT) == ALL


def test_a_turn_behind_decoded_tokens_is_kept_from_exact_requests(sparse: Make) -> None:
    """Its own prompt is attended to exactly, but over what was decoded from a choice."""
    run = sparse()
    turn = [*decoded(run), *prompt(40, seed=1)]
    assert ask(run, "second turn", turn) == ALL
    assert ask(run, "alike", [*turn, 7]) == len(turn) // BLOCK
    assert ask(run, "exact", [*turn, 7], EXACT) == BEFORE


def test_short_requests_do_not_choose(sparse: Make) -> None:
    """They decode below ``exact_below``: their blocks are everybody's, up to there."""
    run = sparse()
    short = prompt(40, seed=2)
    assert ask(run, "first", short, max_tokens=25) == 0
    tokens = [*short, *run.delivered["first"], 7]
    assert ask(run, "exact", tokens, EXACT) == (len(tokens) - 2) // BLOCK


def test_after_a_preemption_a_request_goes_on_with_its_own(sparse: Make) -> None:
    run = sparse()
    run.add("first", PROMPT, DECODED + 1)
    while len(run.delivered["first"]) < DECODED // 2:
        run.step()
        run.end_io()
    run.preempt_all()
    run.run()
    run.check_answers(["first"])
    assert sum(hits(run, "first")) > BEFORE
    tokens = [*PROMPT, *run.delivered["first"], 7]
    assert ask(run, "exact", tokens, EXACT) == BEFORE
    assert ask(run, "alike", tokens) == ALL
