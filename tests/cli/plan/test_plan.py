"""``ssdkv plan``: its table, JSON, picture and errors; this machine as it is detected."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from tests.kit.commands import check_vllm
from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.cli.monitor.metrics_scrape import parse
from vllm_ssdkv.cli.plan import detect
from vllm_ssdkv.cli.plan.server import counted
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.profiling.recall.recall import MODEL_DIR
from vllm_ssdkv.profiling.sizing import validate
from vllm_ssdkv.profiling.sizing.measure import DecodeRun
from vllm_ssdkv.profiling.sizing.runs import Run

MACHINE = """\
gpu: h100-80
gpu_link: pcie5-x16
dram: 128GiB
drives: [{kind: pm9a3, count: 2, capacity_bytes: 3.84TB, endurance_bytes: 7.0e+15}]
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.fixture
def machine(tmp_path: Path) -> str:
    file = tmp_path / "machine.yaml"
    file.write_text(MACHINE)
    return str(file)


def test_a_plan_ends_with_the_command_that_serves(machine: str) -> None:
    result = run("llama-3.1-8b", "--machine", machine, "--prompt", "8192-16384")
    assert result.exit_code == 0
    for text in ("tokens/s of all", "Ways", "One purchase", "Most would change", "limited by"):
        assert text in result.stdout
    words = shlex.split(result.stdout.splitlines()[-1])
    assert words[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B"]
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    SSDKVConfig.from_extra_config(config["kv_connector_extra_config"])


OPT = {"model_type": "opt", "num_hidden_layers": 40, "hidden_size": 5120, "ffn_dim": 20480}
OPT |= {"num_attention_heads": 40, "vocab_size": 50272, "max_position_embeddings": 65536}
NODES = "nodes: {addresses: ['tcp://10.0.0.1:8470', 'tcp://10.0.0.2:8470'], network: ethernet-25g, "


@pytest.mark.parametrize(
    ("more", "prompt", "text"),
    [
        ("dram_bandwidth: 200GB", "60000", "page, exact, offload host, X"),
        (
            "fpga: {xclbin: /srv/k.xclbin, attend_bandwidth: 100GB}",
            "60000",
            "page, exact, offload fpga, X",
        ),
        (
            NODES + "state_dir: /srv/kv, memory_bandwidth: 50GB}",
            "60000",
            "page, exact, offload node",
        ),
        (NODES + "state_dir: /srv/kv}", "60000", "page, exact"),
        (NODES + "state_dir: /srv/kv}", "1024", "reuse"),
    ],
)
def test_vllm_takes_the_command_of_a_way_near_storage(
    tmp_path: Path, more: str, prompt: str, text: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**OPT, "dtype": "float16"}))
    file = tmp_path / "machine.yaml"
    file.write_text(MACHINE.replace("128GiB", "8GiB") + more + "\n")
    short = ["--prompt", prompt, "--at-a-time", "1", "--selectors", "exact"]
    result = run(str(tmp_path), "--machine", str(file), *short)
    assert result.exit_code == 0, result.stderr
    assert f"{text} " in result.stdout.split("Ways")[0]
    words = shlex.split(result.stdout.splitlines()[-1])
    check_vllm(words[2:])
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    options = SSDKVConfig.from_extra_config(config["kv_connector_extra_config"])
    kind = None if options.offload is None else options.offload.kind
    assert ("offload" in text) == (kind is not None)
    assert kind is None or f"offload {kind}" in text
    if options.offload is not None and kind == "fpga":
        assert (options.offload.backend, options.offload.xclbin) == ("xrt", "/srv/k.xclbin")
    assert bool(options.nodes) == more.startswith("nodes")


def test_weights_are_those_of_the_models_files(machine: str, tmp_path: Path) -> None:
    """--weights goes before the index, and the index before quantization_config."""
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((MODEL_DIR / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (model / "config.json").write_text(json.dumps(config))

    def planned(*arguments: str) -> dict[str, Any]:
        short = ["--machine", machine, "--prompt", "64", "--selectors", "exact", "--json"]
        result = run(str(model), *short, "--at-a-time", "1", *arguments)
        assert result.exit_code == 0, result.stderr
        return dict(json.loads(result.stdout))

    # Embeddings of two bytes, layers of one: 3 x (256 x 64 x 2 x (4 + 2) + 3 x 256 x 512).
    assert planned()["model"]["weight_bytes"] == 2 * 832 * 256 + 3 * 589_824
    (model / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 9000000}}')
    assert planned()["model"]["weight_bytes"] == 9_000_000
    assert planned("--weights", "8MB")["model"]["weight_bytes"] == 8_000_000
    small = planned("--weights", "fp8", "--kv-dtype", "fp8")
    assert small["model"]["weight_bytes"] == 2 * 832 * 256 + 3 * 589_824
    assert f"vllm serve {model} " in small["command"]
    assert "--quantization fp8 --kv-cache-dtype fp8" in small["command"]
    assert small["warnings"][0].startswith("KV in fp8")
    (model / "model.safetensors.index.json").write_text("{}")
    result = run(str(model), "--machine", machine)
    assert "metadata.total_size" in result.stderr.splitlines()[-1]


def test_a_model_whose_weights_are_not_published_has_no_command(machine: str) -> None:
    given = ["--machine", machine, "--prompt", "64", "--output", "1", "--weights", "20GB"]
    result = run("gpt-3", *given, "--selectors", "exact", "--at-a-time", "1")
    assert result.stdout.splitlines()[-1] == "gpt-3: its weights are not published; no command"


def test_json_and_picture(machine: str, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    result = run("llama-3.1-8b", "--machine", machine, "--json", "--plot", str(picture))
    found = json.loads(result.stdout)
    assert found["best"]["choice"]["mode"] == "reuse"
    assert found["kv_transfer_config"]["kv_connector"] == "SSDKVConnector"
    assert found["command"].startswith("vllm serve")
    assert found["validation"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_prompts_are_counted_with_the_models_tokenizer(machine: str, tmp_path: Path) -> None:
    file = tmp_path / "batch.jsonl"
    body = {"messages": [{"role": "user", "content": "w1 w2 w3"}], "max_tokens": 4}
    file.write_text(json.dumps({"body": body}) + "\n")
    result = run(str(MODEL_DIR), "--workload", str(file), "--machine", machine, "--json")
    work = json.loads(result.stdout)["workload"]
    assert work["output"] == 4
    assert work["notes"] == [], "no guess of bytes"


def test_validation_shows_predictions_beside_measurements(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measured(run: Run, directory: Path | None, console: Console) -> list[dict[str, Any]]:
        asked.append(run.name)
        assert isinstance(run.of, DecodeRun)
        of = run.of
        rows = []
        for number, one in enumerate(of.batches):
            row = {"drives": of.drives, "selector": of.selector, "dram_bytes": 32 << 20}
            row |= {"bandwidth": of.bandwidth, "iops": of.iops, "latency": of.latency}
            row |= {"context": one.tokens, "batch": one.batch, "longest": one.tokens + 128}
            rows.append({**row, "step_s": 1.0, "step_bytes": 1e5 * (number + 1)})
            rows[-1]["tokens_per_s"] = one.batch / 1.0
        return rows

    monkeypatch.setattr(validate, "measure", measured)
    result = run("llama-3.1-8b", "--machine", machine, "--validate", "--json")
    table = json.loads(result.stdout)["validation"]
    assert asked == list(validate.HERE)
    assert len(table["rows"]) == 4
    assert table["note"].endswith("of 4 within 20%.")
    assert (
        "Predicted and measured" in run("llama-3.1-8b", "--machine", machine, "--validate").stdout
    )


@pytest.mark.soak
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_validation_runs_the_real_engine(machine: str) -> None:
    result = run(str(MODEL_DIR), "--machine", machine, "--prompt", "4096", "--validate", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["validation"]
    settings = [row[1] for row in found["rows"]]
    assert settings == [
        *("page, exact, 1 x 8,192 tokens", "page, exact, 2 x 4,096 tokens"),
        *("page, bounds, 2 x 16,384 tokens", "page, bounds, 4 x 8,192 tokens"),
    ]
    inside = int(found["note"].split(" of 4")[0])
    assert inside >= 3, found


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no-such-model"], "MODEL: 'no-such-model' is no directory"),
        (["llama-3.1-8b", "--prompt", "many"], "--prompt: got 'many'"),
        (["llama-3.1-8b", "--weights", "int3"], "--weights: got 'int3'; fp8, or a size"),
        (["llama-3.1-8b", "--weights", "1GB"], "weights: got 1,000,000,000 bytes; embeddings"),
        (["llama-3.1-8b", "--kv-dtype", "int3"], "dtype 'int3' is not known"),
        (["llama-3.1-8b", "--want-tokens", "1e9"], "impossible: reuse: tokens/s: 1e+09 wanted"),
        (["llama-3.1-8b", "--want-ttft", "-1"], "--want-ttft: got -1.0"),
        (["llama-3.1-8b", "--dram", "1GiB"], "--dram: --machine is given"),
        (["llama-3.1-8b", "--server", "ftp://x"], "ftp://x is not the URL of a server"),
    ],
)
def test_what_is_wrong_is_the_last_line(machine: str, arguments: list[str], told: str) -> None:
    result = run(*arguments, "--machine", machine)
    assert result.exit_code == 1
    assert told in result.stderr.splitlines()[-1]


def test_options_that_are_no_choice(machine: str) -> None:
    result = run("llama-3.1-8b", "--machine", machine, "--selectors", "all")
    assert result.exit_code == 2
    assert "any of exact, bounds, codes, sparf" in " ".join(result.output.replace("│", " ").split())


def rows(**other: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    of = {"contender": "ssdkv uring", "devices": 2, "refused": None, "error": None, **other}
    return [
        {**of, "op": "read", "size": 4096, "depth": 1, "bytes_per_s": 8e7, "iops": 2e4},
        {**of, "op": "read", "size": 4096, "depth": 64, "bytes_per_s": 8e8, "iops": 2e5},
        {**of, "op": "read", "size": 1 << 20, "depth": 64, "bytes_per_s": 6e9, "iops": 6e3},
        {**of, "op": "write", "size": 1 << 20, "depth": 64, "bytes_per_s": 2e9, "iops": 2e3},
        {**of, "contender": "fio", "op": "read", "size": 4096, "depth": 64, "refused": "no"},
    ]


def test_rates_of_a_drive_are_those_of_bench_io(tmp_path: Path) -> None:
    rates = detect.drive_rates({"rows": rows()})
    assert rates == {
        "read_bandwidth": 3e9,
        "write_bandwidth": 1e9,
        "iops": 1e5,
        "latency_s": pytest.approx(1e-4),
    }
    with pytest.raises(ConfigError, match="no reads or no writes"):
        detect.drive_rates({"rows": rows()[:3]})
    file = tmp_path / "io.json"
    file.write_text("[]")
    with pytest.raises(ConfigError, match="has no rows"):
        detect.read_document(file)


def test_this_machine_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no driver of a GPU
    file = tmp_path / "io.json"
    file.write_text(json.dumps({"rows": rows()}))
    where = [
        "--device",
        str(tmp_path),
        "--io",
        str(file),
        "--dram",
        "1GiB",
        "--endurance",
        "1400TB",
    ]
    result = run(str(MODEL_DIR), *where, "--prompt", "4096", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["machine"]["drives"] == 1
    reached = found["machine"]["efficiency"]
    assert [reached[name] for name in ("gpu_bandwidth", "gpu_flops", "links", "drives")] == [1] * 4
    assert found["best"]["life_years"] is not None
    options = found["kv_transfer_config"]["kv_connector_extra_config"]
    (device,) = options["devices"]
    assert device["path"] == str(tmp_path / detect.STORE)
    assert device["capacity"] > 0
    assert "--kv-cache-memory-bytes" in found["command"]


def test_a_gpu_is_known_by_the_drivers_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3'\necho 'NVIDIA H100 80GB HBM3'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    file = tmp_path / "io.json"
    file.write_text(json.dumps({"rows": rows()}))
    where = ["--device", str(tmp_path), "--io", str(file), "--json"]
    found = json.loads(run("llama-3.1-8b", *where, "--prompt", "4096").stdout)
    assert (found["machine"]["gpu"], found["machine"]["gpus"]) == ("h100-80", 2)
    assert "--tensor-parallel-size 2" in found["command"]
    reached = found["machine"]["efficiency"]
    assert (reached["gpu_bandwidth"], reached["drives"]) == (0.896, 1.0)
    program.write_text("#!/bin/sh\necho 'NVIDIA GeForce 256'\n")
    result = run("llama-3.1-8b", *where)
    assert "gpu: 'NVIDIA GeForce 256' is not described" in result.stderr.splitlines()[-1]


def test_a_server_tells_what_it_is_asked() -> None:
    page = """\
vllm:request_prompt_tokens_bucket{engine="0",le="1000.0"} 3.0
vllm:request_prompt_tokens_bucket{engine="0",le="2000.0"} 4.0
vllm:request_prompt_tokens_bucket{engine="0",le="5000.0"} 4.0
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf"} 4.0
vllm:request_prompt_tokens_count{engine="0"} 4.0
vllm:request_prompt_tokens_sum{engine="0"} 4000.0
vllm:request_generation_tokens_bucket{engine="0",le="20.0"} 3.0
vllm:request_generation_tokens_bucket{engine="0",le="+Inf"} 4.0
vllm:request_generation_tokens_count{engine="0"} 4.0
vllm:request_generation_tokens_sum{engine="0"} 100.0
vllm:prefix_cache_queries_total{engine="0"} 4000.0
vllm:prefix_cache_hits_total{engine="0"} 1000.0
vllm:external_prefix_cache_hits_total{engine="0"} 500.0
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting{engine="0"} 1.0
"""
    found = counted(parse(page, 0.0, "url", ours=False))
    assert (found.prompts, found.prompt_tokens, found.output_tokens) == (4, 4000, 100)
    assert (found.longest_prompt, found.longest_output) == (2000, 50)
    assert (found.asked, found.found, found.running) == (4000, 1500, 3)
