"""Options of a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.sizes import GIB
from vllm_ssdkv.config.node import NodeConfig, options_in

GIVEN: dict[str, object] = {"listen": ["unix:///run/s"], "devices": ["/mnt/a", "/mnt/b"]}


def test_two_options_are_enough() -> None:
    made = NodeConfig.from_options(GIVEN)
    assert [device.path for device in made.devices] == ["/mnt/a", "/mnt/b"]
    assert made.socket_mode == "0600"
    assert 0 < made.dram_bytes() <= 4 * GIB


def test_sizes_and_shares_are_read(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(
        "listen: ['unix:///run/s']\ndevices: [/mnt/a]\ndram_gib: 3GiB\nshares: {large: 0.75}\n"
    )
    made = NodeConfig.from_options(options_in(file))
    assert made.dram_bytes() == 3 * GIB
    assert (made.share_of("large"), made.share_of("other")) == (0.75, 0.5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"listen": []}, "listen: got \\[\\]"),
        ({"devices": []}, "devices: got \\[\\]"),
        ({"socket_mode": "0777"}, "socket_mode: got"),
        ({"socket_mode": "06x0"}, "octal"),
        ({"store_share": 0}, "store_share"),
        ({"shares": {"m": 1.5}}, "shares"),
        ({"replicas": 2, "devices": ["/mnt/a"]}, "replicas: 2 copies need 2 devices"),
        ({"lissten": []}, "did you mean listen"),
        ({"lease": 0.1}, "lease"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        NodeConfig.from_options(GIVEN | options)


def test_a_raw_block_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_ssdkv.config.node.is_block_device", lambda path: path == "/mnt/b")
    with pytest.raises(ConfigError, match=r"devices\[1\].path: /mnt/b is a raw block device"):
        NodeConfig.from_options(GIVEN)


@pytest.mark.parametrize("content", ["- a", "{", "1: 2"])
def test_a_file_without_options_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"node\.yaml: "):
        options_in(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        options_in(tmp_path / "missing")
