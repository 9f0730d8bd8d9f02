"""The ``sparse`` group of options: how much of a context a query reads, with a sparse selector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field

from vllm_ssdkv.base.sizes import MIB, SIZE_TEXT, parse_size, size_or_none
from vllm_ssdkv.config.schema import Allowed, Condition, OptionModel, PerRequest, Reason
from vllm_ssdkv.config.selectors import takes_scorer

MIN_PART: Final = MIB

LEAST_CHOOSING: Final = 4096
"""Tokens of a request below which sparse decode was slower than exact: what choosing costs does not
grow with the request, what it saves does. A fixed number, since answers must not depend on how fast
a machine happens to be."""


ScorerName = Literal["bounds", "spread", "codes", "sparf"]
"""Selectors that score pages."""


# Where an engine chooses, a request may ask for the selector that has a use for an option.
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


_CODES_INSTEAD: Final = (
    'was removed; selector "codes" (or "adaptive") chooses better from less memory, by '
    "sparse.code_bits"
)


class ScoringConfig(OptionModel):
    """Scores that pages and tokens are chosen by."""

    removed: ClassVar[Mapping[str, str]] = {
        "channel_dtype": _CODES_INSTEAD,
        "channel_group": _CODES_INSTEAD,
    }

    scorer: Annotated[
        ScorerName,
        Field(
            description="Scores by which `adaptive` and `swarm` rank pages: those of the selector "
            "of that name."
        ),
        Reason(
            "codes: `adaptive` gets a correct estimate from it; from `sparf` it stops before it "
            "has found the relevant pages (docs/accuracy.md). It takes about as little memory as "
            "`bounds` and `spread`."
        ),
        _TAKES_A_SCORER,
    ] = "codes"
    code_bits: Annotated[
        Literal[1, 2, 4],
        Field(description="Bits per number of K in `codes`. A store cannot change it."),
        Reason(
            "2: it gives the answers of exact attention from a fourteenth of the KV "
            "(docs/accuracy.md). 1 bit takes about half of that, 4 bits take twice as much."
        ),
        _SCORES_CODES,
    ] = 2
    estimate_rest: Annotated[
        bool,
        Field(
            description="Approximate the tokens that a query does not attend to by the mean V of "
            "all tokens, weighted by the mass that scores give them (`sparf` and `spread`; step 5 "
            "of SparQ). Summaries of `spread` then hold a sum of V for each block, 1/(block size) "
            "of the KV more. A store of `spread` cannot change it."
        ),
        Reason(
            "false: with `sparf` it makes the distance from exact attention on text 1.6 times as "
            "long (docs/decisions/018-tokens-by-key-and-no-mean-v.md)."
        ),
        _SCORES_MASS,
    ] = False
    channels: Annotated[
        int | None,
        Field(
            ge=1,
            description="Number of channels of K from which `sparf` scores tokens, for each KV "
            "head: those in which the query is largest.",
        ),
        Reason("null: an eighth of the head size, 16 of 128 channels; no paper gives a default."),
        _SCORES_CHANNELS,
    ] = None
    granularity: Annotated[
        Literal["page", "token"],
        Field(
            description="Unit that `sparf` chooses and counts. `token` attends to the chosen "
            "tokens only, and reads every page that holds one; `adaptive` chooses pages in any "
            "case."
        ),
        Reason("page: reads stay within the budget. Single tokens touch many pages."),
        _SCORES_CHANNELS,
    ] = "page"
    channel_pages: Annotated[
        Literal["dram", "ssd"],
        Field(
            description="Place of the second copy of K by which `sparf` scores. `dram` keeps it "
            "in `summaries`. `ssd` reads the pages that hold a chosen channel for every token. A "
            "page has 2 x head size x page_tokens / block size channels, and may have 4: this "
            "needs blocks of head size x page_tokens / 2 tokens and more, 1024 at head size 128. "
            "The store is the same."
        ),
        Reason("dram: the channels of a token are spread over the whole context."),
        _SCORES_CHANNELS,
    ] = "dram"


class SparseConfig(ScoringConfig):
    """Limits of a selector's choice, and the memory that choosing takes."""

    budget: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Share of a request's tokens that a query attends to, for each KV head. "
            "It includes the window in HBM: the rest is chosen from the context, in whole pages.",
        ),
        Reason(
            "An eighth: the largest saving at which the published methods still report answers "
            "close to those of full attention (docs/accuracy.md has ours)."
        ),
        _CHOOSES,
        _SHARE_COUNTS,
        PerRequest(clears="budget_tokens"),
    ] = 0.125
    budget_tokens: Annotated[
        int | None,
        Field(ge=1, description="Budget as a number of tokens; it replaces `budget`."),
        Reason("null: a query needs more tokens from a longer context."),
        _CHOOSES,
        PerRequest(),
    ] = None
    mass: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Share of the attention, by the selector's estimate, that `adaptive` "
            "covers with as few pages as possible, within `floor` and `budget`.",
        ),
        Reason(
            "0.9: chosen before `codes` existed. To find single words in a long text take 0.95, "
            "which gave the answers of exact attention from a tenth of the pages "
            "(docs/accuracy.md)."
        ),
        _CHOOSES,
    ] = 0.9
    floor: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Minimum share of the context outside the window that `adaptive` chooses, "
            "as far as `budget` allows.",
        ),
        Reason("A 32nd: where one page seems to be enough, the estimate may be wrong."),
        _CHOOSES,
    ] = 0.03125
    exact_below: Annotated[
        int | None,
        Field(
            ge=0,
            description="Number of tokens below which a request attends to everything, as with "
            "`exact`.",
        ),
        Reason(
            "null: the length at which the budget is twice the window, and at least 4,096. Below "
            "it HBM holds most of the budget anyway. Below 4,096 choosing takes longer than "
            "attending to everything in DRAM (`ssdkv lab bench decode`, one request at a time)."
        ),
        _CHOOSES,
    ] = None
    sink_tokens: Annotated[
        int,
        Field(
            ge=0,
            description="Number of a request's first tokens, rounded up to pages, that are always "
            "chosen if the budget allows.",
        ),
        Reason("16: most models park unneeded attention there; one page holds those tokens."),
        _CHOOSES,
    ] = 16
    token_order: Annotated[
        Literal["position", "keys", "coactivation"],
        Field(
            description="Order of a block's tokens, which decides the tokens that share a page, "
            "for each layer and KV head. `position` groups neighbours, `keys` tokens with similar "
            "K, `coactivation` tokens that the last queries of the prompt's step attended to "
            "together (blocks that decoding completes use K). The pages of `sink_tokens` and "
            "layers with a sliding window keep their tokens. A store cannot change it."
        ),
        Reason(
            "keys: the same bytes carry more attention. On text it took 20 % off the distance of "
            "`sparf` from exact attention, and 41 % off that of `spread` "
            "(docs/decisions/018-tokens-by-key-and-no-mean-v.md)."
        ),
        _CHOOSES,
    ] = "keys"
    dense_layers: Annotated[
        int,
        Field(
            ge=0,
            description="Number of first layers in which every query attends to everything; "
            "layers with a sliding window do not count.",
        ),
        Reason(
            "0: all layers keep to the budget. Some models spread attention in their first "
            "layers; each costs a full read of the context."
        ),
        _CHOOSES,
    ] = 0
    reuse_steps: Annotated[
        int,
        Field(
            ge=1,
            description="Number of tokens for which a choice of pages is kept, including the one "
            "that chose; tokens that leave the window meanwhile are attended to as well. With 1 "
            "every query chooses.",
        ),
        Reason(
            "1: every token attends to the choice of its own query. More saves time and reads; "
            "`ssdkv lab bench accuracy --reuse-steps` measures the loss of accuracy."
        ),
        _CHOOSES,
    ] = 1
    reuse_similarity: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Select again when the query's similarity falls below this: the cosine "
            "with the query that chose, averaged over a KV head's query heads, for any KV head of "
            "the layer.",
        ),
        Reason(
            "0.8: neighbouring queries of language models are reported to have 0.84 on average. "
            "Queries of the demo's model differ more, so it reuses next to nothing."
        ),
        _CHOOSES,
        _REUSES,
    ] = 0.8
    page_cache: Annotated[
        int | None,
        Field(
            ge=MIN_PART,
            description="Memory per worker for single pages that were read, part of dram_gib.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason(
            "null: four fifths of dram_gib after `io.staging` and `summaries`, at most the "
            "contexts that can run at a time. The rest holds whole blocks, which also use all but "
            "a 32nd of this memory while choosing requests need less; a given size is for single "
            "pages only. A step mostly needs the pages of the step before: with half of the "
            "memory for them, it took three times as long."
        ),
        _CHOOSES,
    ] = None
    hbm_pages: Annotated[
        int | None,
        Field(
            ge=MIN_PART,
            description="GPU memory per worker for single chosen pages, so that they need not "
            "cross PCIe again. It comes on top of vLLM's memory, so lower "
            "--gpu-memory-utilization by as much. Where CUDA graphs hold whole steps, only these "
            "use it. On a CPU it is DRAM beside `dram_gib`, and gains nothing.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason(
            "null: none. It helps once it holds the pages that a step chooses in all layers "
            "together; if it is smaller, most pages are evicted before they are chosen again."
        ),
        _CHOOSES,
    ] = None
    hbm_summaries: Annotated[
        int,
        Field(
            ge=0,
            description="GPU memory per worker for the summaries of `bounds`, `window`, `spread` "
            "and `codes`, which then neither cross PCIe for every token nor take part of "
            "dram_gib. It counts in --gpu-memory-utilization. Summaries stay in DRAM on a CPU, "
            "and if the GPU has room for fewer blocks than DRAM. 0 keeps them in DRAM.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(parse_size),
        Reason("0: the gain was not measured, and the KV cache is smaller by as much."),
        _KEEPS_RECORDS,
    ] = 0
    page_policy: Annotated[
        Literal["lru", "frequency", "decay"],
        Field(
            description="Eviction policy for single pages, in `page_cache` and in `hbm_pages`, "
            "which CUDA graphs manage by `lru`. "
            "`lru` evicts the page chosen longest ago, `decay` the page chosen least often, where "
            "each token takes three tenths off the earlier count. `frequency` evicts the page "
            "with the smallest frequency times read time (Swarm)."
        ),
        Reason(
            "lru: the next query mostly chooses the same pages, and pages of ended requests go "
            "sooner. Take `decay` if the cache holds less than a step chooses in all layers "
            "together: there `lru` finds nothing again."
        ),
        _CHOOSES,
    ] = "lru"
    prefetch: Annotated[
        bool,
        Field(
            description="Prefetch: while a layer is attended to, read the pages that the request "
            "chose in the next layer for its token before, if they are no longer in DRAM; and, as "
            "far as devices would be idle, the next best pages by the scores of that choice.",
        ),
        Reason(
            "true: it hides the latency of the drives. Wrong predictions cost bandwidth: turn it "
            "off if others need the drives more."
        ),
        _CHOOSES,
    ] = True
    summaries: Annotated[
        int | None,
        Field(
            ge=MIN_PART,
            description="Memory per worker for the selectors' data about pages, part of dram_gib. "
            "Summaries of `bounds` and `spread` take 1/page_tokens of their KV, codes of 2 bits a "
            "fourteenth, the channels of `sparf` half of it. Requests that find no room attend to "
            "everything.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason(
            "null: enough for as many requests of `--max-model-len` as can run at a time, by "
            "`--max-num-seqs` and by the room in HBM for their windows. It is at most two fifths "
            "of dram_gib after `io.staging`, or more for channels (docs/sizing.md). While fewer "
            "or shorter contexts run, whole blocks also use the rest; a given size is for "
            "summaries only."
        ),
        _CHOOSES,
    ] = None
    cluster_threshold: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Distance below which `swarm` puts pages into a cluster: 1 minus the "
            "share of queries that chose both, as `cluster_affinity` counts it.",
        ),
        Reason(
            "0.5: at least half of the queries chose the pages together. The paper names no value."
        ),
        _CHOOSES,
    ] = 0.5
    cluster_size: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="Maximum number of pages in a cluster of `swarm`. With 1 each page is by "
            "itself.",
        ),
        Reason(
            "8: larger clusters bring more pages that the query does not need, and take more "
            "memory, 4 bytes a page and copy."
        ),
        _CHOOSES,
    ] = 8
    cluster_score: Annotated[
        Literal["members", "medoid"],
        Field(
            description="Score of a cluster of `swarm`: the mean of its pages' scores, or the "
            "score of its middle page, as in the paper."
        ),
        Reason("members: it found more of the attention on most texts."),
        _CHOOSES,
    ] = "members"
    cluster_affinity: Annotated[
        Literal["jaccard", "conditional"],
        Field(
            description="Affinity of two pages for `swarm`: the queries that chose both, as a "
            "share of those that chose either (`jaccard`) or of those that chose the rarer one "
            "(`conditional`, after the paper)."
        ),
        Reason(
            "conditional: as in the paper, and the one that finds clusters: `jaccard` finds "
            "hardly any at a threshold of 0.5 (docs/clusters.md)."
        ),
        _CHOOSES,
    ] = "conditional"
