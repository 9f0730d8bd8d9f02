"""Two lanes of one run: workers of pytest-xdist that begin at opposite ends of one queue of files.

One lane begins with the files whose tests start engines, the other with those that start none, so
that one waits while the other computes. Whichever ends first takes what is left from its own end.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ENGINE = "engine"
"""Mark of a test that starts a vLLM engine or server."""


class LaneScheduling(LoadFileScheduling):
    """Files stay whole and in the order of collection; every second worker takes the last one."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if int(node.gateway.id.removeprefix("gw")) % 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LaneScheduling:
    config.option.loadscopereorder = False  # by number of tests
    return LaneScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In a lane, files with engines come first. At both ends are files that may take long: one of
    them must not be the last."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    engines = {item.path for item in items if item.get_closest_marker(ENGINE)}
    limits: dict[Path, float] = {}
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit = 0.0 if marker is None else float(marker.args[0])
        limits[item.path] = max(limit, limits.get(item.path, 0.0))

    def place(item: pytest.Item) -> tuple[bool, float]:
        limit = limits[item.path]
        return (False, -limit) if item.path in engines else (True, limit)

    items.sort(key=place)
