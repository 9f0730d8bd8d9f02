"""Options that a request may choose for itself, in place of the engine's.

It is the object ``ssdkv`` in ``kv_transfer_params``, which vLLM takes with every request: a field
of the OpenAI API, and ``SamplingParams(extra_args={"kv_transfer_params": ...})`` in Python.
"""

from __future__ import annotations

import json
from typing import Annotated, Final

from pydantic import AfterValidator, Field, ValidationError

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.registry import is_place
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.problems import problems
from vllm_ssdkv.config.schema import Allowed, OptionModel, names_text
from vllm_ssdkv.config.selectors import EXACT, SELECTORS, SelectorName

NAME: Final = "ssdkv"
"""Name of the object in ``kv_transfer_params``."""
_MAX_DEPTH: Final = 4
_MAX_VALUES: Final = 64
"""Bounds of the depth and the size of a client's object. More of it is never looked at."""


def _registered(value: str | None) -> str | None:
    """A name that is registered: a client brings no code."""
    if value is not None and is_place(value):
        raise ValueError("a class of your own is named in the engine's configuration only")
    if value not in {None, EXACT, *SELECTORS.names()}:
        raise ValueError("")
    return value


class RequestOptions(OptionModel):
    """A request's own selector and budget; what is None is as the engine has it."""

    selector: Annotated[
        SelectorName | None,
        Allowed(names_text(SELECTORS, EXACT, guests=False)),
        AfterValidator(_registered),
        Field(description="As the option `selector`."),
    ] = None
    budget: Annotated[
        float | None, Field(gt=0, le=1, description="As the option `sparse.budget`.")
    ] = None
    budget_tokens: Annotated[
        int | None, Field(ge=1, description="As the option `sparse.budget_tokens`.")
    ] = None

    @classmethod
    def of(cls, given: object, config: SSDKVConfig) -> RequestOptions:
        """Check the options of a request against those of the engine. Any JSON value may come.

        Raises:
            ConfigError: it is not what it should be, or the engine's store cannot serve it; says
                what is wrong and what is possible. Nothing else is raised: this runs in the
                engine core, which an exception would end.
        """
        _check_extent(given)
        try:
            raw = json.dumps(given)
            asked = cls.model_validate_json(raw)
        except (TypeError, ValueError) as error:
            lines = [f"not a JSON object: {error}"]
            if isinstance(error, ValidationError):
                lines = problems(cls, json.loads(raw), error)
            raise ConfigError("; ".join(lines)) from None
        wrong = asked._wrong(config)
        if wrong:
            raise ConfigError(wrong)
        return asked

    def _wrong(self, config: SSDKVConfig) -> str:
        selector = self.selector or config.selector
        budgets = self.budget is not None, self.budget_tokens is not None
        if any(budgets) and selector == "exact":
            return 'selector "exact" attends to everything: give no budget, or another selector'
        if all(budgets):
            return "budget, budget_tokens: give one of them"
        if self.budget_tokens is not None and self.budget_tokens <= config.window_tokens:
            return (
                f"budget_tokens: {self.budget_tokens} is not more than hbm_window_tokens "
                f"({config.window_tokens}), which counts in it"
            )
        possible = servable(config)
        if selector not in possible:
            return (
                f'selector: "{selector}" is not what this engine\'s store was made for; possible '
                f"here: {', '.join(possible)}"
            )
        return ""

    def applied(self, config: SSDKVConfig) -> SSDKVConfig:
        """The engine's options as this request sees them."""
        changed: dict[str, object] = {"scorer": config.scorer}
        if self.budget is not None:
            changed |= {"budget": self.budget, "budget_tokens": None}
        if self.budget_tokens is not None:
            changed["budget_tokens"] = self.budget_tokens
        sparse = config.sparse.model_copy(update=changed)
        selector = self.selector or config.selector
        return config.model_copy(update={"selector": selector, "sparse": sparse})


def _check_extent(given: object) -> None:
    """Refuse an object that is too deep or too large, without recursion.

    Raises:
        ConfigError: it is.
    """
    level, values = [given], 0
    for _ in range(_MAX_DEPTH + 1):
        inner: list[object] = []
        for value in level:
            if isinstance(value, dict | list | tuple):
                values += len(value)
                if values > _MAX_VALUES:
                    raise ConfigError(f"the object has more than {_MAX_VALUES} values")
                inner.extend(value.values() if isinstance(value, dict) else value)
        level = inner
    if level:
        raise ConfigError(f"the object is nested more than {_MAX_DEPTH} deep")


def servable(config: SSDKVConfig) -> tuple[SelectorName, ...]:
    """Selectors that a request may ask for: those that need no more than what slots hold."""
    if config.selector == "exact":
        return ("exact",)
    guests = [name for name in SELECTORS.names() if SELECTORS.is_guest(name)]
    return ("exact", config.scorer, "adaptive", "swarm", "window", *guests)
