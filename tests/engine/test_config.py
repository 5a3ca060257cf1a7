"""The engine's command line: what is right is taken, what is wrong is told apart and explained."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest

from engine.__main__ import _scheduling
from engine.config import CoreStart, EngineConfig, from_args
from engine.contract.messages import ServiceClass
from engine.runtime.setup.runner_config import RunnerConfig
from shared.fairness.fair_share import FairShare
from shared.wire.shapes import PROMPTS_MAX
from tests.fake_runner import runner_info
from tests.shared.process.test_environment import SERVICE_LINKS

MINIMAL = ["--model", "some/dir"]


def test_a_model_is_all_that_must_be_given() -> None:
    assert from_args(MINIMAL, {}) == EngineConfig(model="some/dir")
    assert EngineConfig(model="some/dir").name == "dir"


def test_options() -> None:
    config = from_args(
        [
            *MINIMAL,
            "--served-model-name",
            "m",
            "--kv-cache-memory",
            "1.5GiB",
            "--no-prefix-cache",
            "--port",
            "0",
        ],
        {},
    )
    assert (config.served_model_name, config.kv_cache_memory) == ("m", 1536 * 2**20)
    assert (config.prefix_cache, config.port) == (False, 0)


@pytest.mark.parametrize(
    ("given", "names"),
    [([], None), (["none"], ()), (["enable_thinking"], ("enable_thinking",)), (["a, b_c"], ("a", "b_c"))],
)
def test_the_variables_that_requests_may_set(given: list[str], names: tuple[str, ...] | None) -> None:
    options = ["--template-arguments", *given] if given else []
    assert from_args([*MINIMAL, *options], {}).template_names == names


@pytest.mark.parametrize(
    "text", ["foo", "collector:4318", "http://", "http://a:b", "ftp://a/b", "http://a /b"]
)
def test_spans_go_to_a_url_and_nowhere_else(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        from_args([*MINIMAL, "--otlp-endpoint", text], {})
    assert "must be an http or https URL" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://collector:4318/v1/traces", "https://user:word@[::1]/v1/traces"])
def test_a_collectors_url_is_taken_as_it_is(url: str) -> None:
    assert from_args([*MINIMAL, "--otlp-endpoint", url], {}).tracing.endpoint == url


def test_what_a_gpu_is_told() -> None:
    told = ["--device", "cuda", "--weights", "fp8", "--gpu-memory-utilization", "0.5", "--enforce-eager"]
    config = from_args([*MINIMAL, *told], {"PENSTOCK_ENGINE_KV_CACHE_DTYPE": "fp8"})
    assert (config.device, config.weights, config.kv_cache_dtype) == ("cuda", "fp8", "fp8")
    assert (config.gpu_memory_utilization, config.enforce_eager) == (0.5, True)
    assert from_args(MINIMAL, {"PENSTOCK_ENGINE_ENFORCE_EAGER": "1"}).enforce_eager


def test_overlap_is_the_devices_to_say_unless_it_is_told() -> None:
    assert from_args(MINIMAL, {}).overlap is None
    assert from_args([*MINIMAL, "--overlap"], {}).overlap is True
    assert from_args([*MINIMAL, "--no-overlap"], {"PENSTOCK_ENGINE_OVERLAP": "true"}).overlap is False
    assert from_args(MINIMAL, {"PENSTOCK_ENGINE_OVERLAP": "false"}).overlap is False


@pytest.mark.parametrize("argv", [[], ["--gap-target-ms", "inf", "--swap-memory", "0"]])
def test_the_core_is_told_what_the_command_line_said(argv: list[str]) -> None:
    start = CoreStart(from_args([*MINIMAL, *argv], {}), "ipc://in", "ipc://out", 7)
    assert CoreStart.decode(start.encode()) == start


@pytest.mark.parametrize(
    ("text", "size"),
    [("2MiB", 2 * 2**20), ("2M", 2 * 2**20), ("2MB", 2_000_000), ("4194304", 4194304), ("1g", 2**30)],
)
def test_sizes(text: str, size: int) -> None:
    assert from_args([*MINIMAL, "--kv-cache-memory", text], {}).kv_cache_memory == size


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "--model"),
        ([*MINIMAL, "--port", "70000"], "a port from 0 to 65535"),
        ([*MINIMAL, "--max-model-len", "1"], "a whole number from 2 to"),
        ([*MINIMAL, "--max-num-seqs", "x"], "a whole number from 1 to"),
        ([*MINIMAL, "--dtype", "int3"], "bfloat16"),
        ([*MINIMAL, "--page-size", "63"], "64"),
        ([*MINIMAL, "--kv-cache-memory", "lots"], "512MiB"),
        ([*MINIMAL, "--device", "tpu"], "cuda"),
        ([*MINIMAL, "--gpu-memory-utilization", "1.5"], "above 0 and at most 1"),
        ([*MINIMAL, "--gpu-memory-utilization", "most"], "above 0 and at most 1"),
        ([*MINIMAL, "--kv-cache-memory", "1k"], "must be a size from 1MiB to"),
        ([*MINIMAL, "--drain-timeout-s", "-1"], "seconds above 0"),
        ([*MINIMAL, "--kv-cache-memory", "9" * 400], "such as 512MiB"),
        ([*MINIMAL, "--kv-cache-memory", "9" * 16], "must be a size from 1MiB to 1024TiB"),
        ([*MINIMAL, "--max-queue-len", "9" * 20], "--max-queue-len: must be a whole number from 1 to"),
        ([*MINIMAL, "--max-step-tokens", "99999999"], "--max-step-tokens: must be a whole number from 1 to"),
        ([*MINIMAL, "--max-num-seqs", "5000"], "--max-num-seqs: must be a whole number from 1 to 4096"),
        ([*MINIMAL, "--threads", "100000"], "--threads: must be a whole number from 1 to 1024"),
        ([*MINIMAL, "--tokenizer-threads", "100000"], "--tokenizer-threads: must"),
        ([*MINIMAL, "--tensor-parallel-size", "100000"], "--tensor-parallel-size: must be a whole number"),
        (["--model", ""], "--model: must not be empty"),
        ([*MINIMAL, "--host", ""], "--host: must not be empty"),
        ([*MINIMAL, "--tls-cert", "", "--tls-key", ""], "--tls-cert: must not be empty"),
        ([*MINIMAL, "--served-model-name", ""], "--served-model-name: must be a name"),
        ([*MINIMAL, "--max-num-seqs", "512", "--max-step-tokens", "256"], "at least --max-num-seqs (512)"),
        ([*MINIMAL, "--swap-memory", "4"], "--swap-memory: must be 0, or a size from 1MiB"),
        ([*MINIMAL, "--request-memory", "2"], "--request-memory: must be a size from 182MiB to 1024TiB"),
        ([*MINIMAL, "--template-arguments", "a b"], "--template-arguments: must be names"),
        ([*MINIMAL, "--template-defaults", "[1]"], "--template-defaults: must be a JSON object"),
        ([*MINIMAL, "--attention-backend", "fast"], "attention_backend must be one of auto, "),
        ([*MINIMAL, "--stall-deadline-s", "nan"], "--stall-deadline-s: must be a number of seconds above 0"),
        ([*MINIMAL, "--tls-cert", "c.pem"], "--tls-cert and --tls-key belong together"),
        ([*MINIMAL, "--probe-port", "8001"], "--probe-port and --port must differ"),
        ([*MINIMAL, "--kv-host-tier", "on"], "--kv-host-tier is gone: host memory keeps what is evicted"),
        (["--modle", "some/dir"], "unrecognized arguments: --modle some/dir; did you mean --model?"),
    ],
)
def test_a_wrong_option_says_what_is_right(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        from_args(argv, {})
    assert exit_.value.code == 2
    assert says in capsys.readouterr().err


def test_the_environment_comes_second() -> None:
    env = {
        "PENSTOCK_ENGINE_MODEL": "env/model",
        "PENSTOCK_ENGINE_PORT": "9001",
        "PENSTOCK_ENGINE_PREFIX_CACHE": "false",
        "PENSTOCK_ENGINE_MAX_QUEUE_LEN": "7",
    }
    config = from_args(["--max-queue-len", "9"], env)
    assert (config.model, config.port, config.prefix_cache, config.max_queue_len) == (
        "env/model",
        9001,
        False,
        9,
    )


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("PORT", "x", "PENSTOCK_ENGINE_PORT: must be a port from 0"),
        ("DTYPE", "int3", "bfloat16"),
        ("PREFIX_CACHE", "maybe", "true or false"),
        ("MAX_NUM_SEQ", "4", "PENSTOCK_ENGINE_MAX_NUM_SEQ: there is no such setting; did you mean "),
    ],
)
def test_a_wrong_environment_says_what_is_right(
    name: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        from_args(MINIMAL, {f"PENSTOCK_ENGINE_{name}": value})
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def test_the_command_line_wins_over_variables_and_these_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(
        'model = "file/model"\nport = 1\nmax_queue_len = 1\nmax_num_seqs = 8\nrequest_memory = "512MiB"\n'
    )
    env = {"PENSTOCK_ENGINE_MAX_QUEUE_LEN": "2", "PENSTOCK_ENGINE_PORT": "2"}
    config = from_args(["--config", str(file), "--port", "3"], env)
    assert (config.port, config.max_queue_len, config.max_num_seqs) == (3, 2, 8)
    assert (config.model, config.request_memory) == ("file/model", 512 * 2**20)


def test_all_that_is_wrong_is_said_at_once_by_the_names_under_which_it_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine.toml"
    file.write_text("threads = 0\nmax_model_length = 5\n")
    argv = ["--config", str(file), "--dtype", "int3"]
    with pytest.raises(SystemExit):
        from_args(argv, {"PENSTOCK_ENGINE_PORT": "x", "PENSTOCK_ENGINE_PROT": "1"})
    assert capsys.readouterr().err.splitlines()[1:-1] == [
        "  max_model_length: there is no such setting; did you mean max_model_len?",
        "  --model: is required",
        "  --dtype: must be one of auto, float32, bfloat16, got 'int3'",
        "  threads: must be a whole number from 1 to 1024",
        "  PENSTOCK_ENGINE_PORT: must be a port from 0 to 65535, got 'x'",
        "  PENSTOCK_ENGINE_PROT: there is no such setting; did you mean PENSTOCK_ENGINE_PORT?",
    ]


def test_a_runner_is_told_its_part_of_the_settings() -> None:
    runner = from_args([*MINIMAL, "--max-step-tokens", "99", "--tensor-parallel-size", "2"], {}).runner
    assert type(runner) is RunnerConfig
    assert runner == RunnerConfig("some/dir", max_step_tokens=99, tensor_parallel_size=2)


def test_a_switch_can_be_set_by_the_name_of_its_option() -> None:
    assert from_args(MINIMAL, {"PENSTOCK_ENGINE_NO_PREFIX_CACHE": "1"}).prefix_cache is False


def test_kubernetes_service_links_set_nothing() -> None:
    assert from_args(MINIMAL, SERVICE_LINKS) == from_args(MINIMAL, {})


def test_an_empty_variable_does_not_name_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    env = {"PENSTOCK_ENGINE_MODEL": "", "PENSTOCK_ENGINE_PORT": ""}
    assert from_args(MINIMAL, env) == from_args(MINIMAL, {})
    with pytest.raises(SystemExit):
        from_args([], env)
    assert "--model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (".", "qwen"),
        ("./", "qwen"),
        ("..", "models"),
        ("../qwen/", "qwen"),
        ("~/models/qwen", "qwen"),
        ("/", "model"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
    ],
)
def test_a_model_is_called_after_its_directory_however_that_is_written(
    model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "models" / "qwen"
    directory.mkdir(parents=True)
    monkeypatch.chdir(directory)
    assert from_args(["--model", model], {}).name == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/" + 20 * "0f", "Qwen/Qwen3-0.6B"),
        ("hub/models--gpt2/snapshots/" + 20 * "0f" + "/", "gpt2"),
        ("hub/models--gpt2/snapshots/main", "main"),
        ("hub/models--gpt2/" + 20 * "0f", 20 * "0f"),
    ],
)
def test_a_snapshot_in_the_hubs_cache_has_its_repositorys_name(path: str, name: str) -> None:
    assert from_args(["--model", path], {}).name == name


@pytest.mark.parametrize("option", ["--model", "--kv-disk-dir", "--served-model-name", "--tls-cert"])
def test_a_path_that_is_no_text_is_refused_by_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It comes into messages to the core, and into answers. Without UTF-8 mode any accent is such a path."""
    with pytest.raises(SystemExit) as ended:
        from_args([*MINIMAL, option, os.fsdecode(b"m\xe9")], {})
    assert ended.value.code == 2
    assert re.search(f"{option}: must be (UTF-8|a name)", capsys.readouterr().err)
    name = "PENSTOCK_ENGINE_" + option[2:].replace("-", "_").upper()
    with pytest.raises(SystemExit):
        from_args([] if option == "--model" else MINIMAL, {name: os.fsdecode(b"m\xe9")})
    assert name in capsys.readouterr().err


def test_a_link_to_a_directory_keeps_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(tmp_path)
    assert from_args(["--model", str(tmp_path / "current")], {}).name == "current"


@pytest.mark.parametrize("queue", [1, 8, 256])
@pytest.mark.parametrize("slots", [1, 2, 63, 256])
def test_the_core_has_room_for_all_that_the_api_process_lets_wait(queue: int, slots: int) -> None:
    """Two tenants may pass the bound by a request each: one that was accepted is not cut off by another."""
    config = from_args([*MINIMAL, "--max-queue-len", str(queue), "--max-num-seqs", str(slots)], {})
    info = runner_info()
    scheduling = _scheduling(config, info)
    for share, amount, most in (
        (FairShare(config.max_queue_len), PROMPTS_MAX, scheduling.queue_len_max),
        (FairShare(config.max_queue_tokens), PROMPTS_MAX * info.max_model_len, scheduling.queue_tokens_max),
    ):
        assert share.acquire("a", amount, alone=True)
        share.acquire("b", amount, alone=True)
        assert share.held <= most


def test_each_class_has_the_gap_target_of_its_setting_and_flex_may_have_none() -> None:
    options = ["--gap-target-flex-ms", "inf", "--gap-target-ms", "80", "--gap-target-priority-ms", "40"]
    config = from_args([*MINIMAL, *options, "--prompt-share", "0.3"], {})
    stated = (config.gap_target_flex_ms, config.gap_target_ms, config.gap_target_priority_ms)
    assert stated == (math.inf, 80.0, 40.0)
    start = CoreStart.decode(CoreStart(config, "ipc://in", "ipc://out", 7).encode())
    scheduling = _scheduling(start.config, runner_info())
    targets = {each: scheduling.gap_targets_s[each] for each in ServiceClass}
    expected = {ServiceClass.FLEX: math.inf, ServiceClass.DEFAULT: 0.08, ServiceClass.PRIORITY: 0.04}
    assert targets == expected
    assert scheduling.prompt_share == config.prompt_share == 0.3
