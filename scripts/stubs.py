"""Stubs of the native modules, from the modules themselves: nanobind's stubgen, in our style.

.venv/bin/python -P scripts/stubs.py           writes them
.venv/bin/python -P scripts/stubs.py --check   says which differ
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

from nanobind.stubgen import StubGen  # type: ignore[import-untyped]  # nanobind's

PACKAGE = Path(__file__).parents[1] / "vllm_ssdkv"
MODULES = ("_kernels",)

ARRAY = re.compile(r"Annotated\[(NDArray\[[\w.]+\]), dict\([^()]*(?:\([^()]*\)[^()]*)*\)\]")
"""An array with its shape and order, which only the module checks."""


def stub(name: str) -> str:
    """The stub of a module of the package."""
    importlib.import_module("vllm_ssdkv._io")  # its types are in signatures of the others
    module = importlib.import_module(f"vllm_ssdkv.{name}")
    generator = StubGen(module=module, quiet=True)
    generator.put(module)
    text = ARRAY.sub(r"\1", generator.get())
    path = PACKAGE / f"{name}.pyi"
    ruff = [str(Path(sys.executable).with_name("ruff"))]
    for command in (["check", "--fix-only", "--quiet", "--select=F401,I"], ["format", "--quiet"]):
        text = subprocess.run(
            [*ruff, *command, f"--stdin-filename={path}", "-"],
            input=text,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
    return text


def main() -> int:
    """Write the stubs, or compare them."""
    differ = 0
    for name in MODULES:
        path, text = PACKAGE / f"{name}.pyi", stub(name)
        if "--check" not in sys.argv:
            path.write_text(text)
        elif path.read_text() != text:
            print(f"{path}: not the module's: run scripts/stubs.py")
            differ = 1
    return differ


if __name__ == "__main__":
    sys.exit(main())
