"""Limits of size: attributes of a class, lines and parameters of a function.

A class or function beyond them stands in :data:`LARGER`, with its reason. An exception that is not
needed any more fails the test, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

Function = ast.FunctionDef | ast.AsyncFunctionDef
ROOT = Path(__file__).parent.parent
FOLDERS = ("vllm_ssdkv", "triton_kernels", "profiling", "fpga_offload", "grafana")

ATTRIBUTES = 20
LINES = 70
"""Of a function, without its docstring."""
PARAMETERS = 8
"""``self`` and ``cls`` apart."""
KERNELS = {"jit", "inline"}
"""Decorators of Triton kernels: ``triton_kernels/launch.py``."""

_COMMAND = "a command has a parameter for each of its options"
_KERNEL = "operands of one kernel: tensors, their layout, its options"
_ATTENTION = "operands of attention: tensors of one layer and the step that they are of"
_VLLM = "the signature is vLLM's"
_ROOT = "the root of its process: all parts hang on it, and it does nothing itself but pass on"
_WALK = "the parts of a store that a walk over contexts goes through"
_ARRAYS = "parallel arrays of one table, and what each of its columns needs"
_OPENING = "a start in the order in which it has to happen, with the end of each step if one fails"
_STEP = "parts of a rank in a step"
_FILE = "one writer of one file: its state, and counts of what it did"

LARGER = {
    # Attributes.
    "profiling/decode_harness/decoder.py PagedDecoder": _ROOT,
    "vllm_ssdkv/cli/monitor/metrics_sample.py Sample": "a number for each place on the screen",
    "vllm_ssdkv/config/engine.py SSDKVConfig": "a field for each option",
    "vllm_ssdkv/connector/messages.py RankReport": "a field for each thing that a rank tells",
    "vllm_ssdkv/connector/messages.py StepPlan": "a field for each thing that a rank is told",
    "vllm_ssdkv/connector/worker/paged_step.py PagedStep": _STEP,
    "vllm_ssdkv/store/cache/summaries.py SummaryTable": _ARRAYS,
    "vllm_ssdkv/store/format/manifest.py Manifest": "its fields are those of a file on disk",
    "vllm_ssdkv/store/index/journal.py Journal": _FILE,
    "vllm_ssdkv/store/memory/memory_plan.py MemoryPlan": "a size for each user of DRAM",
    "vllm_ssdkv/store/read/selected_context.py SelectedContexts": _ARRAYS,
    # Lines, parameters or both.
    "profiling/dense_oracle.py dense_attention": "operands of one attention",
    "profiling/gpu_pack/vllm_ops.py _attend": "a signature of vLLM's",
    "profiling/bench_triton.py sparse_figures": "a closure for each kernel over one problem",
    "triton_kernels/attend.py _attend": _KERNEL,
    "triton_kernels/attend.py attend": _KERNEL,
    "triton_kernels/attend.py attend_parts": _KERNEL,
    "triton_kernels/choose.py choose": _KERNEL,
    "triton_kernels/codes.py code_logits": _KERNEL,
    "triton_kernels/score.py channel_logits": _KERNEL,
    "triton_kernels/score.py page_logits": _KERNEL,
    "vllm_ssdkv/attention/exact.py attend_exact": _ATTENTION,
    "vllm_ssdkv/attention/sparse.py SparseDecode.__init__": _ATTENTION,
    "vllm_ssdkv/attention/sparse.py SparseDecode.attend": _ATTENTION,
    "vllm_ssdkv/cli/bench/accuracy.py accuracy": _COMMAND,
    "vllm_ssdkv/cli/bench/bench.py io": _COMMAND,
    "vllm_ssdkv/cli/bench/clusters.py clusters": _COMMAND,
    "vllm_ssdkv/cli/bench/decode.py decode": _COMMAND,
    "vllm_ssdkv/cli/bench/offload.py offload": _COMMAND,
    "vllm_ssdkv/cli/fpga/estimate.py estimate": _COMMAND,
    "vllm_ssdkv/cli/fpga/simulate.py simulate": _COMMAND,
    "vllm_ssdkv/cli/plan/plan.py plan": _COMMAND,
    "vllm_ssdkv/cli/profile/profile.py profile": _COMMAND,
    "vllm_ssdkv/connector/attention_impl.py PagedAttentionImpl.__init__": _VLLM,
    "vllm_ssdkv/connector/attention_impl.py PagedAttentionImpl.forward": _VLLM,
    "vllm_ssdkv/connector/kv_cache_spec.py TieredManager.find_longest_cache_hit": _VLLM,
    "vllm_ssdkv/connector/worker/paged_attention.py attend_layer": _ATTENTION,
    "vllm_ssdkv/connector/worker/paged_step.py PagedStep.__init__": _STEP,
    "vllm_ssdkv/store/devices/data_file.py claim": "what a superblock says, each by its name",
    "vllm_ssdkv/store/index/journal.py Journal.__init__": _OPENING,
    "vllm_ssdkv/store/io/slot_io.py SlotIO.submit": "a batch as parallel arrays",
    "vllm_ssdkv/store/read/context_stream.py ContextStream.__init__": _WALK,
    "vllm_ssdkv/store/read/selected_context.py SelectedContexts.__init__": _ARRAYS,
    "vllm_ssdkv/store/tiered_store.py TieredStore.__init__": _OPENING,
}
"""Path and name, and why it is larger."""


def modules() -> Iterator[Path]:
    """Python files of the product, each once: some folders are linked into the package."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if ROOT / folder == path.resolve().parents[len(path.relative_to(ROOT).parts) - 2]:
                yield path


def attributes(node: ast.ClassDef) -> set[str]:
    """Fields that a class declares, and attributes that its methods set on ``self``."""
    declared = {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    assigned = {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }
    return declared | assigned


def lines(node: Function) -> int:
    """Lines of a function from its ``def`` on, without its docstring."""
    whole = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is None:
        return whole
    text = node.body[0]
    return whole - ((text.end_lineno or text.lineno) - text.lineno + 1)


def parameters(node: Function) -> int:
    """Named parameters of a function."""
    found = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len(found) - (bool(found) and found[0].arg in {"self", "cls"})


def decorators(node: Function) -> set[str]:
    """Full names of a function's decorators: ``jit``, ``app.command``."""
    calls = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return {ast.unparse(call) for call in calls}


def beyond(source: str) -> Iterator[tuple[str, str]]:
    """Classes and functions of a module beyond a limit, by their names, and what is too much.

    A Triton kernel is not counted: it has a parameter for each pointer and stride, and is one
    function because its parts would be inlined.
    """

    def visit(node: ast.AST, within: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            name = within
            if isinstance(child, ast.ClassDef):
                name = f"{within}{child.name}"
                if (count := len(attributes(child))) > ATTRIBUTES:
                    yield name, f"{count} attributes"
                name += "."
            elif isinstance(child, Function) and not KERNELS & decorators(child):
                name = f"{within}{child.name}"
                if (count := lines(child)) > LINES:
                    yield name, f"{count} lines"
                if (count := parameters(child)) > PARAMETERS:
                    yield name, f"{count} parameters"
                name += "."
            yield from visit(child, name)

    return visit(ast.parse(source), "")


def test_sizes() -> None:
    found = {
        f"{path.relative_to(ROOT)} {name}": what
        for path in modules()
        for name, what in beyond(path.read_text())
    }
    assert {place: what for place, what in found.items() if place not in LARGER} == {}
    assert sorted(LARGER.keys() - found.keys()) == [], "these are not needed any more"


def long(count: int) -> str:
    return "def f():\n" + "    pass\n" * count


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (long(69), {}),
        (long(70), {"f": "71 lines"}),
        ('def f():\n    """' + "\n" * 70 + '"""\n', {}),
        ("def f(a, b, c, d, e, *, f, g, h): ...", {}),
        ("def f(a, b, c, d, e, *, f, g, h, i): ...", {"f": "9 parameters"}),
        ("class C:\n    def f(self, a, b, c, d, e, f, g, h): ...", {}),
        ("@jit\ndef f(a, b, c, d, e, f, g, h, i): ...", {}),
        ("@other()\ndef f(a, b, c, d, e, f, g, h, i): ...", {"f": "9 parameters"}),
        ("class C:\n" + "".join(f"    a{n}: int\n" for n in range(20)), {}),
        ("class C:\n" + "".join(f"    a{n}: int\n" for n in range(21)), {"C": "21 attributes"}),
        (
            "class C:\n    def f(self):\n" + "".join(f"        self.a{n} = 0\n" for n in range(21)),
            {"C": "21 attributes"},
        ),
    ],
)
def test_what_is_beyond_is_seen(source: str, what: dict[str, str]) -> None:
    assert dict(beyond(source)) == what
