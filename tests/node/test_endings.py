"""Clients of a pool that end in all ways after a node was lost: nothing is raised anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.child import Child
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


@pytest.fixture
def endings() -> Iterator[Child]:
    """The process that forks them."""
    with Child.python(SCRIPT) as made:
        assert made.hear() == "imported"
        yield made


@pytest.mark.parametrize("back", [False, True], ids=["gone", "back at once"])
def test_nothing_is_raised(endings: Child, place: Path, back: bool) -> None:  # noqa: F811
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
