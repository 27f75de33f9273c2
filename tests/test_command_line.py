"""train.py as a stranger uses it: whole runs, kills, signals, resumes, exports, in real processes.

Every process needs seconds to import torch, so most runs are forks of one server that has done so.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fork_server import ENVIRONMENT, REPO, ForkServer
from safetensors.torch import load_file

# Enough SFT that some sampled answers are valid: otherwise all rewards are 0 and GRPO idles.
FLAGS = """--task maze --device cpu --threads 1 --scratch-hidden-size 16 --scratch-layers 1
    --scratch-heads 2 --maze-train 50 --maze-sft 50 --eval-examples 4 --sft-steps 40
    --sft-batch-size 4 --sft-learning-rate 0.02 --max-steps 6 --prompts-per-step 2
    --num-generations 4 --learning-rate 0.01 --checkpoint-every 2 --completions-every 2"""
TINY = FLAGS.split()


class Server(ForkServer):
    """Forks runs of one process."""

    def start(self, *argv, cwd=None):
        return Process(self, *self.fork(argv, cwd or self.folder))

    def run(self, *argv, cwd=None):
        """(exit status, what it printed)"""
        return self.start(*argv, cwd=cwd).end()


class Process:
    def __init__(self, server, pid, log):
        self.server, self.pid, self.log = server, pid, log

    def text(self):
        return self.log.read_text() if self.log.exists() else ""

    def send(self, number):
        os.kill(self.pid, number)

    def end(self):
        return self.server.wait(self.pid), self.text()

    def wait_for(self, condition, seconds=30):
        """Until condition() is true; the process must not have ended with an error before."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.002)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


def lines(folder):
    """metrics.jsonl without what is measured by the clock."""
    path = folder / "metrics.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{k: v for k, v in x.items() if "time" not in k and "per_sec" not in k} for x in found]


def steps(folder, stage):
    return [x["step"] for x in lines(folder) if x["stage"] == stage and "eval/accuracy" not in x]


def weights(folder):
    """The bytes of every model that the run has finished."""
    return {m: (folder / m / "model.safetensors").read_bytes() for m in ("sft", "grpo/merged")}


def snapshot(folder):
    """Every file and folder with content and time."""
    return {
        str(p.relative_to(folder)): (p.read_bytes() if p.is_file() else None, p.stat().st_mtime_ns)
        for p in sorted(folder.rglob("*"))
    }


def copy_of(run, folder):
    """A run that may be changed; it is the copy's own, wherever it was made."""
    return Path(shutil.copytree(run, folder))


def python(*words, cwd):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(the folder of an undisturbed run, its process), by the real command line."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = python(REPO / "train.py", *TINY, "--output-dir", folder, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    return folder, done


# -- a whole run --------------------------------------------------------------------------------


def test_a_run_leaves_everything_that_it_promises(whole):
    folder, _ = whole
    for name in ("config.json", "metrics.jsonl", "results.json", "curves.png"):
        assert (folder / name).stat().st_size > 0
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    saved = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert saved == [f"{s}-step-{n:06d}" for s, n in
                     (("grpo", 4), ("grpo", 6), ("sft", 38), ("sft", 40))]  # fmt: skip
    assert steps(folder, "sft") == list(range(1, 41))
    assert steps(folder, "grpo") == list(range(1, 7))
    names = "reward reward_std kl entropy grad_norm frac_reward_zero_std rewards/correctness/mean"
    last = next(x for x in reversed(lines(folder)) if "reward" in x)
    assert set(names.split()) <= last.keys()
    assert any(x.get("grad_norm") for x in lines(folder) if x["stage"] == "grpo")  # it did learn
    kept = [p.name for p in sorted((folder / "completions").iterdir())]
    assert kept == [f"grpo-step-00000{n}.jsonl" for n in (1, 3, 5)]
    row = json.loads((folder / "completions" / kept[0]).read_text().splitlines()[0])
    assert {"prompt", "completion"} <= row.keys()
    for stage in ("sft", "grpo"):
        assert list((folder / "tensorboard" / stage).glob("events.*"))
    results = json.loads((folder / "results.json").read_text())
    assert [(n, r["step"]) for n, r in results.items()] == [
        ("start", 0), ("after_sft", 40), ("after_grpo", 6)]  # fmt: skip
    for name, result in results.items():
        answers = (folder / "evaluations" / f"{name}.jsonl").read_text().splitlines()
        assert len(answers) == 4 == result["examples"]
        assert sum(json.loads(a)["correct"] for a in answers) == result["correct"]
    for model, stages in {"sft": ["start", "after_sft"], "grpo/merged": [*results]}.items():
        card = (folder / model / "README.md").read_text()
        assert "maze" in card and "learning_rate" in card
        for stage in stages:
            accuracy = results[stage]["accuracy"]
            assert re.search(rf"{stage} / accuracy.*{accuracy}", card), card
    assert not [p for p in folder.rglob("*") if "partial" in p.name or "writing" in p.name]


def test_a_run_prints_its_bars_and_results_and_nothing_of_the_libraries(whole):
    folder, done = whole
    assert done.stdout.splitlines()[-1] == (
        f"everything is in {folder}: results.json, curves.png, completions/, evaluations/"
    )
    assert "after_sft" in done.stdout and "all (4)" in done.stdout
    shown = [line.strip() for line in done.stderr.replace("\r", "\n").splitlines() if line.strip()]
    starts = ("eval ", "start: ", "sft: ", "after_sft: ", "grpo: ", "after_grpo: ", "warning (step")
    assert [line for line in shown if not line.startswith(starts)] == []
    last = [line for line in shown if line.startswith("grpo:")][-1]
    assert last.index("reward") < last.index("grad_norm")


# -- killed, stopped, resumed -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_moments_a_run_ends_with_the_same_weights(server, whole, tmp_path, seed):
    rng, folder, kills = random.Random(seed), tmp_path / "run", 0
    while True:
        begun = (folder / "config.json").exists()
        argv = ["--resume", folder] if begun else [*TINY, "--output-dir", folder]
        process = server.start(*argv)
        if kills == 4:
            break
        time.sleep(rng.uniform(0.1, 1.2))
        process.send(signal.SIGKILL)
        status, text = process.end()
        if status == 0:
            break
        assert status == -signal.SIGKILL, text
        kills += 1
    else:
        raise AssertionError
    if kills == 4:
        status, text = process.end()
        assert status == 0, text
    assert weights(folder) == weights(whole[0])
    for stage in ("sft", "grpo"):
        assert steps(folder, stage) == steps(whole[0], stage)
    assert [x for x in lines(folder) if "loss" in x] == [x for x in lines(whole[0]) if "loss" in x]


@pytest.mark.parametrize(
    "number, stage", [(signal.SIGINT, "sft"), (signal.SIGTERM, "grpo"), (signal.SIGINT, "grpo")]
)
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(
    server, whole, tmp_path, number, stage
):
    folder = tmp_path / "a run"
    process = server.start(*TINY, "--output-dir", folder, "--checkpoint-every", 0)
    process.wait_for(lambda: f'"{stage}", "step": 2' in read(folder / "metrics.jsonl"))
    process.send(number)
    status, text = process.end()
    assert status == 130, text
    assert "finishing this step" in text and "Traceback" not in text
    assert f"to go on: python train.py --resume '{folder}'" in text
    stopped_at = steps(folder, stage)[-1]
    assert (folder / "checkpoints" / f"{stage}-step-{stopped_at:06d}").is_dir()
    status, text = server.run("--resume", folder)
    assert status == 0 and "going on from" in text, text
    assert weights(folder) == weights(whole[0])
    assert steps(folder, "grpo") == steps(whole[0], "grpo")


def read(path):
    return path.read_text() if path.exists() else ""


def test_a_second_ctrl_c_quits_at_once(server, tmp_path):
    folder = tmp_path / "run"
    # One step takes minutes.
    process = server.start(*TINY, "--output-dir", folder, "--stage", "sft", "--eval-examples", 0,
                           "--sft-batch-size", 200_000)  # fmt: skip
    process.wait_for(lambda: "sft:" in process.text())
    process.send(signal.SIGINT)
    process.wait_for(lambda: "once more to quit" in process.text())
    asked = time.monotonic()
    process.send(signal.SIGINT)
    status, text = process.end()
    assert (status, "Traceback" in text) == (130, False), text
    assert time.monotonic() - asked < 20 and "--resume" in text


def test_a_signal_during_an_evaluation_does_not_wait_for_its_end(server, whole, tmp_path):
    folder = tmp_path / "run"
    slow = ("--maze-held-out", 1000, "--eval-examples", 1000, "--rollout-rows", 1)
    process = server.start(*TINY, *slow, "--output-dir", folder)
    process.wait_for(lambda: (folder / "config.json").exists())
    process.send(signal.SIGTERM)
    status, text = process.end()
    assert status == 130 and f"--resume {folder}" in text, text
    assert not (folder / "results.json").exists()
    fast = ("--maze-held-out", 200, "--eval-examples", 4, "--rollout-rows", 128)
    status, text = server.run("--resume", folder, *fast)
    assert status == 0 and "rollout_rows was 1, is now 128" in text, text
    assert weights(folder) == weights(whole[0])


def test_a_run_that_is_finished_is_left_as_it_is(server, whole):
    before = snapshot(whole[0])
    status, text = server.run("--resume", whole[0])
    assert status == 0 and "nothing left to do" in text
    status, text = server.run("--resume", whole[0], "--max-steps", 6, "--stage", "eval")
    assert status == 0 and "nothing left to do" in text
    assert snapshot(whole[0]) == before


def test_two_processes_never_work_in_one_folder(server, tmp_path):
    folder = tmp_path / "run"
    process = server.start(*TINY, "--output-dir", folder, "--sft-steps", 100_000)
    process.wait_for(lambda: steps(folder, "sft"))
    for argv in (["--resume", folder], [*TINY, "--output-dir", folder]):
        status, text = server.run(*argv)
        assert status == 2 and "output" in text and len(text.splitlines()) == 1, text
    process.send(signal.SIGKILL)
    process.end()
    process = server.start("--resume", folder)  # the claim died with the process
    process.wait_for(lambda: "going on from" in process.text())
    process.send(signal.SIGKILL)
    process.end()


# -- stages -------------------------------------------------------------------------------------


def test_sft_today_and_grpo_tomorrow_is_a_run_of_both(server, whole, tmp_path):
    folder = tmp_path / "run"
    status, text = server.run(*TINY, "--output-dir", folder, "--stage", "sft")
    assert status == 0 and not (folder / "grpo").exists(), text
    status, text = server.run("--resume", folder, "--stage", "grpo")
    assert status == 0, text
    assert weights(folder) == weights(whole[0])
    results = json.loads((folder / "results.json").read_text())
    assert list(results) == ["start", "after_sft", "after_grpo"]


def test_grpo_does_not_start_from_half_a_cold_start(server, tmp_path):
    folder = tmp_path / "run"
    process = server.start(*TINY, "--output-dir", folder, "--sft-steps", 100_000)
    process.wait_for(lambda: len(steps(folder, "sft")) >= 3)  # the second is saved
    process.send(signal.SIGTERM)
    process.end()
    status, text = server.run("--resume", folder, "--stage", "grpo")
    assert status == 2 and "SFT" in text and "--stage all" in text, text


def test_a_model_alone_is_evaluated(server, whole, tmp_path):
    model = whole[0] / "grpo" / "merged"
    status, text = server.run(*TINY, "--stage", "eval", "--model", model, "--output-dir",
                              tmp_path / "run", "--eval-samples", 2)  # fmt: skip
    assert status == 0, text
    here = json.loads((tmp_path / "run" / "results.json").read_text())["start"]
    there = json.loads((whole[0] / "results.json").read_text())["after_grpo"]
    assert "pass@2" in here
    assert {k: here[k] for k in ("correct", "failures", "mean_tokens")} == {
        k: there[k] for k in ("correct", "failures", "mean_tokens")
    }


def test_without_evaluation_there_are_results_all_the_same_and_it_can_come_later(
    server, whole, tmp_path
):
    folder = tmp_path / "run"
    status, text = server.run(*TINY, "--output-dir", folder, "--eval-examples", 0)
    assert status == 0, text
    results = json.loads((folder / "results.json").read_text())
    assert results == {"after_sft": {"step": 40}, "after_grpo": {"step": 6}}
    assert weights(folder) == weights(whole[0])
    status, text = server.run("--resume", folder, "--eval-examples", 4, "--stage", "eval")
    assert status == 0, text
    assert weights(folder) == weights(whole[0])
    late, early = (json.loads((f / "results.json").read_text()) for f in (folder, whole[0]))
    assert late == early


def test_more_steps_go_on_from_a_finished_run(server, whole, tmp_path):
    folder = copy_of(whole[0], tmp_path / "run")
    status, text = server.run("--resume", folder, "--max-steps", 8)
    assert status == 0 and "max_steps was 6, is now 8" in text, text
    assert steps(folder, "grpo") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert json.loads((folder / "results.json").read_text())["after_grpo"]["step"] == 8
    status, text = server.run("--resume", folder, "--sft-steps", 80)
    assert status == 2 and "GRPO has begun" in text, text


@pytest.mark.parametrize("stage, step", [("sft", 38), ("sft", 40), ("grpo", 4)])
def test_going_back_to_a_checkpoint_does_the_rest_again(server, whole, tmp_path, stage, step):
    folder = copy_of(whole[0], tmp_path / "run")
    checkpoint = folder / "checkpoints" / f"{stage}-step-{step:06d}"
    status, text = server.run("--resume", checkpoint)
    assert status == 0, text
    assert ("sft: " in text, "grpo: " in text) == (step < 40 and stage == "sft", True)
    assert weights(folder) == weights(whole[0])
    for each in ("sft", "grpo"):
        assert steps(folder, each) == steps(whole[0], each)
    aside = [p.name for p in (folder / "checkpoints").iterdir() if "aside" in p.name]
    assert ".set-aside-grpo-step-000006" in aside  # of the first course: nothing is lost
    assert (folder / "results.json").read_text() == (whole[0] / "results.json").read_text()


# -- exports ------------------------------------------------------------------------------------

PLAIN = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base, adapter, merged = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(merged)
ids = torch.tensor([[3, 1, 4, 1, 5]])
plain = AutoModelForCausalLM.from_pretrained(base)
before = plain(ids).logits
with_adapter = PeftModel.from_pretrained(plain, adapter)(ids).logits
model = AutoModelForCausalLM.from_pretrained(merged)
print(len(tokenizer), model.config._attn_implementation)
assert (with_adapter - before).abs().max() > 1e-4
assert (with_adapter - model(ids).logits).abs().max() < 1e-5
assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > 5
assert not [name for name in sys.modules if name.split(".")[0] == "grpo"]
"""


def test_what_is_exported_loads_without_this_project(server, whole, tmp_path):
    """SFT and GRPO by LoRA on a trained model: the adapter's base is the SFT's merged model."""
    folder = tmp_path / "run"
    # Without a spread in its groups a step would have no KL to look at.
    kl = ("--beta", 0.1, "--kl-on-zero-std-groups")
    status, text = server.run(*TINY, *kl, "--model", whole[0] / "sft", "--lora-rank", 2,
                              "--lora-alpha", 4, "--output-dir", folder)  # fmt: skip
    assert status == 0, text
    first = next(x for x in lines(folder) if "kl" in x)
    assert abs(first["kl"]) < 1e-6  # the SFT is in the reference
    done = python("-c", PLAIN, folder / "sft", folder / "grpo/adapter", folder / "grpo/merged",
                  cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr

    # A trained adapter as the start of a run with SFT: it is merged once, not applied again.
    again = tmp_path / "again"
    status, text = server.run(*TINY, *kl, "--model", folder / "sft", "--adapter", folder /
                              "grpo/adapter", "--lora-rank", 2, "--lora-alpha", 4,
                              "--sft-steps", 1, "--sft-learning-rate", 1e-9, "--max-steps", 1,
                              "--learning-rate", 1e-9,
                              "--output-dir", again)  # fmt: skip
    assert status == 0, text
    assert abs(next(x for x in lines(again) if "kl" in x)["kl"]) < 1e-6
    base, once, twice = (
        load_file(path / "model.safetensors")
        for path in (folder / "sft", folder / "grpo/merged", again / "grpo/merged")
    )
    assert max((once[n] - base[n]).abs().max() for n in base) > 1e-3
    assert max((once[n] - twice[n]).abs().max() for n in base) < 1e-6


# -- mistakes -----------------------------------------------------------------------------------


def test_a_dry_run_prints_and_writes_nothing(server, tmp_path):
    (tmp_path / "empty").mkdir()
    status, text = server.run(*TINY, "--dry-run", cwd=tmp_path / "empty")
    assert status == 0, text
    for word in ("num_generations", "completion tokens", "total", "GB"):
        assert word in text
    rows = [line.split() for line in text.splitlines()]
    for row in ("maze_size 3 derived", "maze_format direct derived", "dtype float32 derived",
                "device cpu flag", "threads 1 flag", "lora_rank 0 from scratch"):  # fmt: skip
        assert row.split() in rows  # what will hold, not "auto"
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--learning_rte", "1e-5"], ["learning_rte", "learning_rate"]),
        (["--max-steps", "ten"], ["max_steps", "ten"]),
        (["--task", "mase"], ["mase", "maze"]),
        (["--preset", "a100"], ["a100", "a10"]),
        (["--num-generations", "1"], ["group", "2"]),
        (["--resume", "nowhere"], ["nowhere", "no such folder"]),
        (["fast"], ["fast", "--help"]),
    ],
)
def test_a_mistake_is_told_in_one_line_before_torch_is_loaded(argv, words, tmp_path):
    code = "import sys, train; status = train.main(sys.argv[1:]); print('torch' in sys.modules)"
    done = python("-c", f"{code}; sys.exit(status)", *argv, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (2, "False")
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")
    for word in words:
        assert word in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_at_the_start_does_not_use_up_the_name_of_the_run(server, tmp_path):
    folder = tmp_path / "run"
    for wrong in (["--model", "./no-such-model"], ["--maze-file", "nowhere.jsonl"],
                  ["--max-prompt-length", 4]):  # fmt: skip
        status, text = server.run(*TINY, *wrong, "--output-dir", folder)
        assert status == 2 and len(text.splitlines()) == 1, text
        assert str(wrong[1]) in text and not folder.exists()


def mount_is_allowed():
    try:
        trial = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
        return subprocess.run(trial, capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not mount_is_allowed(), reason="no small disk can be made without privileges")
def test_a_disk_that_fills_up_costs_no_checkpoint(server, tmp_path):
    """A real disk of 60 MB, filled up to the last byte once two checkpoints are there.

    The lines of metrics.jsonl tell when: a checkpoint's folder is gone again after 20 ms.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    command = " ".join([sys.executable, str(REPO / "train.py"), *TINY, "--sft-steps", "100000",
                        "--eval-examples", "0", "--output-dir", f"{disk}/run"])  # fmt: skip
    script = f"""
        mount -t tmpfs -o size=60m tmpfs {disk} || exit 99
        (until [ $(cat {disk}/run/metrics.jsonl | wc -l) -ge 5 ]; do sleep 0.02; done
         cat /dev/zero > {disk}/ballast) 2>/dev/null &
        {command}; status=$?
        rm {disk}/ballast; cp -r {disk}/run {tmp_path}/saved; exit $status"""
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], cwd=tmp_path, env=ENVIRONMENT,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    last = done.stderr.replace("\r", "\n").splitlines()[-1]
    assert done.returncode == 2 and "no space left" in last and last.startswith("error: ")
    saved = tmp_path / "saved"
    whole_lines = (saved / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line) for line in whole_lines)
    config = (saved / "config.json").read_text()
    (saved / "config.json").write_text(config.replace(f"{disk}/run", str(saved)))
    status, text = server.run("--resume", saved, "--stage", "sft", "--sft-steps", 2)
    assert status == 0 and "going on from" in text, text
