"""The limit of time of a test, for what happens after it failed, too.

pytest-timeout ends its timer at the first failure. A fixture that is torn down then, and waits for
something that the failed test has left, would wait for ever.
"""

from __future__ import annotations

from typing import Any

import pytest

LIMIT = pytest.StashKey[Any]()
"""Settings of pytest-timeout for the test."""


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:  # noqa: ANN401 - pytest-timeout's
    """Keep the limit; pytest-timeout sets its timer."""
    item.stash[LIMIT] = settings


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """The limit begins anew for the end of the test."""
    if LIMIT in item.stash:
        item.config.hook.pytest_timeout_set_timer(item=item, settings=item.stash[LIMIT])
