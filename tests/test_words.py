"""One vocabulary: a word that was retired does not come back, in code or in documents."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.kit.sources import parsed

ROOT = Path(__file__).parent.parent
FOLDERS = ("vllm_ssdkv", "profiling", "triton_kernels")
LINKED = ("triton_kernels", "profiling", "grafana", "fpga_offload")
"""Folders of the repository that are links in a package that is installed in place."""

CLASSES = {
    "ArenaPlan": "MemoryPlan",
    "ArrivingContexts": "PendingContextLoads",
    "AskedOptions": "RequestOverrides",
    "Besides": "HitConstraints",
    "Border": "DramBalancer",
    "ChecksumSealer": "ChecksumCodec",
    "ChoiceMemory": "SparseMemory",
    "Choices": "SelectorRegistry",
    "ChosenContexts": "SelectedContexts",
    "CipherSealer": "CipherCodec",
    "Deviation": "SparseDeviation",
    "DeviceShares": "DeviceWeights",
    "DeviceSpeed": "ThroughputEstimator",
    "FailedLoads": "LoadRetries",
    "Guess": "Prediction",
    "Guesses": "SelectionHistory",
    "HotFetch": "GpuFetch",
    "HotPages": "GpuPageCache",
    "IdleTime": "PrefetchBudget",
    "InFlight": "QueueDepths",
    "JoinedBatch": "CoalescedBatch",
    "KeptSelections": "SelectionReuse",
    "Lender": "FrameLease",
    "LoadChoice": "LoadOrRecompute",
    "MeanValues": "RunningMeanV",
    "Move": "Rewrite",
    "Moves": "Rewriter",
    "MovingRoom": "Rebalancer",
    "PageCache": "SelectedPageCache",
    "ReadAhead": "Prefetcher",
    "Recomputations": "ContextRecovery",
    "Restriper": "Rebalancer",
    "SealTable": "ChecksumTable",
    "Sealer": "SlotCodec",
    "Seals": "Digests",
    "Seats": "AdmissionSlots",
    "SlotBatch": "SlotRequest",
    "SlotFiles": "SlotIO",
    "SlotLoader": "PrefixLoader",
    "SlotSummaries": "SummaryBuilder",
    "SlotWriter": "Flusher",
    "Staging": "BufferPool",
    "Summarizer": "SummaryBuilder",
    "Unsealer": "AsyncVerifier",
    "Writes": "PendingWrites",
}
"""Retired names of classes, and the terms in their place."""

MODULES = {
    "answering": "endpoint_protocol",
    "arena_plan": "memory_plan",
    "arriving": "pending_context_loads",
    "asked": "request_overrides",
    "border": "dram_balancer",
    "choosing": "selector_registry",
    "chosen": "selected_context",
    "device_shares": "device_weights",
    "deviation": "sparse_deviation",
    "durable": "durable_file",
    "failed_loads": "load_retries",
    "file_space": "preallocate",
    "findings": "check_result",
    "further": "next_best",
    "guesses": "prefetch",
    "hot_pages": "gpu_pages",
    "idle_time": "prefetch_budget",
    "in_flight": "queue_depths",
    "intake": "arrival_verifier",
    "inventory": "discovery",
    "joined": "coalescing",
    "joining": "concat",
    "kept": "selection_reuse",
    "lender": "frame_lease",
    "move": "rewriter",
    "page_cache": "selected_pages",
    "partial": "output_log",
    "preflight": "compatibility",
    "recomputation": "context_recovery",
    "relocation_quota": "rebalancer",
    "relocator": "rewriter",
    "removal": "remove",
    "restripe": "rebalancer",
    "seal_table": "checksum_table",
    "sealer": "slot_codec",
    "seats": "admission_slots",
    "selection": "sparse",
    "slot_batch": "slot_request",
    "staging": "buffer_pool",
    "stored": "offline_store",
    "summarizer": "summary_builder",
    "turns": "round_robin",
    "unsealer": "async_verifier",
}
"""Retired names of modules and folders, and the terms in their place."""

PHRASES = (
    *("design[.]md", "restriper", "lender", "unsealer", "sealer", "summarizer", "seal table"),
    *("moving room", "page_cache[.]py", "hot_pages[.]py", "selection/"),
)
"""Patterns that mean one thing only, wherever a document has them."""


STUBS = {path.name: parsed(path) for path in (ROOT / "vllm_ssdkv").glob("*.pyi")}


def sources() -> dict[str, ast.Module]:
    """Every module of ours, by its path in the repository."""
    found: dict[str, ast.Module] = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT)
            if folder == "vllm_ssdkv" and name.parts[1] in LINKED:
                continue
            found[str(name)] = parsed(path)
    return found


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Names that the code itself uses; strings, comments and native classes are free."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="_io" | "_index" | "_kernels")):
                pass
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.ClassDef(name=name):
                yield name
            case ast.ImportFrom(names=names) | ast.Import(names=names):
                yield from (alias.asname or alias.name for alias in names)


def documents() -> list[Path]:
    """Pages for people; the changelog may name what went."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    return [page for page in pages if page.name != "CHANGELOG.md"]


def retired(tree: ast.AST) -> set[str]:
    return {f"{name}: now {CLASSES[name]}" for name in identifiers(tree) if name in CLASSES}


def test_no_class_has_a_retired_name() -> None:
    found = {file: names for file, tree in sources().items() if (names := retired(tree))}
    assert found == {}


def test_no_module_has_a_retired_name() -> None:
    found = {
        f"{file}: now {MODULES[part]}"
        for file in sources()
        for part in (*Path(file).parent.parts, Path(file).stem)
        if part in MODULES
    }
    assert found == set()


def test_terms_are_of_today() -> None:
    """A table that leads to a name that is gone helps nobody."""
    trees = sources()
    classes = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    parts = {part for file in trees for part in (*Path(file).parent.parts, Path(file).stem)}
    assert set(CLASSES.values()) <= classes
    assert set(MODULES.values()) <= parts


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_document_has_a_retired_word(page: Path) -> None:
    pattern = re.compile(rf"\b(?:{'|'.join(PHRASES)})", re.IGNORECASE)
    names = re.compile(rf"`(?:{'|'.join(CLASSES)})`")
    text = page.read_text()
    assert pattern.findall(text) + names.findall(text) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class Border: pass", {"Border: now DramBalancer"}),
        ("from x import Sealer", {"Sealer: now SlotCodec"}),
        ("x = store.Staging(1)", {"Staging: now BufferPool"}),
        ("border = 'Border'  # Border", set()),
    ],
)
def test_retired_names_are_seen(source: str, found: set[str]) -> None:
    assert retired(ast.parse(source)) == found


FRAGMENTS = {
    *("Of", "That", "With", "For", "By", "At", "From", "In", "On", "To", "Without"),
    *("What", "Whose", "Where", "How", "Which", "Those", "Who", "When", "Why", "Whether"),
}
"""First words of a text that leaves out the thing that it speaks of."""

CLAUSES = {*FRAGMENTS, "If"}
"""First words of a clause in place of a noun."""


def clauses(tree: ast.Module) -> list[str]:
    """First lines of docstrings that are a relative clause instead of a noun or a deed."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    lines = [text.splitlines()[0] for text in texts if text]
    return [line for line in lines if line.split()[0].rstrip(":,") in CLAUSES]


def test_docstrings_begin_with_a_noun_or_a_deed() -> None:
    trees = sources() | STUBS
    found = {file: lines for file, tree in trees.items() if (lines := clauses(tree))}
    assert found == {}


def test_clauses_are_seen() -> None:
    source = '"""Which slot."""\ndef f():\n    """Slot."""\nclass A:\n    """What it is."""'
    assert clauses(ast.parse(source)) == ["Which slot.", "What it is."]


METRIC_CALLS = {"Metric": 3, "counter": 2, "gauge": 2}
"""Calls that declare a metric, and the place of its text among their arguments."""


def words_of(node: ast.expr) -> str:
    """Text of a string, or of as much of it as is known before the program runs."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(words_of(part) for part in parts)
        case ast.FormattedValue():
            return "{}"
    return ""


def helps(tree: ast.Module) -> Iterator[str]:
    """Texts of commands, flags, options and metrics that a module declares."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        yield from (words_of(k.value) for k in node.keywords if k.arg in {"help", "description"})
        name = ast.unparse(node.func)
        if name in METRIC_CALLS and len(node.args) > METRIC_CALLS[name]:
            yield words_of(node.args[METRIC_CALLS[name]])
        if name == "Reason":
            yield from (words_of(argument) for argument in node.args)


def constants(tree: ast.Module) -> Iterator[str]:
    """Docstrings of constants, of a module or of a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            for first, second in itertools.pairwise(node.body):
                if isinstance(first, ast.Assign | ast.AnnAssign) and isinstance(second, ast.Expr):
                    yield words_of(second.value)


def fragments(texts: Iterable[str]) -> list[str]:
    """Texts that begin with a word of :data:`FRAGMENTS`, in either case of letter."""
    return [text for text in texts if text and re.split(r"\W", text)[0].capitalize() in FRAGMENTS]


@pytest.mark.parametrize("texts", [helps, constants], ids=lambda texts: texts.__name__)
def test_no_text_is_a_fragment(texts: Callable[[ast.Module], Iterable[str]]) -> None:
    """Helps, texts of options and metrics, and constants name their thing first."""
    trees = sources() | STUBS
    found = {file: bad for file, tree in trees.items() if (bad := fragments(texts(tree)))}
    assert found == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('x = typer.Option(help="Of the run.")', ["Of the run."]),
        ('p.add_argument("--x", help=f"where {x} lies")', ["where {} lies"]),
        ('x: Annotated[int, Field(description="What to do."), Reason("By it.")]', 2),
        ('counter("x", "y", "Those that " "failed.")', ["Those that failed."]),
        ('gauge("x", "y", "Slots that are free.")', []),
        ('A = 1\n"""In seconds."""', ["In seconds."]),
        ('class X:\n    a: int\n    """How often."""\n    b: int', ["How often."]),
        ('A = 1\n"""Seconds, on a busy machine."""', []),
    ],
)
def test_fragments_are_seen(source: str, found: list[str] | int) -> None:
    tree = ast.parse(source)
    seen = fragments([*helps(tree), *constants(tree)])
    assert (len(seen) if isinstance(found, int) else seen) == found


GENERATED = [
    page for page in documents() if page.read_text().startswith("<!-- Generated by `ssdkv lab docs")
]
BY_HAND = [page for page in documents() if page not in GENERATED]
INTERNALS = sorted((ROOT / "docs" / "internals").glob("*.md"))
GUIDES = [
    page
    for page in BY_HAND
    if page == ROOT / "README.md" or (page.parent == ROOT / "docs" and page.name != "format.md")
]
"""Pages for users, written by hand; the format is for whoever reads bytes."""

TABLES = [page for page in GENERATED if page.name not in {"messages.md", "models.md"}]
"""Generated pages but two, which grow with every message and every model that is tried."""

MOST_WORDS: list[tuple[str, list[Path], int]] = [
    ("guides", GUIDES, 18_620),
    ("internals", INTERNALS, 12_170),
    ("overview", [ROOT / "ARCHITECTURE.md"], 3_030),
    ("format", [ROOT / "docs" / "format.md"], 5_290),
    ("by hand", BY_HAND, 45_000),
    ("generated", TABLES, 25_200),
]
"""Words of pages together, as ``wc`` counts them."""
MOST_LONG = 0.03
"""Share of sentences above 25 words."""
MOST_RELATIVES = 1 / 1000
"""Free relative clauses in a word: `what` where the field has a noun."""


def prose(text: str) -> str:
    """Text without code, generated sections, headings and targets of links."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!-- \w+: generated.*?<!-- end", "", text, flags=re.DOTALL)
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)\s]*\)", "]", text)


def sentences(text: str) -> list[str]:
    """Sentences outside tables; an item of a list begins one."""
    lines = [line for line in prose(text).splitlines() if not line.lstrip().startswith("|")]
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", "\n".join(lines))
    ends = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\[(0-9])")
    return [found for part in parts for found in ends.split(" ".join(part.split())) if found]


def relatives(text: str) -> int:
    """Number of free relatives; a question that is a link's text is none."""
    return len(re.findall(r"(?<!\[)\b[Ww]hat(?:ever)?\b", prose(text)))


@pytest.mark.parametrize(
    ("pages", "most"), [kind[1:] for kind in MOST_WORDS], ids=[kind[0] for kind in MOST_WORDS]
)
def test_pages_are_short(pages: list[Path], most: int) -> None:
    assert pages
    assert sum(len(page.read_text().split()) for page in pages) <= most


@pytest.mark.parametrize("pages", [GUIDES, BY_HAND], ids=["guides", "by hand"])
def test_sentences_are_short(pages: list[Path]) -> None:
    found = [sentence for page in pages for sentence in sentences(page.read_text())]
    assert len(found) > 500
    long = [sentence for sentence in found if len(sentence.split()) > 25]
    assert len(long) <= MOST_LONG * len(found), long


@pytest.mark.parametrize("pages", [GUIDES, BY_HAND], ids=["guides", "by hand"])
def test_pages_name_things(pages: list[Path]) -> None:
    words = sum(len(prose(page.read_text()).split()) for page in pages)
    assert sum(relatives(page.read_text()) for page in pages) <= MOST_RELATIVES * words


def test_long_sentences_and_relatives_are_seen() -> None:
    text = "# What it is\n\nA b.\n- C `d`. What e\n\n| what | f |\n[What g?](#what-g)\n"
    assert sentences(text) == ["A b.", "- C `d`.", "What e", "[What g?]"]
    assert relatives(text) == 2
