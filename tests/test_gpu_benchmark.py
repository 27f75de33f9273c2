"""The benchmark for GPUs, run on a CPU with tiny shapes; TRL is not needed."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import load_script
from transformers import AutoConfig, AutoTokenizer

from grpo.config import Config
from grpo.memory import model_shape
from grpo.policy import load_policy
from grpo.tokenizer import completion_text, render_prompt

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
ABOUT = {"device": "a card", "memory_cap_gb": 24.0, "date": "2026-01-02"}


@pytest.fixture
def gpu(monkeypatch):
    return load_script(BENCHMARKS / "gpu.py", monkeypatch)


@pytest.fixture
def random_model(monkeypatch):
    return load_script(BENCHMARKS / "random_model.py", monkeypatch)


@pytest.fixture
def workload(monkeypatch):
    return load_script(BENCHMARKS / "peers" / "workload.py", monkeypatch)


def run_script(*flags):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True)


# ---- the whole script ----------------------------------------------------------------------------


def test_the_script_measures_both_kinds_of_base_and_prints_lines_and_a_table(tmp_path):
    """On a CPU, as on a GPU: a model is written, trained by the loop, and deleted."""
    models, without_trl = tmp_path / "models", tmp_path / "python"
    models.mkdir()
    without_trl.write_text("#!/bin/sh\nexit 1\n")
    without_trl.chmod(0o755)
    done = run_script(
        *("--shapes", "tiny", "tiny-nf4", "--device", "cpu", "--steps", "1"),
        *("--folder", str(models), "--trl", str(without_trl)),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    results = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(r["name"], r["who"]) for r in results] == [
        ("tiny", "ours"), ("tiny", "TRL"), ("tiny-nf4", "ours"), ("tiny-nf4", "TRL"),
    ]  # fmt: skip
    for result in results[::2]:
        assert result["tokens"] == 2 * 4 * 8, "no row ends before its length"
        for name in ("seconds", "rollout_tokens_per_second", "train_tokens_per_second"):
            assert result[name] > 0
        assert 0.1 < result["allocated_gb"] < 24 and result["dry_run_gb"] > 0
    assert all(r["skipped"] == "not installed" for r in results[1::2])
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 6 and len({line.count("|") for line in table}) == 1
    assert "not installed" in table[3] and "8 rows of 8 tokens" in table[4]
    assert "cpu, torch" in lines[-1] and "at most 24 GB" in lines[-1]
    assert not list(models.iterdir()), "the models are deleted"


def test_a_configuration_that_needs_more_than_the_cap_is_a_row_that_says_so():
    done = run_script("--shapes", "tiny", "--device", "cpu", "--memory-gb", "0.01", "--steps", "1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[0])
    assert "of 0.01 GB" in result["out_of_memory"] and "seconds" not in result
    rows = [line for line in done.stdout.splitlines() if "out of memory" in line]
    assert any(line.startswith("| tiny") for line in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told_before_any_work():
    done = run_script("--shapes", "tiny")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("error: --device cuda") and done.stderr.count("\n") == 1
    assert "--shapes tiny --device cpu" in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--memory-gb", "0"), "--memory-gb 0"),
        (("--steps", "0"), "--steps 0"),
        (("--trl", "no-such-python"), "--trl no-such-python"),
        (("--folder", "no-such-folder"), "--folder no-such-folder"),
    ],
)
def test_flags_that_cannot_work_are_refused(gpu, flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu.main(list(flags))
    assert ended.value.code == 2 and said in capsys.readouterr().err


# ---- failures ------------------------------------------------------------------------------------


def test_one_configuration_that_fails_does_not_end_the_others(gpu, monkeypatch, capsys):
    """The first cannot be written, the second's worker runs out of memory, TRL's dies of a bug."""

    def written(name, folder, device):
        if name == "tiny":
            raise gpu.Failed("the model could not be written: 15 GB are needed")

    def worker(command, label):
        if "ours" in label:
            raise gpu.Failed("ours_step.py ended with status 1: out of memory: CUDA out of memory.")
        raise gpu.Failed("trl_step.py ended with status 1: ValueError: a | b")

    monkeypatch.setattr(gpu, "written_apart", written)
    monkeypatch.setattr(gpu, "run_worker", worker)
    monkeypatch.setattr(gpu, "installed", lambda package, python: True)
    monkeypatch.setattr(gpu, "device_name", lambda device: "a card")
    assert gpu.main(["--shapes", "tiny", "tiny-nf4"]) == 1
    lines = capsys.readouterr().out.splitlines()
    first, second, ours, peer = (json.loads(line) for line in lines[:4])
    assert "15 GB are needed" in first["failed"] and "15 GB are needed" in second["failed"]
    assert ours["out_of_memory"] == "CUDA out of memory." and "failed" not in ours
    assert "ValueError" in peer["failed"]
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 6 and len({line.count("|") for line in table}) == 1


def test_lack_of_memory_while_a_graph_is_captured_is_still_told_as_that(workload, capsys):
    """A CUDA graph that runs out of memory on capture ends with another error than that."""

    def main():
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        except torch.OutOfMemoryError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    with pytest.raises(SystemExit) as ended:
        workload.run(main)
    assert ended.value.code == "out of memory: CUDA out of memory. Tried to allocate 20.00 MiB."


def test_another_error_of_a_worker_stays_what_it_is(workload):
    def main():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        workload.run(main)


# ---- what is compared ----------------------------------------------------------------------------


def test_ours_and_trl_are_told_the_same_work(gpu, monkeypatch):
    args = gpu.arguments(["--device", "cuda", "--memory-gb", "20", "--steps", "5"])
    for name in gpu.REAL:
        ours_script, *ours_flags = gpu.ours_flags(name, "models/m", args)
        trl_script, *trl_flags = gpu.trl_flags(name, "models/m", args)
        ours = vars(load_script(Path(ours_script), monkeypatch).arguments(ours_flags))
        peer = vars(load_script(Path(trl_script), monkeypatch).arguments(trl_flags))
        same = ours.keys() & peer.keys() - {"dtype"}
        assert {n: ours[n] for n in same} == {n: peer[n] for n in same}
        assert ours["device"] == "cuda" and ours["memory_gb"] == 20.0 and ours["steps"] == 5
        assert ours["fixed_length"] and ours["temperature"] == 0.9
        assert peer["bf16"] and peer["dtype"] == "bfloat16"


def test_the_settings_of_the_shapes_are_those_that_the_target_names(gpu, monkeypatch):
    """Read as train.py reads them, so that a preset cannot quietly change what is measured."""
    from grpo.config import PRESETS, parse

    args, found = gpu.arguments([]), {}
    for name in gpu.REAL:
        script, *flags = gpu.ours_flags(name, "models/m", args)
        worker = load_script(Path(script), monkeypatch)
        found[name], _, _ = parse(worker.settings(worker.arguments(flags), "runs"))
    a10 = {n: v for n, v in PRESETS["a10"].items() if n not in ("model", "rollout_rows")}
    for config in found.values():
        assert (config.beta, config.temperature, config.lora_rank) == (0.04, 0.9, 32)
        assert {name: getattr(config, name) for name in a10} == a10
        # As many as there are, so that the estimate is of the memory that is measured.
        assert config.rollout_rows == config.prompts_per_step * config.num_generations
    small, middle, large = found.values()
    assert (small.prompts_per_step, small.num_generations) == (4, 8)
    assert (small.max_prompt_length, small.max_completion_length) == (256, 200)
    assert [c.quantize for c in found.values()] == ["none", "nf4", "nf4"]
    assert (middle.max_completion_length, large.max_completion_length) == (4096, 1024)


def test_faster_is_by_the_token_and_stands_beside_ours(gpu):
    def figures(who, seconds):
        values = {"seconds": seconds, "tokens_per_second": 6400 / seconds}
        return {"name": "0.5b", "who": who, **values, "allocated_gb": 9.5, "reserved_gb": None}

    table = gpu.markdown([figures("ours", 2.0), figures("TRL", 9.0)], ABOUT).splitlines()
    assert table[2].startswith("| 0.5B, LoRA r32, 32 rows of 200 tokens | ours | 2.00 | ")
    assert table[2].endswith("| 9.50 | – | – | **4.5** |") and table[3].endswith("|  |")
    assert table[-1] == "a card, at most 24 GB a process, 2026-01-02"


# ---- the random models ---------------------------------------------------------------------------

PARAMETERS = {"0.5b": 494e6, "1.5b": 1544e6, "7b": 7616e6}  # as Qwen2.5's model cards have them


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_shapes_are_those_of_qwen(gpu, name):
    from transformers import Qwen2Config

    shape = model_shape(Qwen2Config(**gpu.SHAPES[name].model))
    found = shape.linear_parameters + shape.other_parameters
    assert found == pytest.approx(PARAMETERS[name], rel=0.002)


def test_a_written_model_is_an_ordinary_directory(gpu, random_model, tmp_path, monkeypatch):
    """In several shards, with a tokenizer that has a word for every id the model can sample."""
    monkeypatch.setattr(random_model, "SHARD_BYTES", 50_000)
    random_model.write_model(gpu.SHAPES["tiny"].model, 16, tmp_path, "cpu")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert AutoConfig.from_pretrained(tmp_path).architectures == ["Qwen2ForCausalLM"]
    policy = load_policy(Config(model=str(tmp_path), lora_rank=4, beta=0.0, device="cpu"))
    layer = policy.base.get_decoder().layers[1]
    assert 0.015 < layer.self_attn.o_proj.weight.std() < 0.025
    assert layer.input_layernorm.weight.eq(1).all() and layer.self_attn.q_proj.bias.eq(0).all()
    assert policy.stop_token_ids == [0]
    assert policy.base.get_output_embeddings().weight is policy.base.get_input_embeddings().weight

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 512
    words = [completion_text(tokenizer, [i], [0]) for i in range(3 + 256, 512)]
    assert all(words) and len(set(words)) == len(words)
    assert completion_text(tokenizer, [300, 301, 0], [0]) == " aalo aalp"
    chats = json.loads((tmp_path / "problems.json").read_text())
    prompts = [render_prompt(tokenizer, chat, "chat") for chat in chats]
    lengths = [len(prompt) for prompt in prompts]
    assert lengths == [len(chat[0]["content"]) + 3 for chat in chats], "a character is a token"
    assert max(lengths) == 16 and min(lengths) >= 8 and len(set(lengths)) > 4
    assert len({tuple(p) for p in prompts}) == 64


def test_a_model_that_does_not_fit_the_disk_is_not_begun(gpu, random_model, tmp_path, monkeypatch):
    monkeypatch.setattr(random_model.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(SystemExit) as ended:
        random_model.write_model(gpu.SHAPES["7b"].model, 512, tmp_path, "cpu")
    assert "15 GB are needed" in ended.value.code and not list(tmp_path.iterdir())
