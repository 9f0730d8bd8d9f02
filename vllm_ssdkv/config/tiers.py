"""Names that the option ``tier`` may have, and the classes behind them."""

from __future__ import annotations

from typing import Any, Final

from vllm_ssdkv.base.registry import Registry

TIERS: Final[Registry[Any]] = Registry("tier", "vllm_ssdkv.store.guest_tier:Tier", versioned=True)
