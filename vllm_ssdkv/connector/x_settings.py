"""Engines in which contexts may be stored as X: shape of the model, and obstacles."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.obstacle import Obstacle

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_ssdkv.offload.xcache.x_rule import XShape

logger = logging.getLogger(__name__)

OFF = "set offload.x_share to 0"


def x_shape(config: SSDKVConfig, vllm_config: VllmConfig) -> XShape | None:
    """Shape of the layers where contexts may be stored as X; None: none is."""
    if config.offload is None or config.offload.x_share == 0:
        return None
    shape = _shape(vllm_config)
    return shape if shape.pays else None


def why_x_does_not_pay(vllm_config: VllmConfig) -> str:
    """Reason for which X of this model is not smaller than its K and V."""
    shape = _shape(vllm_config)
    return (
        f"the model's X of a token has {shape.hidden} numbers in a layer, its K and V "
        f"{shape.kv_bytes // shape.itemsize}: query heads share KV heads, and X saves nothing"
    )


def _shape(vllm_config: VllmConfig) -> XShape:
    from vllm_ssdkv.offload.xcache.x_rule import XShape

    model = vllm_config.model_config
    layer = model.model_arch_config[0]
    return XShape(
        int(model.get_hidden_size()),
        int(layer.total_num_kv_heads),
        int(layer.head_size),
        int(model.dtype.itemsize),
    )


def obstacles_to_x(config: SSDKVConfig, vllm_config: VllmConfig) -> Iterator[Obstacle]:
    """Obstacles to contexts that are stored as X, where the options ask for it."""
    if config.offload is None or config.offload.x_share == 0:
        return
    if config.selector != "exact":
        yield Obstacle(
            "offload.x_share: pages of K cannot be chosen from contexts that are stored as X",
            ('use selector "exact"', OFF),
        )
    if x_shape(config, vllm_config) is None:
        return  # nothing is stored so, which the log says
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        yield Obstacle(
            "offload.x_share: each of several ranks would store X whole, which saves nothing",
            ("use --tensor-parallel-size 1", OFF),
        )
    if not vllm_config.model_config.enforce_eager:
        yield Obstacle(
            "offload.x_share: X is seen between the model's modules, which compiling joins",
            ("start with --enforce-eager", OFF),
        )
    if vllm_config.lora_config is not None:
        yield Obstacle(
            "offload.x_share: adapters are applied by the rows of a step, and X that is projected "
            "again has none",
            ("leave --enable-lora out", OFF),
        )
    if vllm_config.speculative_config is not None:
        yield Obstacle(
            "offload.x_share: X of tokens that were drafted and rejected would be stored",
            ("start without --speculative-config", OFF),
        )
    if vllm_config.model_config.uses_mrope:
        yield Obstacle(
            "offload.x_share: the model's positions have several dimensions, of which a context "
            "keeps none",
            (OFF,),
        )
