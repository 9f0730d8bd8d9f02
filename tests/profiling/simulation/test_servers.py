"""Laws of a queue: order, Little's law, bytes and time that are counted once."""

from __future__ import annotations

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.profiling.simulation.servers import Events, Server

JOBS = st.lists(
    st.tuples(
        st.floats(0, 10),
        st.floats(0.001, 3),
        st.integers(0, 10**9),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=30,
)


@given(jobs=JOBS)
def test_littles_law_and_sums(jobs: list[tuple[float, float, int, int]]) -> None:
    env = simpy.Environment()
    server = Server(env, "s")
    ends: list[float] = []

    def job(at: float, seconds: float, nbytes: int, order: int) -> Events:
        yield env.timeout(at)
        begin = env.now
        yield from server.work(seconds, nbytes=nbytes, order=order)
        ends.append(env.now - begin)

    for one in jobs:
        env.process(job(*one))
    env.run()
    usage = server.usage()
    assert usage.jobs == len(jobs)
    assert usage.nbytes == sum(nbytes for _, _, nbytes, _ in jobs)
    assert usage.busy_s == pytest.approx(sum(seconds for _, seconds, _, _ in jobs))
    assert usage.utilisation <= 1 + 1e-9
    # Little: mean number present = arrivals per second * mean stay. Both counted apart.
    assert usage.present == pytest.approx(usage.jobs / usage.seconds * usage.stay_s)
    assert usage.stay_s == pytest.approx(sum(ends) / len(ends))


def test_what_is_first_in_the_program_goes_first() -> None:
    env = simpy.Environment()
    server = Server(env, "s")
    ends: list[str] = []

    def job(name: str, order: int, at: float) -> Events:
        yield env.timeout(at)
        yield from server.work(1.0, order=order)
        ends.append(f"{name} {env.now:g}")

    for name, order, at in (("write", 9, 0.0), ("b", 2, 0.25), ("a", 1, 0.5), ("c", 2, 0.6)):
        env.process(job(name, order, at))
    env.run()
    assert ends == ["a 1.5", "b 2.25", "c 3.25", "write 4"]
    assert server.usage().busy_s == 4


def test_latency_occupies_nobody() -> None:
    env = simpy.Environment()
    server = Server(env, "s")
    for _ in range(10):
        env.process(server.work(1.0, latency_s=5.0))
    env.run()
    assert env.now == 15.0
    usage = server.usage()
    assert (usage.busy_s, usage.seconds) == (10.0, 15.0)


def test_negative_work_is_refused() -> None:
    env = simpy.Environment()
    with pytest.raises(ValueError, match="drive: -1 s"):
        env.run(env.process(Server(env, "drive").work(-1)))
