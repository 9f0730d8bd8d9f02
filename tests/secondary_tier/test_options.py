"""Options of the tier: what is wrong is said by name, with the way out."""

from __future__ import annotations

import pytest

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.secondary_tier import tier_options
from vllm_ssdkv.secondary_tier.tier import SSDKVTier


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weights": "a"}, "weights: unknown option; did you mean weights_id?"),
        ({"qqqq": 1}, "qqqq: unknown option; known here: weights_id, on_reset,"),
        ({"verify_hits": 1}, "verify_hits: has no meaning in a secondary tier: leave it out"),
        ({"mode": "page"}, "mode: has no meaning in a secondary tier: leave it out"),
        ({"nodes": ["unix:///s"], "trim": True}, "trim: is an option of the node where there are"),
        ({"nodes": ["unix:///s"], "devices": ["/a"]}, "devices: is an option of the node where"),
        ({"nodes": ["unix:///s"], "replicas": 2}, "replicas: 2 nodes are to keep a block, one is"),
        ({"nodes": ["unix:///s"], "enable_kv_events": True}, "enable_kv_events: with nodes this"),
        (
            {"nodes": ["/s"]},
            "nodes: '/s' is no address of a node (its scheme is ''); write unix:///",
        ),
        ({"node_keys": "/k"}, "node_keys: has no meaning without nodes: name a node there"),
        ({"on_reset": "keep"}, 'on_reset: got "keep"; allowed: "new_identity" or "same_weights"'),
        ({"weights_id": ""}, 'weights_id: got ""; allowed: a text of 1 to 256 characters'),
        ({"locality": "NEAR"}, 'locality: got "NEAR"; allowed: "LOCAL" or "REMOTE"'),
        ({"devices": [{"path": "/a", "capacity": 1}]}, "devices[0].capacity: got 1; allowed:"),
        ({"replicas": 2, "devices": ["/a"]}, "replicas: 2 copies need 2 devices, 1 is given"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        tier_options(options)
    assert says in str(error.value)


def test_wrong_options_end_a_start_in_vllms_first_process() -> None:
    """There vLLM asks for the metrics."""
    entry = {"type": "SSDKVTier", "module_path": "vllm_ssdkv.secondary_tier", "backpressure": {}}
    assert SSDKVTier.build_metric_definitions(entry)
    with pytest.raises(ConfigError, match="weigths_id: unknown option"):
        SSDKVTier.build_metric_definitions({**entry, "weigths_id": "a"})


def test_options_are_the_stores_and_the_tiers_own() -> None:
    tier, store = tier_options({"devices": ["/a", "/b"], "weights_id": "w", "admission": "all"})
    assert (tier.weights_id, tier.on_reset) == ("w", "new_identity")
    assert [device.path for device in store.devices] == ["/a", "/b"]
    assert store.mode == "reuse"
