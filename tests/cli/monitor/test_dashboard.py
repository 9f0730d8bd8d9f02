"""``ssdkv dashboard``; what it draws is tested in tests/grafana, with a real Prometheus."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_ssdkv.cli.main import app


def render(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["dashboard", "render", *arguments])
    return done.exit_code, done.output


def test_without_prometheus_it_says_so(tmp_path: Path) -> None:
    code, output = render("--prometheus", "http://127.0.0.1:9", "--out", str(tmp_path / "new"))
    assert code == 1
    assert "http://127.0.0.1:9 does not answer as Prometheus does" in output
    assert list((tmp_path / "new").iterdir()) == []


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, output = render("--prometheus", "http://127.0.0.1:9", "--out", str(tmp_path))
    assert code == 1
    assert "pip install 'vllm-ssdkv[bench]'" in output
