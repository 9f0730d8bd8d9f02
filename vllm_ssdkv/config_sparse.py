"""The ``sparse`` group of options: how much of a context a query reads, with a sparse selector."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BeforeValidator, Field

from vllm_ssdkv.options import Allowed, OptionModel, Reason
from vllm_ssdkv.sizes import MIB, SIZE_TEXT, size_or_none

MIN_PART: Final = MIB


class SparseConfig(OptionModel):
    """What a selector may choose, and the memory that choosing takes."""

    budget: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Share of a request's tokens that a query attends to, for each KV head. "
            "The window in HBM counts: the rest is chosen from the context, in whole pages.",
        ),
        Reason(
            "An eighth: the largest saving at which the methods that this follows still report "
            "answers close to those of full attention (docs/accuracy.md has ours)."
        ),
    ] = 0.125
    budget_tokens: Annotated[
        int | None,
        Field(ge=1, description="The same as a number of tokens; then `budget` is not used."),
        Reason("null: what a query needs grows with its context."),
    ] = None
    mass: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Share of the attention, by the selector's estimate, that `adaptive` "
            "covers with as few pages as it takes, within `floor` and `budget`.",
        ),
        Reason(
            "The estimate takes upper bounds for logits, so pages that do not matter look as if "
            "they did: much of what it calls missing is not."
        ),
    ] = 0.9
    floor: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Share of a request's tokens that `adaptive` attends to at least; at most "
            "`budget`.",
        ),
        Reason("A 32nd: where one page seems to be enough, the estimate may be wrong."),
    ] = 0.03125
    exact_below: Annotated[
        int | None,
        Field(
            ge=0,
            description="Requests of fewer tokens attend to everything, as with `exact`.",
        ),
        Reason(
            "null: the length at which the budget is twice the window. Below it most of the budget "
            "is what HBM holds anyway, and little would be chosen from the context."
        ),
    ] = None
    sink_tokens: Annotated[
        int,
        Field(
            ge=0,
            description="First tokens of a request, rounded up to pages, that are always chosen "
            "where the budget allows.",
        ),
        Reason(
            "Most models put attention there that belongs nowhere; one page holds those tokens."
        ),
    ] = 16
    dense_layers: Annotated[
        int,
        Field(
            ge=0,
            description="First layers of the model in which every query attends to everything.",
        ),
        Reason(
            "0: the budget is what it says. Some models spread attention in their first one or two "
            "layers; each costs a full read of the context in that layer."
        ),
    ] = 0
    page_cache: Annotated[
        int | None,
        Field(
            ge=MIN_PART,
            description="Memory per worker for single pages that were read, a part of dram_gib.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason(
            "null: a quarter of the worker's share of dram_gib. A step mostly needs the pages of "
            "the step before, which then are not read again."
        ),
    ] = None
    summaries: Annotated[
        int | None,
        Field(
            ge=MIN_PART,
            description="Memory per worker for the bounds of pages, a part of dram_gib. They take "
            "1/page_tokens of the KV that they stand for. Requests whose bounds do not fit attend "
            "to everything.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason("null: those of the whole store, but a quarter of the share of dram_gib at most."),
    ] = None
