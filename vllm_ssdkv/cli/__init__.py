"""The command ``ssdkv``: one file per command, and the checks and pages they need."""
