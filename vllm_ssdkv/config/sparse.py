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
            description="By what `adaptive` and `swarm` score pages; as the selector of that name "
            "does."
        ),
        Reason(
            "codes: what `adaptive` estimates by it is so; by `sparf` it stops before it has found "
            "what the query looks for (docs/accuracy.md). It takes about as little memory as "
            "`bounds` and `spread`."
        ),
        _TAKES_A_SCORER,
    ] = "codes"
    code_bits: Annotated[
        Literal[1, 2, 4],
        Field(
            description="Bits in which `codes` has each number of K. A store made with one number "
            "cannot be used with another."
        ),
        Reason(
            "2: it answers what exact attention answers, from a thirteenth of the KV "
            "(docs/accuracy.md). 1 bit takes about half of that, 4 bits take twice as much."
        ),
        _SCORES_CODES,
    ] = 2
    estimate_rest: Annotated[
        bool,
        Field(
            description="With `sparf` and `spread`, what a query does not attend to counts as the "
            "mean V of all tokens, weighted by the mass that scores give to it (step 5 of SparQ). "
            "Summaries of `spread` then hold a sum of V for each block, 1/(block size) of the KV "
            "more: its store made with it cannot be used without, nor the other way."
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
            description="Channels of K from which `sparf` scores tokens, for each KV head: those "
            "in which the query is largest.",
        ),
        Reason("null: an eighth of the head size, 16 of 128 channels; no paper gives a default."),
        _SCORES_CHANNELS,
    ] = None
    granularity: Annotated[
        Literal["page", "token"],
        Field(
            description="What `sparf` chooses and counts. `token` attends to the chosen tokens "
            "only, and reads every page that holds one; `adaptive` chooses pages in any case."
        ),
        Reason("page: reads the budget and no more. Single tokens touch many pages."),
        _SCORES_CHANNELS,
    ] = "page"
    channel_pages: Annotated[
        Literal["dram", "ssd"],
        Field(
            description="Where the second copy of K is read from that `sparf` scores by. `dram`: a "
            "part of `summaries`. `ssd`: pages that hold a chosen channel are read for every "
            "token; a page has 2 x head size x page_tokens / block size channels, so this wants "
            "blocks of 1024 tokens and more. The store is the same."
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
            "The window in HBM counts: the rest is chosen from the context, in whole pages.",
        ),
        Reason(
            "An eighth: the largest saving at which the methods that this follows still report "
            "answers close to those of full attention (docs/accuracy.md has ours)."
        ),
        _CHOOSES,
        _SHARE_COUNTS,
        PerRequest(clears="budget_tokens"),
    ] = 0.125
    budget_tokens: Annotated[
        int | None,
        Field(ge=1, description="The same as a number of tokens; then `budget` is not used."),
        Reason("null: what a query needs grows with its context."),
        _CHOOSES,
        PerRequest(),
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
            "0.9: chosen before `codes` were there. For single words in a long text take 0.95, "
            "which answered what exact attention answers from a tenth of the pages "
            "(docs/accuracy.md). The estimate by `codes` is true, that by `sparf` too high; with "
            "`bounds` pages that do not matter look as if they did."
        ),
        _CHOOSES,
    ] = 0.9
    floor: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Share of the context, which the window is not a part of, that `adaptive` "
            "chooses at least, as far as `budget` allows.",
        ),
        Reason("A 32nd: where one page seems to be enough, the estimate may be wrong."),
        _CHOOSES,
    ] = 0.03125
    exact_below: Annotated[
        int | None,
        Field(
            ge=0,
            description="Requests of fewer tokens attend to everything, as with `exact`.",
        ),
        Reason(
            "null: the length at which the budget is twice the window, and no less than 4,096. "
            "Below the one most of the budget is what HBM holds anyway, and little would be chosen "
            "from the context. Below the other choosing takes longer than attending to everything "
            "where DRAM holds it (measured by `ssdkv bench decode` for one request at a time)."
        ),
        _CHOOSES,
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
        _CHOOSES,
    ] = 16
    token_order: Annotated[
        Literal["position", "keys", "coactivation"],
        Field(
            description="Which tokens of a block share a page, for each layer and KV head: "
            "neighbours (`position`), those with alike K (`keys`), or those that the last queries "
            "of the prompt's step attended to together (`coactivation`; blocks that decoding "
            "completes go by K). The pages of `sink_tokens` and layers with a sliding window keep "
            "their tokens. A store made with one cannot be used with another."
        ),
        Reason(
            "keys: the same bytes say more. On text it took 20 % off the distance of `sparf` from "
            "exact attention, and 41 % off that of `spread`, with blocks of 128 tokens; blocks of "
            "one page have nothing to gain "
            "(docs/decisions/018-tokens-by-key-and-no-mean-v.md)."
        ),
        _CHOOSES,
    ] = "keys"
    dense_layers: Annotated[
        int,
        Field(
            ge=0,
            description="First layers in which every query attends to everything; layers with a "
            "sliding window do not count.",
        ),
        Reason(
            "0: the budget is what it says. Some models spread attention in their first one or two "
            "layers; each costs a full read of the context in that layer."
        ),
        _CHOOSES,
    ] = 0
    reuse_steps: Annotated[
        int,
        Field(
            ge=1,
            description="Tokens for which a choice of pages is kept, the one whose query chose "
            "included; what leaves the window meanwhile is attended to as well. 1: every query "
            "chooses.",
        ),
        Reason(
            "1: every token attends to what its own query chose. More spares time and reads; what "
            "it costs in answers, `ssdkv bench accuracy --reuse-steps` says for the demo's model."
        ),
        _CHOOSES,
    ] = 1
    reuse_similarity: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="A query chooses at once if its cosine with the query that chose, the mean "
            "over a KV head's query heads, is less than this for any KV head of the layer.",
        ),
        Reason(
            "0.8: neighbouring queries of language models are reported to have 0.84 on average. "
            "Those of the demo's model look up something else nearly every time: the medians of "
            "its three layers are 0.76, 0.17 and -0.06, so it reuses next to nothing."
        ),
        _CHOOSES,
        _REUSES,
    ] = 0.8
    page_cache: Annotated[
        int | None,
        Field(
            ge=MIN_PART,
            description="Memory per worker for single pages that were read, a part of dram_gib.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason(
            "null: four fifths of what `io.staging` and `summaries` leave of dram_gib, and no more "
            "than the contexts that can run at a time; the rest is for whole blocks, which are "
            "written from there, found again, and read by requests that attend to everything. "
            "While requests that choose need less, all but a 32nd of it is for whole blocks, too; "
            "what is given is for single pages only. A "
            "step mostly needs the pages of the step before, which then are not read again, if "
            "there is room for all of them: with half of that, it took three times as long."
        ),
        _CHOOSES,
    ] = None
    hbm_pages: Annotated[
        int | None,
        Field(
            ge=MIN_PART,
            description="Memory of the GPU per worker for single pages that were chosen, so that "
            "they need not cross PCIe again; beside what vLLM takes, so lower its "
            "--gpu-memory-utilization by as much. On a CPU a piece of DRAM beside `dram_gib`, "
            "which gains nothing.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason(
            "null: none. It helps from the size on of what a step chooses in all layers together; "
            "with less, pages mostly make room for others before they are chosen again."
        ),
        _CHOOSES,
    ] = None
    hbm_summaries: Annotated[
        int,
        Field(
            ge=0,
            description="Memory of the GPU per worker for the summaries of `bounds`, `window`, "
            "`spread` and `codes`, which then need not cross PCIe for every token, nor take a part "
            "of dram_gib. It is taken before vLLM measures what is left for its KV cache, and "
            "counts in --gpu-memory-utilization. Summaries stay in DRAM where the GPU has no room "
            "for this, where it would hold those of fewer blocks than DRAM, and on a CPU. 0: DRAM.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(parse_size),
        Reason(
            "0: what it gains was not measured, and the KV cache is smaller by as much. Bounds "
            "take 1/page_tokens of the KV of all contexts that are chosen from."
        ),
        _KEEPS_RECORDS,
    ] = 0
    page_policy: Annotated[
        Literal["lru", "frequency", "decay"],
        Field(
            description="Which single page makes room for another, in `page_cache` and in "
            "`hbm_pages`: `lru` the one that was chosen longest ago; `decay` the one that was "
            "chosen least often, where each token takes three tenths off what was counted before "
            "it; `frequency` the one with the least frequency times time of a read, where the "
            "frequency grows by one when a page is chosen and falls by one per token when it is "
            "cached and not chosen (Swarm)."
        ),
        Reason(
            "lru: what a query chooses, the next one mostly chooses again, and what requests that "
            "have ended chose often is gone sooner. `decay` where the cache has room for less than "
            "a step chooses in all layers together: there `lru` finds nothing again."
        ),
        _CHOOSES,
    ] = "lru"
    prefetch: Annotated[
        bool,
        Field(
            description="While a layer is attended to, read what the request chose in the next "
            "layer for its token before, where DRAM has it no more; and, as far as devices would "
            "be idle, what came next by the scores of that choice.",
        ),
        Reason(
            "true: it hides time of the drives. Wrong guesses cost bandwidth: with drives that "
            "others need more, turn it off."
        ),
        _CHOOSES,
    ] = True
    summaries: Annotated[
        int | None,
        Field(
            ge=MIN_PART,
            description="Memory per worker for what selectors know of pages, a part of dram_gib. "
            "Those of `bounds` and `spread` take 1/page_tokens of the KV that they stand for, "
            "codes of 2 bits a thirteenth, the channels of `sparf` half "
            "of it. Requests for which there is no room attend to everything.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason(
            "null: those of the contexts of as many requests of `--max-model-len` as can run at a "
            "time, by `--max-num-seqs` and by the room in HBM for their windows, but at most two "
            "fifths of what `io.staging` leaves of dram_gib, or more for channels, which are "
            "larger (docs/sizing.md). A request that cannot choose reads its whole context for "
            "every token. While fewer or shorter contexts run, the rest is for whole blocks, too; "
            "what is given is for summaries only."
        ),
        _CHOOSES,
    ] = None
    cluster_threshold: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Distance below which `swarm` puts pages into a cluster: 1 less the share "
            "of queries that chose both, as `cluster_affinity` counts it.",
        ),
        Reason(
            "0.5: pages that at least half of the queries chose together. The paper names no value."
        ),
        _CHOOSES,
    ] = 0.5
    cluster_size: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="Most pages of a cluster of `swarm`. 1: each page is by itself.",
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
            description="Score of a cluster of `swarm`: the mean of its pages' scores, or that of "
            "the page in its middle, as in the paper."
        ),
        Reason("members: found more of the attention on most texts (docs/internals/clusters.md)."),
        _CHOOSES,
    ] = "members"
    cluster_affinity: Annotated[
        Literal["jaccard", "conditional"],
        Field(
            description="How much two pages belong together for `swarm`: queries that chose both "
            "of those that chose either (`jaccard`), or of those that chose the rarer one "
            "(`conditional`, after the paper)."
        ),
        Reason(
            "conditional: as in the paper, and the one by which pages have company: by `jaccard` "
            "hardly any has at a threshold of 0.5 (docs/clusters.md)."
        ),
        _CHOOSES,
    ] = "conditional"
