"""The store behind vLLM's own offloading: ``module_path`` of an entry of ``secondary_tiers``."""

from vllm_ssdkv.secondary_tier.tier import SSDKVTier

__all__ = ["SSDKVTier"]
