"""Names that the option ``selector`` may have, and the classes behind them."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from vllm_ssdkv.base.registry import Registry, is_place

SelectorName: TypeAlias = str
"""``exact``, a name of :data:`SELECTORS`, or ``module:Class``."""

EXACT: Final = "exact"
"""The one without a class: nothing is selected."""

SELECTORS: Final[Registry[Any]] = Registry(
    "selector", "vllm_ssdkv.sparse.selector_parts:SelectorClass", versioned=True
)
for _name in ("bounds", "spread", "codes", "sparf", "adaptive", "swarm", "window"):
    SELECTORS.register(_name, f"vllm_ssdkv.sparse.selectors.{_name}:{_name.capitalize()}Selector")


def registered_name(value: str | None) -> str | None:
    """Check that a name is registered: a client brings no code.

    Raises:
        ValueError: it is not.
    """
    if value is not None and is_place(value):
        raise ValueError("a class of your own is named in the engine's configuration only")
    if value not in {None, EXACT, *SELECTORS.names()}:
        raise ValueError("")
    return value


def takes_scorer(name: SelectorName) -> bool:
    """Check whether a selector chooses by the scores of another one, ``sparse.scorer``."""
    return name in {"adaptive", "swarm"} or (name != EXACT and SELECTORS.is_guest(name))
