"""Arguments that the commands of ``ssdkv lab fpga`` share: the shape of the kernels."""

from __future__ import annotations

from typing import Annotated, Literal, cast

import typer

from vllm_ssdkv.cli.arguments import one_of
from vllm_ssdkv.fpga_offload.description import DTYPES, GROUPS, HEAD_SIZES, KernelShape

HeadSizeOption = Annotated[int, typer.Option(help="Channels of a head: 64, 128 or 256.")]
GroupOption = Annotated[int, typer.Option(help="Query heads per KV head: 1, 2, 4, 5 or 8.")]
DtypeOption = Annotated[str, typer.Option(help="Type of K and V: float16 or bfloat16.")]


def shape_of(head_size: int, group: int, dtype: str) -> KernelShape:
    """Shape of the kernels that were asked for.

    Raises:
        BadParameter: there are none of it.
    """
    one_of("--head-size", head_size, HEAD_SIZES)
    one_of("--group", group, GROUPS)
    one_of("--dtype", dtype, DTYPES)
    return KernelShape(head_size, group, cast(Literal["float16", "bfloat16"], dtype))
