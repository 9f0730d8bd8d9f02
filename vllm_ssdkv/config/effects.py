"""Options that are given and have no effect, by the conditions that they are declared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel

from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.problems import path_text
from vllm_ssdkv.config.schema import conditions_of

_BATCH_API: Final = (
    "`vllm serve` is started with VLLM_PLUGINS=ssdkv,ssdkv_batch and the other plugins in use"
)


@dataclass(frozen=True, slots=True)
class IneffectiveOption:
    """An option that was given in vain.

    Attributes:
        option: Where it is.
        condition: Under which it has an effect.
    """

    option: str
    condition: str

    def __str__(self) -> str:
        """As a line for the user."""
        return f"{self.option} has no effect unless {self.condition}"


def without_effect(config: SSDKVConfig, *, batch_api: bool = True) -> list[IneffectiveOption]:
    """The options that were given and have no effect.

    Args:
        config: The options.
        batch_api: Whether the server has the Batch API, as far as is known.
    """
    found = []
    for location, holder in _given(config, ()):
        conditions = conditions_of(type(holder).model_fields[str(location[-1])])
        missing = [one.text for one in conditions if not one.holds(config, holder)]
        if location[0] == "batch" and not batch_api:
            missing = [_BATCH_API]
        if missing:
            found.append(IneffectiveOption(path_text(location), missing[0]))
    return found


def _given(
    model: BaseModel, at: tuple[int | str, ...]
) -> Iterator[tuple[tuple[int | str, ...], BaseModel]]:
    """Find the place of each option that was given, and the group that holds it, as declared."""
    for name in type(model).model_fields:
        if name not in model.model_fields_set:
            continue
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _given(value, (*at, name))
            continue
        yield (*at, name), model
        if isinstance(value, tuple):
            for position, entry in enumerate(value):
                if isinstance(entry, BaseModel):
                    yield from _given(entry, (*at, name, position))
