"""Short requests that attend to everything, in an engine whose DRAM is for long ones that choose:
its memory goes to whoever runs, and nobody's tokens change.

The long one chooses everything, so its tokens are those of stock vLLM, and it needs more single
pages than DRAM has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.test_mixed import CHUNK, WINDOW, Mixed
from tests.e2e.workload import kv_tokens, page_mode
from tests.kit.engine import Engine
from tests.store.unhurried import open_unhurried_engines

BLOCK = 32
SHORT, LONG = ("first", "second", "third"), "long"
LENGTHS = {"first": 800, "second": 700, "third": 600, LONG: 3800}
TEXTS = dict(zip(LENGTHS, prompts(tuple(LENGTHS.values()), 47), strict=True))


class Lending(Mixed):
    """Its DRAM is divided without being told."""

    def start(self) -> None:
        io = {"staging": "4MiB", "fault_file": str(self.control)}
        sparse = {"budget": 1, "exact_below": 1024}
        self.engine = Engine(
            self.model,
            ssdkv=page_mode(
                self.places, window=WINDOW, dram="18MiB", io=io, selector="bounds", sparse=sparse
            ),
            kv_tokens=2 * kv_tokens(WINDOW, CHUNK),
            max_num_batched_tokens=CHUNK,
            max_model_len=4096,
        )

    @property
    def fewest(self) -> int:
        """Frames that are always frames."""
        return int(self.worker.store.frames.frames)

    @property
    def frames(self) -> int:
        return int(self.worker.store.open_frames)


@pytest.fixture(scope="module")
def lending(
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Lending]:
    answers = stock.answers("llama", list(TEXTS.values()))
    wanted = {name: answer.tokens for name, answer in zip(TEXTS, answers, strict=True)}
    with pytest.MonkeyPatch.context() as patch:
        open_unhurried_engines(patch)
        control = tmp_path_factory.mktemp("faults") / "faults.json"
        nobody = dict.fromkeys(TEXTS)
        made = Lending(
            models["llama"],
            devices(4),
            control,
            [],
            wanted_of=wanted,
            asked=nobody,
            texts=TEXTS,
        )
        yield made
        made.engine.close()


def read(lending: Lending) -> float:
    return lending.count("context_pages_streamed", tier="ssd")


def test_short_requests_have_what_nobody_chooses_from(lending: Lending) -> None:
    """Computed, then as a hit, which was read once."""
    blocks = sum(LENGTHS[name] // BLOCK for name in SHORT)
    assert lending.fewest < blocks // 2
    lending.run(SHORT)
    assert lending.frames > blocks - len(SHORT) * WINDOW // BLOCK
    assert read(lending) == 0
    assert lending.count("sparse_selections") == 0
    summaries = lending.worker.store._summaries
    assert summaries.open_rows < summaries.rows
    every = np.arange(lending.scheduler.index.num_slots)
    lending.worker.store.frames.forget(every)
    loaded = lending.count("hit_tokens", tier="ssd")
    lending.run(SHORT)
    assert lending.count("hit_tokens", tier="ssd") > loaded
    assert read(lending) == 0
    assert lending.count("dram_frames") == lending.frames
    lending.assert_clean()


def test_it_goes_back_to_who_chooses_but_not_from_under_others(lending: Lending) -> None:
    lent = lending.frames - lending.fewest
    assert lent > 0
    seen: list[int] = []

    def look() -> None:
        seen.append(lending.frames)

    lending.run([LONG, *SHORT], after_step=lending.once_decoding(look))
    assert lending.count("sparse_selections") > 0
    # Beside the others it got what they do not attend to, and alone it gets everything.
    assert lending.fewest < seen[0] <= lending.fewest + lent
    assert lending.count("sparse_rows_exact") == 0
    pages, summaries = lending.worker.store._pages, lending.worker.store._summaries
    for _ in range(3):  # places go back as pages make room for others, guesses among them
        lending.run([LONG])
        if pages.open_places == pages.places:
            break
    assert lending.count("sparse_rows_exact") == 0
    assert pages.open_places == pages.places
    # There are rows for more requests than that.
    needed = LENGTHS[LONG] // BLOCK
    assert needed <= summaries.open_rows < summaries.rows
    assert lending.frames < lending.fewest + lent
    assert lending.count("page_cache_places") == pages.places
    assert lending.count("summaries_places") == summaries.open_rows
    lending.assert_clean()


def test_and_is_lent_again(lending: Lending) -> None:
    lending.run(SHORT)
    assert lending.frames > lending.fewest
    before = read(lending)
    lending.run(SHORT)
    assert read(lending) == before
    for name in ("checksum_failures", "load_failures", "slots_dropped", "recomputed_requests"):
        assert lending.count(name) == 0, name
    lending.assert_clean()
