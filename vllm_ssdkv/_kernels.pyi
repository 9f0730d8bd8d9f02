"""
Native CPU attention kernels (``csrc/attention``).

Raw addresses are those of torch or numpy memory that the caller keeps alive. Arrays are
C-contiguous, on the CPU, of exactly the stated dtype (numpy or torch; no silent conversion). Every
function blocks until done and may be called from any thread. It releases the GIL, but for those
that take microseconds: ``merge``, ``log_sum_exp``, ``without``, ``compensate``, ``count_choice``,
``ValueSums`` and the clock. It runs on the OpenMP team that torch has for that thread; ``threads``
bounds it and counts the caller.
Dtypes are ``FLOAT32``, ``BFLOAT16`` and ``FLOAT16``, of blocks also ``FLOAT8_E4M3`` and
``FLOAT8_E5M2``; all arithmetic is fp32.

All raise ValueError on shapes or numbers that do not fit together and TypeError on arrays of
another dtype or layout.
"""

import enum
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

import vllm_ssdkv._io

FLOAT32: int = 0

BFLOAT16: int = 1

FLOAT16: int = 2

FLOAT8_E4M3: int = 3

FLOAT8_E5M2: int = 4

SPLIT_PAGES: int = 8

def isa() -> str:
    """Name of the instruction set in force: "avx512", "avx2" or "portable"."""

def isas() -> list[str]:
    """Instruction sets this machine can run, best first."""

def set_isa(name: str) -> None:
    """
    Use the kernels of another instruction set, for the whole process. Raises ValueError.
    """

def team_available() -> bool:
    """
    True if calls run on the host's OpenMP team; else on the caller's thread alone.
    """

class BlockShape:
    """
    A layer's part of a block: ``[kv_heads][groups]`` pages.

    Pages are ``page_stride`` bytes apart; a page is K ``[page_tokens][head_size]``, then V.
    """

    def __init__(
        self,
        block_tokens: int,
        page_tokens: int,
        page_stride: int,
        kv_heads: int,
        head_size: int,
        dtype: int,
    ) -> None: ...

class Vectors:
    """
    Vectors of tokens, ``[tokens][heads][head_size]``, at an address, tokens ``stride`` bytes apart.
    """

    def __init__(
        self, address: int, dtype: int, stride: int, tokens: int, heads: int, head_size: int
    ) -> None: ...

def vectors(name: str, tensor: object, heads: int, head_size: int) -> Vectors:
    """
    A torch tensor ``[T, heads, head_size]`` as kernels take it.

    The caller keeps it alive. Raises ValueError, naming it, if heads have holes.
    """

class State:
    """
    State of an online softmax: ``m, l [T, q_heads]``, ``acc`` of them.

    ``m``: running maximum of scaled logits, starts at -inf; ``l``: running sum of ``exp(logit - m)``,
    starts at 0; ``acc [T, q_heads, head_size]``: unnormalised output, starts at 0. A logit is ``soft_cap
    * tanh(s / soft_cap)`` of a scaled product ``s`` (0: the product), plus the head's slope, ``slopes
    [q_heads]``, times the key's position less the query's. ``value_scale``: of V as stored.
    """

    def __init__(
        self,
        m: NDArray[numpy.float32],
        l: NDArray[numpy.float32],
        acc: NDArray[numpy.float32],
        soft_cap: float = 0.0,
        slopes: NDArray[numpy.float32] | None = None,
        value_scale: float = 1.0,
    ) -> None: ...

class Rows:
    """
    Ragged rows of queries, and the range of pages that each sees.

    Queries ``query_begin[r] + i``, ``i < query_count[r]`` (None: one each), stand at positions
    ``first_position[r] + i`` and see pages ``begin[r]..end[r]``; with a ``list_per_head`` the query
    heads of KV head h see ``begin[i]..end[i]``, ``i = r * kv_heads + h``, which are single pages of
    that head. Rows must not share queries.
    """

    def __init__(
        self,
        query_begin: NDArray[numpy.int32],
        query_count: NDArray[numpy.int32] | None,
        first_position: NDArray[numpy.int64],
        begin: NDArray[numpy.int32],
        end: NDArray[numpy.int32],
        list_per_head: bool = False,
    ) -> None: ...
    @property
    def max_queries(self) -> int:
        """Queries of a row, at most."""

    @property
    def max_pages(self) -> int:
        """Pages of a list, at most."""

class Pages:
    """
    Blocks, or single pages, at absolute addresses.

    ``position``: of the first token of each; ``token_mask [pages, page_tokens]``: 0 where a token takes
    no part.
    """

    def __init__(
        self,
        address: NDArray[numpy.uint64],
        position: NDArray[numpy.int64],
        token_mask: NDArray[numpy.uint8] | None = None,
    ) -> None: ...

def attend(
    query: Vectors,
    scale: float,
    state: State,
    rows: Rows,
    pages: Pages,
    shape: BlockShape,
    threads: int,
    sliding_window: int | None = None,
) -> None:
    """
    Attend rows of queries to pages of KV and update the running softmax in place.

    Each query sees the keys at or before its position, at most the newest ``sliding_window`` of them.
    Keys that no query of a tile may see are not read. Repeated calls with disjoint sets of pages add up
    to attention over their union, in any order, up to fp32 rounding; rows that see no key are left as
    they are. The same call with the same ``threads`` gives the same bits.
    """

def finish(state: State, out: Vectors, lse: NDArray[numpy.float32] | None, threads: int) -> None:
    """out = acc / l * value_scale (zero where l is 0); lse = m + log(l)."""

def log_sum_exp(state: State, token: NDArray[numpy.int64]) -> NDArray[numpy.float32]:
    """
    Log-sum-exp of the logits that some query tokens have seen, [n, q_heads].
    """

def merge(state: State, part: State) -> None:
    """Fold the state of further keys into a state of the same queries."""

def store_kv(
    key: object,
    value: object,
    slot_mapping: NDArray[numpy.int64],
    cache: object,
    shape: BlockShape,
    threads: int,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """
    Scatter new K and V, torch tensors, into the blocks of a layer's ``cache``, another.

    ``slot_mapping[t] = block * block_tokens + offset``; negative slots are skipped. Blocks of 8 bits
    get K and V divided by their scales, rounded as vLLM's CPU backend does: towards zero, and what is
    too large, or NaN, to the largest number.
    """

def copy_blocks(
    source: NDArray[numpy.uint64],
    from_shape: BlockShape,
    destination: NDArray[numpy.uint64],
    to_shape: BlockShape,
    clear_padding: bool,
    threads: int,
) -> None:
    """Copy blocks between addresses; shapes differ in the page stride alone."""

class AttentionClock:
    """
    Seconds by part, one of :data:`vllm_ssdkv.kernels.step_clock.PARTS`.

    Used by the thread that runs the forward pass. On a GPU kernels run later than they are called: what
    is measured there is the time of the host.
    """

    def __init__(self) -> None: ...
    def start(self) -> None:
        """Attention of a layer begins."""

    def lap(self, part: int) -> None:
        """
        Count the time since the last call as this part's. Raises IndexError: there is none.
        """

    @property
    def seconds(self) -> list[float]:
        """Seconds in each part, so far."""

    @property
    def window_seconds(self) -> float:
        """Seconds of attending to windows, which are in those of attending."""

    @property
    def fetched_at(self) -> float:
        """
        Time at which the latest look-up or fetch ended, as of ``time.monotonic``.
        """

def summarize(
    source: NDArray[numpy.uint64],
    shape: BlockShape,
    bounds: NDArray[numpy.uint64] | None,
    spread: NDArray[numpy.uint64] | None,
    channels: NDArray[numpy.uint64] | None,
    value_sum: NDArray[numpy.uint64] | None,
    threads: int,
) -> None:
    """
    Write summaries of blocks: page records, channel-major K and sums of V.
    """

def encode(
    source: NDArray[numpy.uint64],
    shape: BlockShape,
    codes: NDArray[numpy.uint64],
    bits: int,
    threads: int,
) -> None:
    """Write K of blocks in 1, 2 or 4 bits, a record for each KV head."""

class SlotTails:
    """
    Data of slots of L layers beside K and V.

    Pages are ``page_bytes`` apart. A tail has ``summary_pages``, then ``channel_pages`` of each layer.
    Without channel pages summaries are bounds, or ``spread``, behind which may be the sums of V
    (``value_sums``), or codes of ``code_bits``, if not 0.
    """

    def __init__(
        self,
        shape: BlockShape,
        layers: int,
        page_bytes: int,
        summary_pages: int,
        channel_pages: int,
        spread: bool,
        value_sums: bool,
        code_bits: int,
    ) -> None: ...

class Order:
    """
    Order of the tokens of blocks on their way to slots.

    Tokens of layers that are ``ordered [L]`` go into their pages by likeness, but for the first ``kept
    [n]`` pages: by K or by the ``features [L * n]`` of a block, addresses, 0 for none.
    """

    def __init__(
        self,
        ordered: NDArray[numpy.uint8],
        kept: NDArray[numpy.int32],
        features: NDArray[numpy.uint64] | None,
        feature_width: int,
    ) -> None: ...

def make_tails(
    source: NDArray[numpy.uint64], tail: NDArray[numpy.uint64], tails: SlotTails, threads: int
) -> None:
    """
    Make the tails of n slots.

    ``source [L * n]``: addresses of each layer's part of each block; ``tail [n]``: those of the tails'
    first pages.
    """

def pack_summarized(
    source: NDArray[numpy.uint64],
    pages: NDArray[numpy.uint64],
    rows: NDArray[numpy.uint64],
    tails: SlotTails,
    first_layer: int,
    channels: int,
    threads: int,
    order: Order | None = None,
) -> None:
    """
    Copy layers of n blocks to slots, and make what selectors must know of them.

    ``source [l * n]``: addresses of each block's part of l layers, from ``first_layer`` on. ``pages
    [n]``: addresses of these layers' first pages of K and V in slots. ``rows [n]``: addresses of rows
    of a table of summaries, 0 for none, whose byte ``channels`` begins channel-major K; -1: they have
    none.
    """

class Contexts:
    """
    Contexts and windows of rows, for every layer of a step.

    Row r has the blocks ``row_begin[r]..row_end[r]`` of what a call lists, and ``window_tokens[r]``
    behind them; its columns begin at ``first_page[r]`` and ``first_token[r]`` of a table.
    """

    def __init__(
        self,
        shape: BlockShape,
        row_begin: NDArray[numpy.int32],
        row_end: NDArray[numpy.int32],
        window_tokens: NDArray[numpy.int32],
        first_page: NDArray[numpy.int64],
        first_token: NDArray[numpy.int64],
    ) -> None: ...

def bound_logits(
    query: NDArray[numpy.float32],
    scale: float,
    contexts: Contexts,
    records: NDArray[numpy.uint64],
    logits: NDArray[numpy.float32],
    threads: int,
) -> None:
    """Upper bounds of the scaled logits of each page."""

def spread_logits(
    query: NDArray[numpy.float32],
    scale: float,
    contexts: Contexts,
    records: NDArray[numpy.uint64],
    logits: NDArray[numpy.float32],
    threads: int,
) -> None:
    """Logits of each page from mean and variance of its keys."""

def code_logits(
    query: NDArray[numpy.float32],
    scale: float,
    contexts: Contexts,
    records: NDArray[numpy.uint64],
    bits: int,
    logits: NDArray[numpy.float32],
    threads: int,
) -> None:
    """
    Log of the mean over each page's tokens of exp of the logits from their codes.
    """

def code_bytes(shape: BlockShape, bits: int) -> int:
    """Bytes of the codes of one KV head of a block."""

def rotation(head_size: int) -> NDArray[numpy.float32]:
    """The matrix by which codes rotate keys."""

def code_levels(bits: int) -> NDArray[numpy.float32]:
    """The numbers that codes stand for, ascending."""

def choose_channels(
    query: NDArray[numpy.float32],
    scale: float,
    kv_heads: int,
    channels: NDArray[numpy.int32],
    reduced: NDArray[numpy.float32],
) -> None:
    """SparQ's channels and the scaled queries of them."""

def channel_logits(
    channels: NDArray[numpy.int32],
    reduced: NDArray[numpy.float32],
    contexts: Contexts,
    base: NDArray[numpy.uint64],
    window_begin: NDArray[numpy.int32],
    window_end: NDArray[numpy.int32],
    window: NDArray[numpy.uint64],
    logits: NDArray[numpy.float32],
    chosen_only: bool,
    threads: int,
) -> None:
    """SparQ's approximate logits of context, then window."""

def weigh(
    logits: NDArray[numpy.float32],
    first_page: NDArray[numpy.int64],
    window_lse: NDArray[numpy.float32] | None,
    weights: NDArray[numpy.float32],
    window_mass: NDArray[numpy.float32],
    lse: NDArray[numpy.float32],
    q_heads: int,
    page_tokens: int,
    threads: int,
) -> None:
    """Mean softmax weight of each page over a KV head's query heads."""

def score_tokens(
    logits: NDArray[numpy.float32],
    first_token: NDArray[numpy.int64],
    first_column: NDArray[numpy.int64],
    score: NDArray[numpy.float32],
    mass: NDArray[numpy.float32],
    lse: NDArray[numpy.float32],
    window_mass: NDArray[numpy.float32],
    page_tokens: int,
    threads: int,
) -> None:
    """Scores and masses of context pages or tokens from logits of tokens."""

def choose(
    score: NDArray[numpy.float32],
    mass: NDArray[numpy.float32],
    window_mass: NDArray[numpy.float32],
    first_column: NDArray[numpy.int64],
    least: NDArray[numpy.int32],
    most: NDArray[numpy.int32],
    sinks: int,
    p: float,
    threads: int,
) -> tuple[NDArray[numpy.int32], NDArray[numpy.int32], NDArray[numpy.float32]]:
    """Columns by score until p of the mass is covered."""

def cover(
    logits: NDArray[numpy.float32],
    first_token: NDArray[numpy.int64],
    lse: NDArray[numpy.float32],
    window_tokens: NDArray[numpy.int32],
    pages: NDArray[numpy.int32],
    begin: NDArray[numpy.int32],
    token_mask: NDArray[numpy.uint8] | None,
    alpha: NDArray[numpy.float32],
    page_tokens: int,
    column_tokens: int,
    window_lse: NDArray[numpy.float32] | None,
    threads: int,
) -> None:
    """
    Softmax mass of chosen pages and the window, per query head.

    A page has ``page_tokens`` columns of ``logits``, each of which stands for ``column_tokens``.
    ``window_lse [rows, q_heads]``: of windows that have no columns.
    """

def without(
    pages: NDArray[numpy.int32],
    begin: NDArray[numpy.int32],
    known: NDArray[numpy.int32],
    known_begin: NDArray[numpy.int32],
) -> tuple[NDArray[numpy.int32], NDArray[numpy.int32]]:
    """Lists of pages without those of other lists, and their edges."""

def compensate(
    state: State,
    token: NDArray[numpy.int64],
    alpha: NDArray[numpy.float32],
    mean: NDArray[numpy.float32],
    sinks: NDArray[numpy.float32] | None,
) -> None:
    """
    acc = alpha * acc + (1 - alpha) * l * mean for some tokens.

    With ``sinks [q_heads]``, logits of attention sinks that alpha leaves out, which are not missing.
    """

class ValueSums:
    """
    Sums of V of requests' tokens, by place.

    ``blocks`` and ``rest [places, layers, kv_heads, head_size]`` are those of complete blocks, and of
    the tokens behind them; ``tokens [places, layers]`` are in both. All three are written to.
    """

    def __init__(
        self,
        blocks: NDArray[numpy.float32],
        rest: NDArray[numpy.float32],
        tokens: NDArray[numpy.int64],
        block_tokens: int,
    ) -> None: ...
    def add(
        self,
        layer: int,
        places: NDArray[numpy.int64],
        positions: NDArray[numpy.int64],
        values: NDArray[numpy.float32],
    ) -> NDArray[numpy.float32]:
        """
        Add ``values [n, kv_heads, head_size]`` of the tokens at ``positions [n]``.

        The means over all tokens of the ``places [n]``, them included.
        """

def count_choice(
    mass: NDArray[numpy.float32], token_mask: NDArray[numpy.uint8] | None
) -> tuple[float, int]:
    """Softmax mass that lists leave out, and tokens that a mask leaves in."""

def count_choices(
    pages: NDArray[numpy.int32],
    counts: NDArray[numpy.float32],
    begin: NDArray[numpy.int32],
    chosen: NDArray[numpy.int32],
    chosen_begin: NDArray[numpy.int32],
    threads: int,
) -> tuple[NDArray[numpy.int32], NDArray[numpy.float32], NDArray[numpy.int32]]:
    """Decayed counts of choices after one more token."""

def unite(
    pages: NDArray[numpy.int32],
    begin: NDArray[numpy.int32],
    others: NDArray[numpy.int32],
    others_begin: NDArray[numpy.int32],
) -> tuple[NDArray[numpy.int32], NDArray[numpy.int32]]:
    """Lists of pages with those of other lists, and their edges."""

def best_by_ranks(
    pages: NDArray[numpy.int32],
    score: NDArray[numpy.float32],
    begin: NDArray[numpy.int32],
    counted: NDArray[numpy.int32],
    counts: NDArray[numpy.float32],
    counted_begin: NDArray[numpy.int32],
    most: NDArray[numpy.int32],
    threads: int,
) -> tuple[NDArray[numpy.int32], NDArray[numpy.int32]]:
    """Pages with the lowest sum of their ranks by score and by count."""

class PageRecord(enum.Enum):
    """Summary of a page's K."""

    BOUNDS = 0
    """Minimum and maximum of each channel."""

    SPREAD = 1
    """Mean and variance of each channel."""

    CODES = 2
    """Each key in a few bits a channel."""

    CHANNELS = 3
    """K itself, channel-major."""

class PlacedBlocks:
    """
    Rows over blocks that stay at their places for a whole step.

    ``place [B]``: number of each block in HBM, or absolute address of its frame in DRAM. ``position
    [B]``: of its first token in the request.
    """

    def __init__(
        self, rows: Rows, place: NDArray[numpy.uint64], position: NDArray[numpy.int64]
    ) -> None: ...

class ScoredPages:
    """
    Choice of the pages of the largest weight.

    ``records [B]``: addresses of the blocks' records in layer 0, ``layer_bytes`` before those of the
    next one; so many ``channels`` are looked at. The first ``sinks`` pages are chosen, then the others,
    ``most [R]`` for each KV head; with a mass that is ``wanted`` fewer, but ``least [R]``, where these
    and the window cover it. ``by_token``: tokens are chosen and counted, with the pages that hold them.
    ``estimates``: unchosen pages count as their mean V.
    """

    def __init__(
        self,
        record: PageRecord,
        code_bits: int,
        channels: int,
        records: NDArray[numpy.uint64],
        layer_bytes: int,
        sinks: int,
        least: NDArray[numpy.int32],
        most: NDArray[numpy.int32],
        wanted: float,
        by_token: bool,
        estimates: bool,
    ) -> None: ...
    @property
    def estimates(self) -> bool:
        """True if unchosen pages count as their mean V."""

class ListedPages:
    """
    Choice of the same pages in every layer.

    KV head h of row r has ``pages[begin[i]..begin[i + 1]]``, ``i = r * kv_heads + h``, ascending.
    """

    def __init__(self, pages: NDArray[numpy.int32], begin: NDArray[numpy.int32]) -> None: ...

class ChoosingGroup:
    """
    Some of the rows that choose, all of them alike.

    ``contexts``: of these; ``rows [r]``: their numbers among all that choose, ascending.
    """

    def __init__(
        self, contexts: Contexts, rows: NDArray[numpy.int32], choice: ScoredPages | ListedPages
    ) -> None: ...

class ChoosingRows:
    """
    Rows of one query each that choose pages of their contexts.

    ``window [R]``: numbers of their windows; ``token`` and ``position [R]`` are those of the queries;
    ``frame [B]``: address of each block's frame, 0 where it has none; ``slot [B]``: number of its slot,
    from 0; empty: no two blocks have the same. Each row is in one of the ``groups``. Pages without a
    frame are looked up in the ``cache``, by the slots of the store, ``stored [B]``; None: there are
    none. ``means`` has the sums of V of rows whose rest is estimated, at ``mean_place [R]``.
    """

    def __init__(
        self,
        contexts: Contexts,
        window: NDArray[numpy.int64],
        token: NDArray[numpy.int32],
        position: NDArray[numpy.int64],
        frame: NDArray[numpy.uint64],
        slot: NDArray[numpy.int32],
        groups: Sequence[ChoosingGroup],
        cache: vllm_ssdkv._io.PageCache | None,
        stored: NDArray[numpy.int64],
        means: ValueSums | None,
        mean_place: NDArray[numpy.int64] | None,
    ) -> None: ...

class GuessedPages:
    """
    Pages that some rows will probably choose in a ``layer``.

    ``rows [r]``: their numbers among those that choose; ``pages`` and ``begin`` as of ``ListedPages``.
    """

    def __init__(
        self,
        layer: int,
        rows: NDArray[numpy.int64],
        pages: NDArray[numpy.int32],
        begin: NDArray[numpy.int32],
    ) -> None: ...

class ChoiceTotals:
    """Sums over the layers that have run."""

    @property
    def lists(self) -> int:
        """Lists of pages."""

    @property
    def selected(self) -> int:
        """Pages in them."""

    @property
    def tokens(self) -> int:
        """Tokens of these, that are attended to."""

    @property
    def context(self) -> int:
        """Pages that there were to choose from."""

    @property
    def framed(self) -> int:
        """
        Pages in the lists that lie in frames; those of several lists of a layer count once. This and the next one leave out layers that stopped.
        """

    @property
    def held(self) -> int:
        """Likewise, that the cache has."""

    @property
    def unmet(self) -> int:
        """Lists without the mass that was wanted."""

    @property
    def channel_bytes(self) -> int:
        """Bytes of K in the channels that were looked at."""

    @property
    def missing(self) -> float:
        """Softmax mass outside windows and lists, by estimate."""

class ChosenLists:
    """Pages that the layers of a step chose."""

    @property
    def layers(self) -> list[int]:
        """Layers that have chosen some, ascending."""

    def of(self, layer: int) -> tuple[NDArray[numpy.int32], NDArray[numpy.int32]] | None:
        """
        Pages of a layer, and the edges of their lists; None: it chose none, or has stopped.
        """

def windows(
    query_start: NDArray[numpy.int64],
    length: NDArray[numpy.int64],
    table: NDArray[numpy.int32],
    hbm_start: NDArray[numpy.int64],
    block_tokens: int,
) -> tuple[
    NDArray[numpy.int32],
    NDArray[numpy.int32],
    NDArray[numpy.int64],
    NDArray[numpy.int32],
    NDArray[numpy.int32],
    NDArray[numpy.int64],
    NDArray[numpy.int64],
]:
    """
    Windows of rows in HBM, from block ``hbm_start [R]`` to the block of the last token.

    Begin and count of each row's queries, position of the first; begin and end of its blocks in the
    last two: ids of the blocks, by the ``table [R, blocks]``, and position of each one's first token.
    """

class StepPlan:
    """
    Attention of a step.

    Made once per step, then run once per layer, in any order, by one thread at a time. ``streamed``
    and ``chooses`` have an entry for each layer: the contexts that are attended to whole, and whether
    the rows that choose do so. With ``keeps`` what they choose can be asked for later.
    """

    def __init__(
        self,
        hbm: BlockShape,
        slot: BlockShape,
        header_bytes: int,
        tokens: int,
        window: PlacedBlocks,
        streamed: Sequence[PlacedBlocks],
        choosing: ChoosingRows | None,
        chooses: Sequence[bool],
        threads: int,
        keeps: bool,
    ) -> None: ...
    def run_layer(
        self,
        layer: int,
        query: object,
        cache: object,
        out: object,
        scale: float,
        clock: AttentionClock,
        sliding_window: int | None,
        sinks: NDArray[numpy.float32] | None,
        soft_cap: float,
        slopes: NDArray[numpy.float32] | None,
        value_scale: float,
        room: int,
        guess: GuessedPages | None,
    ) -> bool:
        """
        Attend to windows and contexts of a layer, and write ``out``.

        ``query`` and ``out [T, q_heads, head_size]`` and ``cache [num_blocks, ...]``, the layer's blocks in
        HBM, are torch tensors. ``sliding_window``: of the keys in HBM; ``sinks [q_heads]``: logits of
        attention sinks; ``soft_cap``, ``slopes`` and ``value_scale``: as of ``State``. Where chosen pages
        are not in memory, or pages of the ``guess``, the layer stops, and False is the answer:
        :meth:`resume` goes on. Places are taken for up to ``room`` distinct pages.
        """

    def choose(self, choosing: ChoosingRows | None) -> None:
        """These rows choose from now on."""

    @property
    def chosen(self) -> ChosenLists:
        """Pages that the layers have chosen, so far."""

    def choices(
        self,
    ) -> list[
        tuple[
            NDArray[numpy.int32],
            NDArray[numpy.int32],
            NDArray[numpy.float32] | None,
            NDArray[numpy.float32] | None,
            NDArray[numpy.float32] | None,
            NDArray[numpy.uint8] | None,
        ]
    ]:
        """
        Choice of each group in the layer: pages, and edges of their lists.

        Then the mass of each list and its window, if there is an estimate; if pages have weights, these, of
        all pages, and masses of the windows; if tokens were chosen, a mask of them.
        """

    def asked(
        self,
    ) -> (
        tuple[NDArray[numpy.int32], NDArray[numpy.int64], NDArray[numpy.int32], int, int, int, int]
        | None
    ):
        """
        Places that a layer that has stopped has taken, as ``PageCache.acquire`` answers.

        The caller owns it then. None: nothing, because there was no room.
        """

    def resume(
        self,
        address: NDArray[numpy.uint64],
        position: NDArray[numpy.int64],
        begin: NDArray[numpy.int32],
        end: NDArray[numpy.int32],
        token_mask: NDArray[numpy.uint8] | None,
        clock: AttentionClock,
    ) -> None:
        """
        Go on with a layer that has stopped: attend to some of the chosen pages.

        ``address`` and ``position [P]``; ``begin`` and ``end [R * kv_heads]`` of the lists in these;
        ``token_mask [P, page_tokens]``, None: all tokens. The call that brings the last ones ends the
        layer.
        """

    @property
    def totals(self) -> ChoiceTotals:
        """Sums over the layers that have run."""
