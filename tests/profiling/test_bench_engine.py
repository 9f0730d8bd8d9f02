"""The benchmark's command line: a directory that is missing is refused before an engine starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ssdkv.profiling import bench_engine


def test_a_directory_that_is_missing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    monkeypatch.setattr("sys.argv", ["bench_engine", "--dir", str(tmp_path), "--dir", str(missing)])
    with pytest.raises(SystemExit) as ended:
        bench_engine.main()
    assert ended.value.code == 2
    assert f"--dir: {missing} is not a directory" in capsys.readouterr().err
    assert not missing.exists()
