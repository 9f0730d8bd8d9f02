"""Which tests a process can run depends on whether its kernels are compiled or interpreted."""

import os

# Triton decides when it is first imported, so a process has one kind of kernel only.
collect_ignore = (
    ["test_compile.py"] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
)
