"""Options that are given and have no effect, by a table: when each of them has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from vllm_ssdkv.base.host import is_block_device
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.problems import path_text
from vllm_ssdkv.config.selectors import takes_scorer


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition for an option to have an effect.

    Attributes:
        holds: Called with all options, and with the group or list entry that has this one.
        text: Reads well after "has no effect unless ".
    """

    holds: Callable[[SSDKVConfig, Any], bool]
    text: str


_PAGE: Final = Condition(lambda config, _: config.mode == "page", 'mode is "page"')
_CHOOSES: Final = Condition(
    lambda config, _: config.selector != "exact",
    'mode is "page" and selector "bounds", "spread", "codes", "sparf", "adaptive", "swarm" or '
    '"window"',
)
_SCORES_CHANNELS: Final = Condition(
    lambda config, _: config.scores_channels,
    'mode is "page" and selector "sparf", or "adaptive" or "swarm" with sparse.scorer "sparf"',
)
_KEEPS_RECORDS: Final = Condition(
    lambda config, _: config.keeps_page_records,
    'mode is "page" and selector "bounds", "window", "codes" or "spread", or "adaptive" or "swarm" '
    'with sparse.scorer "bounds", "codes" or "spread", and with "spread" sparse.estimate_rest is '
    "false",
)
_SCORES_CODES: Final = Condition(
    lambda config, _: config.scorer == "codes",
    'mode is "page" and selector "codes", or "adaptive" or "swarm" with sparse.scorer "codes"',
)
_SCORES_MASS: Final = Condition(
    lambda config, _: config.scores_channels or config.scorer == "spread",
    'mode is "page" and selector "sparf" or "spread", or "adaptive" or "swarm" with one of them as '
    "sparse.scorer",
)
_TAKES_A_SCORER: Final = Condition(
    lambda config, _: takes_scorer(config.selector),
    'mode is "page" and selector "adaptive" or "swarm"',
)
_SHARE_COUNTS: Final = Condition(
    lambda _, sparse: sparse.budget_tokens is None, "sparse.budget_tokens is left out"
)
_REUSES: Final = Condition(
    lambda _, sparse: sparse.reuse_steps > 1, "sparse.reuse_steps is above 1"
)
_STAGES: Final = Condition(
    lambda config, _: config.stages, 'mode is "page", or encryption is given a key'
)
_MAY_COMPUTE: Final = Condition(
    lambda config, _: config.mode == "reuse" or config.load == "always",
    'mode is "reuse": page mode always loads',
)
_SEVERAL: Final = Condition(lambda config, _: len(config.devices) > 1, "devices has another entry")
_RAW: Final = Condition(
    lambda config, _: not config.trim or any(is_block_device(d.path) for d in config.devices),
    "devices has a raw block device: data files are never trimmed",
)
_LASTS: Final = Condition(
    lambda _, fault: fault.kind in {"latency", "stall"}, 'kind is "latency" or "stall"'
)
_RANDOM: Final = Condition(
    lambda _, fault: fault.probability < 1 or fault.kind == "corrupt",
    'probability is below 1, or kind "corrupt"',
)

CONDITIONS: Final[Mapping[str, tuple[Condition, ...]]] = {
    "hbm_window_tokens": (_PAGE,),
    "page_tokens": (_PAGE,),
    "load": (_MAY_COMPUTE,),
    "trim": (_RAW,),
    "devices[].weight": (_SEVERAL,),
    "sparse.budget": (_CHOOSES, _SHARE_COUNTS),
    "sparse.budget_tokens": (_CHOOSES,),
    # Of an engine that chooses, a request may ask for the selector that has a use for these.
    "sparse.mass": (_CHOOSES,),
    "sparse.floor": (_CHOOSES,),
    "sparse.exact_below": (_CHOOSES,),
    "sparse.sink_tokens": (_CHOOSES,),
    "sparse.token_order": (_CHOOSES,),
    "sparse.dense_layers": (_CHOOSES,),
    "sparse.reuse_steps": (_CHOOSES,),
    "sparse.reuse_similarity": (_CHOOSES, _REUSES),
    "sparse.page_cache": (_CHOOSES,),
    "sparse.hbm_pages": (_CHOOSES,),
    "sparse.hbm_summaries": (_KEEPS_RECORDS,),
    "sparse.page_policy": (_CHOOSES,),
    "sparse.prefetch": (_CHOOSES,),
    "sparse.summaries": (_CHOOSES,),
    "sparse.scorer": (_TAKES_A_SCORER,),
    "sparse.estimate_rest": (_SCORES_MASS,),
    "sparse.channels": (_SCORES_CHANNELS,),
    "sparse.code_bits": (_SCORES_CODES,),
    "sparse.channel_dtype": (_SCORES_CHANNELS,),
    "sparse.channel_group": (_SCORES_CHANNELS,),
    "sparse.channel_pages": (_SCORES_CHANNELS,),
    "sparse.granularity": (_SCORES_CHANNELS,),
    "sparse.cluster_threshold": (_CHOOSES,),
    "sparse.cluster_size": (_CHOOSES,),
    "sparse.cluster_score": (_CHOOSES,),
    "sparse.cluster_affinity": (_CHOOSES,),
    "io.staging": (_STAGES,),
    "io.faults[].seconds": (_LASTS,),
    "io.faults[].seed": (_RANDOM,),
}
"""By option; ``[]`` marks the entries of a list. What is not named here always has an effect."""

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
        conditions = CONDITIONS.get(_without_positions(location), ())
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


def _without_positions(location: tuple[int | str, ...]) -> str:
    """The location as the option table names it: ``devices[].weight``."""
    text = path_text(location)
    for position in {part for part in location if isinstance(part, int)}:
        text = text.replace(f"[{position}]", "[]")
    return text
