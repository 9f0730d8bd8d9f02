"""Choice of tests by whether a process compiles or interprets its kernels."""

import os

# Triton decides when it is first imported, so a process has one kind of kernel only.
collect_ignore = (
    ["test_compile.py"] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
)
