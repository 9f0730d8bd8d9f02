"""Options that a request may choose for itself, in place of the engine's.

It is the object ``ssdkv`` in ``kv_transfer_params``, which vLLM takes with every request: a field
of the OpenAI API, and ``SamplingParams(extra_args={"kv_transfer_params": ...})`` in Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Final, NamedTuple, Optional

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.sizes import parse_duration
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.problems import problems
from vllm_ssdkv.config.schema import (
    Allowed,
    Condition,
    OptionModel,
    PerRequest,
    Reason,
    model_of,
)
from vllm_ssdkv.config.selectors import SELECTORS, SelectorName

NAME: Final = "ssdkv"
"""Name of the object in ``kv_transfer_params``."""
_MAX_DEPTH: Final = 4
_MAX_VALUES: Final = 64
"""Bounds of the depth and the size of a client's object. More of it is never looked at."""


class _Override(NamedTuple):
    """An option that requests may choose."""

    group: str
    mark: PerRequest


def _overrides(
    model: type[BaseModel], group: str = ""
) -> Iterator[tuple[str, _Override, FieldInfo]]:
    """Find the options that are declared so, with their names."""
    for name, field in model.model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, PerRequest):
                yield name, _Override(group, mark), field
        inner = model_of(field.annotation)
        if inner is not None and not group:
            yield from _overrides(inner, name)


def _asked(override: _Override, name: str, field: FieldInfo) -> Any:  # noqa: ANN401 - a declaration
    """Declare an option of requests like that of the engine, with None for "as the engine"."""
    path = f"{override.group}.{name}".lstrip(".")
    said = Field(description=f"Value of the option `{path}` for this request.")
    marks = override.mark.instead or tuple(field.metadata)
    kept = [mark for mark in marks if not isinstance(mark, Condition | PerRequest | Reason)]
    return Annotated[(Optional[field.annotation], *kept, said)], None  # noqa: UP045 - a value


_DECLARED: Final = tuple(_overrides(SSDKVConfig))
_OVERRIDES: Final = {name: override for name, override, _ in _DECLARED}
_Options: Any = create_model(
    "_Options",
    __base__=OptionModel,
    **{name: _asked(override, name, field) for name, override, field in _DECLARED},
)


class RequestOptions(_Options):  # type: ignore[misc]  # its fields are those of the engine's options
    """A request's own options; those that are None are as the engine has them."""

    retain: Annotated[
        int | None,
        Allowed('a duration such as "90s", "15m", "24h" or "7d", up to "30d"'),
        BeforeValidator(lambda value: None if value is None else parse_duration(value)),
        Field(description="Seconds for which the request's blocks are retained from its end on."),
    ] = None

    @classmethod
    def of(
        cls,
        given: object,
        config: SSDKVConfig,
        *,
        selects: bool = True,
        captured: bool = False,
    ) -> RequestOptions:
        """Check the options of a request against those of the engine. Any JSON value may come.

        Args:
            given: Options as the client sent them.
            config: The engine's.
            selects: Whether selectors know how the model makes its logits, and stores its KV.
            captured: Whether steps are CUDA graphs, which choose as the engine does.

        Raises:
            ConfigError: it is not what it should be, or the engine's store cannot serve it; says
                what is wrong and what is possible. Nothing else is raised: this runs in the
                engine core, which an exception would end.
        """
        _check_extent(given)
        try:
            raw = json.dumps(given)
            asked: RequestOptions = cls.model_validate_json(raw)
        except (TypeError, ValueError) as error:
            lines = [f"not a JSON object: {error}"]
            if isinstance(error, ValidationError):
                lines = problems(cls, json.loads(raw), error)
            raise ConfigError("; ".join(lines)) from None
        wrong = asked._wrong(config, selects, captured)
        if wrong:
            raise ConfigError(wrong)
        return asked

    def _wrong(self, config: SSDKVConfig, selects: bool, captured: bool) -> str:
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
        if not selects and selector not in ("exact", "window", config.selector):
            return f'selector: "{selector}" does not know the logits or the KV of this model'
        if selector not in (*possible, config.selector):
            return (
                f'selector: "{selector}" is not what this engine\'s store was made for; possible '
                f"here: {', '.join(possible)}"
            )
        graphs = capturable(config)
        if captured and selector not in graphs:
            return (
                f'selector: "{selector}" is not in the CUDA graphs of this engine; possible here: '
                f"{', '.join(graphs)}"
            )
        return ""

    def applied(self, config: SSDKVConfig) -> SSDKVConfig:
        """The engine's options as this request sees them."""
        changed: dict[str, dict[str, object]] = {"": {}, "sparse": {"scorer": config.scorer}}
        for name, (group, mark) in _OVERRIDES.items():
            value = getattr(self, name)
            if value is not None:
                changed.setdefault(group, {})[name] = value
                if mark.clears:
                    changed[group].setdefault(mark.clears, None)
        own = changed.pop("")
        groups = {n: getattr(config, n).model_copy(update=new) for n, new in changed.items()}
        return config.model_copy(update={**own, **groups})


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


def capturable(config: SSDKVConfig) -> tuple[SelectorName, ...]:
    """Selectors of requests that a CUDA graph of the engine's own selector serves, too."""
    scorer = (config.scorer,) if config.selector == "adaptive" else ()
    return tuple(dict.fromkeys(("exact", config.selector, *scorer, "window")))
