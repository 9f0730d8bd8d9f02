"""Clients of a pool that end in all ways after a node was lost: nothing is raised anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.test_pool import Site, place  # noqa: F401 - a fixture

SCRIPT = Path(__file__).with_name("ending_engine.py")
WAYS = (
    "closes",
    "closes twice",
    "closes late",
    "is used when it is closed",
    "closes at exit",
    "is told to end",
    "is told to end while it closes",
    "is forgotten",
    "just ends",
)


class Endings:
    """The process that forks them."""

    def __init__(self, place: Path):  # noqa: F811 - the directory of the fixture
        self.place = place
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.hear() == "imported"

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def endings(place: Path) -> Iterator[Endings]:  # noqa: F811 - likewise
    made = Endings(place)
    yield made
    made.process.kill()
    made.process.wait()


@pytest.mark.parametrize("back", [False, True], ids=["gone", "back at once"])
def test_nothing_is_raised(endings: Endings, place: Path, back: bool) -> None:  # noqa: F811
    site = Site(place, 2)
    errors = place / "errors"
    try:
        site.start(0)
        for how in WAYS:
            site.start(1)
            task = {"addresses": site.addresses, "how": how, "errors": str(errors)}
            endings.say(json.dumps(task))
            assert endings.hear() == "ready", errors.read_text()
            site.end(1)
            if back:
                site.start(1)
            endings.say("go on")
            assert endings.hear() == "ended 0", f"{how}: {errors.read_text()}"
            raised = [line for line in errors.read_text().splitlines() if "Error" in line]
            assert raised == [], f"{how}: {errors.read_text()}"
            site.end(1)
    finally:
        site.end(0)
        site.end(1)
