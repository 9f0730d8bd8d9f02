"""Choice of the requests that are stored as X."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.scheduler.x_admission import XAdmission
from vllm_ssdkv.offload.xcache.x_rule import XRates, XShape

MHA = XShape(4096, 32, 128, 2)

turns = st.lists(
    st.tuples(st.integers(1, 100), st.sampled_from(["comes", "leaves"])), min_size=1, max_size=60
)


def play(share: float, events: list[tuple[int, str]]) -> tuple[XAdmission, list[bool]]:
    made, running, found = XAdmission(share, None, Counters()), dict[str, tuple[int, bool]](), []
    for number, (blocks, event) in enumerate(events):
        if event == "leaves" and running:
            gone = next(iter(running))
            del running[gone]
            made.left(gone)
            continue
        name = str(number)
        expected = made.would_admit(blocks)
        made.arrived(name, blocks)
        as_x = made.admit(name)
        assert as_x == expected
        running[name] = blocks, as_x
        found.append(as_x)
        total = sum(b for b, _ in running.values())
        if as_x:
            assert sum(b for b, x in running.values() if x) <= share * total
    return made, found


@given(share=st.floats(0, 1), events=turns)
def test_who_is_admitted_keeps_within_the_share(
    share: float, events: list[tuple[int, str]]
) -> None:
    _, found = play(share, events)
    assert play(share, events)[1] == found


@given(events=turns)
def test_all_or_none(events: list[tuple[int, str]]) -> None:
    assert all(play(1.0, events)[1])
    assert not any(play(0.0, events)[1])


def test_alike_requests_take_turns() -> None:
    made, found = play(0.5, [(10, "comes")] * 6)
    assert found == [False, True] * 3
    assert len(made) == 6


def test_auto_waits_for_rates_and_follows_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm_ssdkv")
    counters = Counters()
    made = XAdmission("auto", MHA, counters)
    assert made.share == 0
    assert made.rates is None
    made.measured(XRates(3e9, 1e9, 1e18))
    assert made.share == counters.take_gauges()["x_cache_share"] == 0.5
    made.measured(XRates(3e9, 1.01e9, 1e18))
    assert [record.getMessage() for record in caplog.records] == [
        "ssdkv: X-cache: 50 % of contexts: for 1000 tokens in a layer projecting takes 0.0 ms, "
        "storage 4.1 ms, the link 4.1 ms; storage takes 5.5 ms without X"
    ]
    made.measured(XRates(3e9, 1e9, 1e9))
    assert len(caplog.records) == 2
    assert made.share == pytest.approx(0, abs=1 / 32)


def test_a_number_is_kept_whatever_is_measured() -> None:
    made = XAdmission(0.25, MHA, Counters())
    made.measured(XRates(3e9, 1e9, 1e18))
    assert made.share == 0.25
