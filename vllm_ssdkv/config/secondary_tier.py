"""Options of the secondary tier: an entry of ``secondary_tiers`` of vLLM's OffloadingConnector."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import Field

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.problems import checked_options
from vllm_ssdkv.config.schema import Allowed, OptionModel, Reason

OF_THE_STORE: Final = (
    *("devices", "replicas", "state_dir", "recover", "dram_gib", "admission", "trim"),
    *("encryption", "io", "nodes", "node_keys"),
)
"""Options of docs/options.md that the tier has, too."""

OFFLOADING_FIELDS: Final = frozenset({"secondary_tiers", "spec_name", "cpu_bytes_to_use"})
"""Options of that connector by which they are known from those of ours."""

TIER_NAMES: Final = {"type": "SSDKVTier", "module_path": "vllm_ssdkv.secondary_tier"}
"""Fields by which vLLM finds our tier."""
_SPEC: Final = "TieringOffloadingSpec"
_OF_VLLM: Final = frozenset({*TIER_NAMES, "backpressure"})
"""Fields of an entry that vLLM takes out itself."""
_WHERE: Final = "secondary_tiers, SSDKVTier"
_MOST_ID: Final = 256


class SecondaryTierConfig(OptionModel):
    """Options that only the tier has. Build it with :func:`tier_options`."""

    weights_id: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=_MOST_ID,
            description="A name for the weights, which you change whenever the weights change. It "
            "takes the place of the digest of the weight files, and stored chunks stay findable "
            "after vLLM resets its cache.",
        ),
        Allowed(f"a text of 1 to {_MOST_ID} characters"),
        Reason(
            "null: ssdkv digests the weight files while the engine starts. A tier runs in vLLM's "
            "scheduler, which holds no weights."
        ),
    ] = None
    on_reset: Annotated[
        Literal["new_identity", "same_weights"],
        Field(
            description="Meaning of a reset of vLLM's cache (sleep, resume, weight update). "
            "`new_identity`: the weights may be others now, so the engine finds nothing that was "
            "stored before, and no later start finds what it stores from then on. `same_weights`: "
            "you promise that the weights never change while the engine runs, and everything "
            "stays findable. `weights_id` promises the same."
        ),
        Reason("new_identity: a tier cannot see whether the weights have changed."),
    ] = "new_identity"
    locality: Annotated[
        Literal["LOCAL", "REMOTE"] | None,
        Field(
            description="vLLM's field: where the drives are, for requests that choose tiers "
            "(`kv_load_tiers`) and for KV events."
        ),
        Allowed('"LOCAL" or "REMOTE"'),
        Reason("null: vLLM takes the tier for either."),
    ] = None
    enable_kv_events: Annotated[
        bool,
        Field(
            description="vLLM's field: publish an event for each chunk that the tier has stored "
            "or given up, where vLLM publishes KV events."
        ),
        Reason("false, as in vLLM's own tiers."),
    ] = False


def tier_options(options: Mapping[str, object]) -> tuple[SecondaryTierConfig, SSDKVConfig]:
    """Check the options of a tier: its own ones, and those of its store.

    Raises:
        ConfigError: one line per problem, as :func:`checked_options` says it.
    """
    own = SecondaryTierConfig.model_fields
    options = {name: value for name, value in options.items() if name not in _OF_VLLM}
    lines = []
    for name in options:
        if name in own or name in OF_THE_STORE:
            continue
        if name in SSDKVConfig.model_fields:
            lines.append(f"{name}: has no meaning in a secondary tier: leave it out")
            continue
        known = (*own, *OF_THE_STORE)
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        lines.append(f"{name}: unknown option; {hint}")
    if options.get("nodes") and options.get("enable_kv_events"):
        lines.append(
            "enable_kv_events: with nodes this engine does not see what others store and what the "
            "nodes evict: leave it out"
        )
    if lines:
        raise ConfigError(f"{_WHERE}:\n" + "\n".join(f"  {line}" for line in lines))
    tier = checked_options(
        SecondaryTierConfig, {k: v for k, v in options.items() if k in own}, _WHERE
    )
    return tier, SSDKVConfig.from_extra_config({k: v for k, v in options.items() if k not in own})


def tier_entries(extra: Mapping[str, object]) -> list[dict[str, object]]:
    """Our entries among ``kv_connector_extra_config`` of vLLM's OffloadingConnector.

    Raises:
        ConfigError: vLLM would make no tier of one, or not with these options.
    """
    given = extra.get("secondary_tiers")
    found, lines = [], list[str]()
    for at, entry in enumerate(given if isinstance(given, list) else []):
        if not isinstance(entry, dict):
            continue
        named = entry.get("type"), str(entry.get("module_path")).partition(".")[0]
        if named[0] != TIER_NAMES["type"] and named[1] != "vllm_ssdkv":
            continue
        found.append(entry)
        lines += [
            f'secondary_tiers[{at}].{name}: got {json.dumps(entry.get(name))}; give "{value}"'
            for name, value in TIER_NAMES.items()
            if entry.get(name) != value
        ]
    if not found:
        return []  # others' tiers, or none
    if extra.get("spec_name") != _SPEC:
        got = json.dumps(extra.get("spec_name"))
        lines.append(
            f'spec_name: got {got}, with which vLLM has no secondary tiers; give "{_SPEC}"'
        )
    if "cpu_bytes_to_use" not in extra:
        lines.append("cpu_bytes_to_use: missing; give the size of vLLM's pool, in bytes")
    known = {*SecondaryTierConfig.model_fields, *OF_THE_STORE}
    lines += [
        f"{name}: belongs into the entry of secondary_tiers" for name in extra if name in known
    ]
    if lines:
        raise ConfigError("kv_connector_extra_config:\n" + "\n".join(f"  {line}" for line in lines))
    return found
