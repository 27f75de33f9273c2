"""Every case of robustness_cases.json, through `train.main`: bad input is told in one clear line,
and nothing that was saved before is lost."""

import base64
import dataclasses
import errno
import json
import math
import os
import pickle
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import data.alfred
import data.gsm8k
import data.maze
import grpo.checkpoint
import grpo.loop
import grpo.record
import train
from data import Example
from grpo.checkpoint import find_checkpoint, load_checkpoint
from grpo.config import parse
from grpo.interrupt import StopRequest
from grpo.policy import load_policy
from grpo.startup import LOG_BYTES, disk_needed, load_task
from grpo.training import Training
from rewards import score
from rewards.alfred import GoldPlan
from rewards.alfred import reward_functions as plan_reward_functions
from rewards.gsm8k import reward_functions

FILE = Path(__file__).parent / "cases" / "robustness_cases.json"
CASES = {case["id"]: case for case in json.loads(FILE.read_text("utf-8"))["cases"]}

# GRPO alone; sixteen completions a step in groups of four.
FLAGS = """--task maze --stage grpo --device cpu --threads 1 --eval-examples 0 --maze-train 50
    --maze-sft 50 --scratch-hidden-size 16 --scratch-layers 1 --scratch-heads 2 --max-steps 3
    --prompts-per-step 4 --num-generations 4 --learning-rate 0.01 --checkpoint-every 1
    --keep-checkpoints 9 --completions-every 1 --max-completion-length 4"""
TINY = FLAGS.split()
OTHER_FLAGS = "--task gsm8k --stage grpo --device cpu --threads 1 --eval-examples 0"
GSM8K = OTHER_FLAGS.split()
COMPLETIONS = 16

# What the cases call something, and what it is called here.
OUR_NAMES = {
    "the weight file's name": "model.safetensors",
    "the missing file's name": "optimizer.safetensors",
    "the state file's name": "state.json",
    "the link's target": "grpo-step-000009",  # the link's own name; see the case's "unsure"
    "group_size": "num_generations",
}


@dataclasses.dataclass
class Outcome:
    status: int
    text: str  # all that was printed


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, saved_model):
    """run(*flags) -> Outcome of a run in run.folder; run.reward(function) replaces the rewards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo.record.Recorder, "curves", lambda self, title="": None)  # slow
    monkeypatch.setattr(
        grpo.record,
        "_summary_writer",
        lambda *_: SimpleNamespace(add_scalar=lambda *_: None, close=lambda: None),
    )
    folder, load = tmp_path / "run", data.maze.load

    def run(*flags, resume=None, settings=TINY):
        begin = ["--resume", resume] if resume else [*settings, "--output-dir", folder]
        status = train.main([str(word) for word in (*begin, *flags)])
        out = capsys.readouterr()
        return Outcome(status, out.out + out.err)

    def reward(function):
        def changed(*arguments):
            return dataclasses.replace(
                load(*arguments), reward_functions={"my_reward": function}, reward_weights={}
            )

        monkeypatch.setattr(data.maze, "load", changed)

    run.folder, run.reward, run.monkeypatch = folder, reward, monkeypatch
    run.saved_model = saved_model
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of three steps with a checkpoint each, to be copied."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train.main([*TINY, "--output-dir", str(folder)]) == 0
    return folder


@pytest.fixture
def begun(run, finished):
    """(run, the folder of a run of three steps); with --max-steps 4 there is one to do."""
    shutil.copytree(finished, run.folder)
    return run


def counted(values):
    """A reward function that says values(step, index) of the completion with that index."""
    calls = iter(range(10**9))

    def my_reward(text, example):
        return values(*divmod(next(calls), COMPLETIONS))

    return my_reward


def alternating(step, index):
    return float(index % 2)


def files(folder):
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in folder.rglob("*")
        if p.is_file()
    }


def step_folder(folder, step):
    return folder / "checkpoints" / f"grpo-step-{step:06d}"


def weights(folder, step):
    return load_checkpoint(step_folder(folder, step))[0]["model"]


def fresh_weights(*flags):
    config, _, _ = parse([*TINY, *map(str, flags)])
    tokens = data.maze.scratch_tokens(data.maze.Options())
    return load_policy(config, tokens).trainable_parameters()


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def nothing_was_trained(run):
    """A mistake found at the start leaves no trace, so that the name can be used again."""
    assert not run.folder.exists()


# -- data ---------------------------------------------------------------------------------------


def broken_maze(run):
    task = data.maze.load(data.maze.Options(), 0, True)
    good, bad = (task.train[i].messages[0]["content"] for i in range(2))
    good, bad = (text[text.index("<|0-0|>") :].strip() for text in (good, bad))
    bad = bad.rpartition("\n")[0]
    lines = "".join(json.dumps({"maze": text}) + "\n" for text in (good, bad))
    path = run.folder.with_name("mazes.jsonl")
    path.write_text(lines)
    found = run("--maze-file", path)
    assert "mazes.jsonl, line 2" in found.text
    nothing_was_trained(run)
    return found


def problems_file(case_id):
    """The case's file, and a test split of one problem, in the current folder: the file's name."""
    given = CASES[case_id]["input"]
    contents = {name: text.encode() for name, text in given.get("files", {}).items()}
    contents |= {n: base64.b64decode(text) for n, text in given.get("files_base64", {}).items()}
    for name, content in contents.items():
        Path(name).write_bytes(content)
    Path("test.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    return next(iter(contents), given.get("path"))


def broken_problems(case_id):
    """The model is not there: what is wrong with the data is found before it is looked for."""

    def check(run):
        path = problems_file(case_id)
        flags = ["--gsm8k-file", path, "--data-dir", ".", "--model", "./none"]
        found = run(*flags, settings=GSM8K)
        expected = CASES[case_id]["expected"]
        lines = [m for m in expected["message_mentions"] if m.isdigit()] or [expected.get("line")]
        assert lines == [None] or f"{path}, line {lines[0]}:" in found.text
        nothing_was_trained(run)
        return found

    return check


def readable_problems(case_id):
    def check(run):
        path = problems_file(case_id)
        task = data.gsm8k.load(data.gsm8k.Options(gsm8k_file=path, data_dir="."), 0, False)
        assert len(task.train) == len(task.sft) == CASES[case_id]["expected"]["records"]
        assert {example.answer for example in task.train} == {"4"}
        return Outcome(0, "")

    return check


def long_question(run):
    """(A word-level tokenizer of letters: some 200 tokens are the instructions.)"""
    path = Path("d.jsonl")
    problems_file("data/prompt-too-long")  # the test split
    questions = ["a?", "b?", "word " * 4000, "c?"]
    lines = (json.dumps({"question": q, "answer": "#### 4"}) for q in questions)
    path.write_text("\n".join(lines))
    model = run.saved_model(max_position_embeddings=1000)
    found = run(
        *["--gsm8k-file", path, "--data-dir", ".", "--model", model, "--prompt-format", "plain"],
        settings=GSM8K,
    )
    assert "training example 3" in found.text
    nothing_was_trained(run)
    return found


# -- settings -----------------------------------------------------------------------------------


def with_flags(*flags):
    def check(run):
        found = run(*flags)
        nothing_was_trained(run)
        return found

    return check


def output_not_writable(run):
    run.folder.write_text("mine")
    found = run()
    assert run.folder.read_text() == "mine"
    return found


def no_such_model(run):
    started = time.monotonic()
    found = run("--model", "./no-such-model")
    assert time.monotonic() - started < 30
    nothing_was_trained(run)
    return found


# -- rewards ------------------------------------------------------------------------------------


def reward_raises(run):
    def values(step, index):
        if (step, index) == (1, 2):
            raise ValueError("bad text\nof two lines")
        return alternating(step, index)

    run.reward(counted(values))
    found = run("--checkpoint-every", 0)
    assert not same(weights(run.folder, 1), fresh_weights())  # saved, though it was not due
    run.reward(counted(alternating))
    assert run(resume=run.folder).status == 0
    return found


def reward_all_nan(run):
    """One NaN is "not scored"; a step of nothing else was shown as reward 0, and went on."""
    run.reward(counted(lambda step, index: math.nan if step else alternating(step, index)))
    found = run("--max-steps", 3)
    assert found.status == 2 and "step 2 of grpo" in found.text
    assert [line["step"] for line in metrics(run.folder)] == [1]
    assert find_checkpoint(run.folder)[0] == step_folder(run.folder, 1)
    run.reward(counted(lambda step, index: math.nan))
    found = run("--output-dir", "another", "--max-steps", 2)
    assert found.status == 2 and "step 1 of grpo" in found.text
    return found


def reward_infinite(run):
    run.reward(counted(lambda step, index: math.inf if (step, index) == (1, 5) else index % 2))
    found = run()
    assert find_checkpoint(run.folder)[0] == step_folder(run.folder, 1)
    assert all(tensor.isfinite().all() for tensor in weights(run.folder, 1).values())
    return found


def reward_hangs(run):
    def values(step, index):
        if (step, index) == (0, 1):
            time.sleep(3600)
        return alternating(step, index)

    run.reward(counted(values))
    started = time.monotonic()
    found = run("--reward-timeout", 0.3, "--max-steps", 2)
    assert time.monotonic() - started < 30
    assert found.status == 0
    # Fifteen are left of the first step, seven of them with a 1.
    assert metrics(run.folder)[0]["reward"] == pytest.approx(7 / 15)
    assert metrics(run.folder)[1]["reward"] == 0.5
    return found


def reward_changes_its_input(run):
    """A reward is given one text, which cannot be changed; emptying its locals changes nothing."""

    def first(text, example):
        example.messages.clear()
        text = ""
        return float(len(text))

    examples = [Example([{"role": "user", "content": "?"}], "", None) for _ in range(2)]
    functions = {"first": first, "second": lambda text, example: float(len(text))}
    found = score(["abc", "de"], examples, functions)
    assert found == {"first": [0.0, 0.0], "second": [3.0, 2.0]}
    return Outcome(0, "")


def scored(case_id):
    """What the case says of some rewards of a text is true of documented and verbatim."""

    def check(run):
        given, expected = CASES[case_id]["input"], CASES[case_id]["expected"]
        parts = given["text"]
        text = parts["head"] + parts["repeat"] * parts["times"] + parts.get("tail", "")
        names = {"correctness": "correctness", "strict": "strict_format", "soft": "soft_format"}
        for mode in ("documented", "verbatim"):
            example = Example([], "", given["gold"])
            values = score([text], [example], reward_functions(mode))
            wanted = {names[n]: [expected[n]] for n in names.keys() & expected.keys()}
            assert wanted and wanted.items() <= values.items()
        return Outcome(0, "")

    return check


def deep_json(run):
    given, expected = CASES["reward/deep-json"]["input"], CASES["reward/deep-json"]["expected"]
    text = given["text"]["repeat"] * given["text"]["times"]
    assert sum(plan_rewards(text, given["gold"]).values()) == expected["total"]
    return Outcome(0, "")


def lone_surrogate(run):
    """The name that half a character ends is shown by an alarm, and the text by the logs."""
    given = CASES["reward/lone-surrogate"]["input"]
    text = given["response"]
    values = plan_rewards(text, given["gold"])
    assert values["accuracy"] == CASES["reward/lone-surrogate"]["expected"]["accuracy"]
    step = json.dumps(json.loads(text)["executable_plan"][0])
    again = text.replace(step, f"{step}, {step}")
    example = Example([], "", GoldPlan(tuple(given["gold"])))
    (alarm,) = data.alfred.alarms([(again, example)] * 16)
    alarm.encode()
    with grpo.record.Recorder(run.folder, "{}") as recorder:
        path = recorder.completions("grpo", 1, [{"completion": text, "rewards": values}])
    assert json.loads(path.read_text("utf-8"))["completion"] == text
    return Outcome(0, "")


def plan_rewards(text, gold):
    """The documented rewards of ALFRED's task, which are the verbatim ones here."""
    examples = [Example([], "", GoldPlan(tuple(gold)))]
    documented, verbatim = (
        score([text], examples, plan_reward_functions(mode))
        for mode in ("documented", "verbatim")
    )
    assert documented == verbatim
    return {name: value for name, (value,) in documented.items()}


# -- checkpoints --------------------------------------------------------------------------------


def damaged(damage):
    """Resume after damage(the newest checkpoint's folder)."""

    def check(run):
        newest = step_folder(run.folder, 3)
        others = {name: f for name, f in files(run.folder).items() if newest.name not in name}
        damage(newest)
        found = run("--max-steps", 4, resume=run.folder)
        assert others == {n: f for n, f in files(run.folder).items() if newest.name not in n}
        assert f"--resume {step_folder(run.folder, 2)}" in found.text
        assert not run.folder.with_name("marker").exists()
        # The message's advice works.
        after = run("--max-steps", 4, resume=step_folder(run.folder, 2))
        assert after.status == 0, after.text
        assert [line["step"] for line in metrics(run.folder)] == [1, 2, 3, 4]
        return found

    return check


def cut_in_half(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def enormous_header(folder):
    with open(folder / "model.safetensors", "r+b") as file:
        file.write(b"\xff" * 7 + b"\x7f")


class Bomb:
    def __reduce__(self):
        return open, ("marker", "w")


def pickle_for_state(folder):
    (folder / "state.json").write_bytes(pickle.dumps(Bomb()))


def damaged_model(damage):
    """Evaluate the exported model after damage(its weight file)."""

    def check(run):
        weights_file = run.folder / "grpo" / "merged" / "model.safetensors"
        flags = ["--stage", "eval", "--eval-examples", "2", "--model", weights_file.parent]
        flags += ["--output-dir", run.folder.with_name("judged")]
        damage(weights_file)
        found = run(*flags)
        assert not run.folder.with_name("judged").exists()
        return found

    return check


def half_the_keys(path):
    tensors = load_file(path)
    save_file({n: tensors[n] for n in sorted(tensors)[::2]}, path, {"format": "pt"})


def nan_in_a_tensor(path):
    tensors = load_file(path)
    tensors[sorted(tensors)[1]].view(-1)[0] = math.nan
    save_file(tensors, path, {"format": "pt"})


def other_model(run):
    before = files(run.folder)
    found = run("--scratch-hidden-size", 32, "--max-steps", 4, resume=run.folder)
    assert files(run.folder) == before  # not even config.json: the run itself is whole
    assert run("--max-steps", 4, resume=run.folder).status == 0
    return found


def dangling_link(run):
    link = step_folder(run.folder, 9)
    link.symlink_to(run.folder / "gone")
    found = run("--max-steps", 4, resume=run.folder)
    assert found.status == 0 and f"going on from {step_folder(run.folder, 3)}" in found.text
    return found


def other_settings(run):
    assert run("--learning-rate", 1e-5).status == 0
    return run("--max-steps", 4, "--num-generations", 8, "--learning-rate", 5e-5,
               resume=run.folder)  # fmt: skip


def disk_full(run):
    saved, save = [], grpo.checkpoint.save_file

    def save_file(tensors, path):
        saved.append(path)
        if len(saved) == 3:  # two files a checkpoint
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path)

    run.monkeypatch.setattr(grpo.checkpoint, "save_file", save_file)
    found = run("--checkpoint-every", 2, "--max-steps", 5)
    weights(run.folder, 2)
    assert find_checkpoint(run.folder) == (step_folder(run.folder, 4), [])  # the second attempt
    run.monkeypatch.setattr(grpo.checkpoint, "save_file", save)
    assert run(resume=run.folder).status == 0
    return found


class Killed(BaseException):
    """Not an Exception: nothing of the program's own may run after it, as after SIGKILL."""


def killed_while_saving(run):
    saved, save = [], grpo.checkpoint.save_file

    def save_file(tensors, path):
        saved.append(path)
        if len(saved) == 4:
            raise Killed
        save(tensors, path)

    run.monkeypatch.setattr(grpo.checkpoint, "save_file", save_file)
    with pytest.raises(Killed):
        run()
    run.monkeypatch.setattr(grpo.checkpoint, "save_file", save)
    found = run(resume=run.folder)
    assert "passed over an incomplete checkpoint" in found.text
    assert f"going on from {step_folder(run.folder, 1)}" in found.text
    return found


def already_finished(run):
    before = files(run.folder)
    found = run("--max-steps", 3, resume=run.folder)
    assert "nothing left to do" in found.text
    assert files(run.folder) == before
    return found


def resume_equals_straight(run):
    """Stopped as by a signal after step 2; the other run is never stopped."""
    run.reward(lambda text, example: len(text) % 5)
    straight = run.folder.with_name("straight")
    assert run("--max-steps", 4, "--output-dir", straight).status == 0
    finish = Training.finish_step

    def finish_and_stop(self, values):
        finish(self, values)
        self.stop.requested |= self.step == 2

    run.monkeypatch.setattr(Training, "finish_step", finish_and_stop)
    stopped = run("--max-steps", 4)
    assert stopped.status == 130 and "to go on" in stopped.text
    run.monkeypatch.setattr(Training, "finish_step", finish)
    found = run(resume=run.folder)
    assert same(weights(run.folder, 4), weights(straight, 4))
    assert not same(weights(run.folder, 4), weights(straight, 3))
    for name in ("learning_rate", "reward", "grad_norm"):
        assert [x[name] for x in metrics(run.folder)] == [x[name] for x in metrics(straight)]
    for step in range(1, 5):
        name = f"completions/grpo-step-{step:06d}.jsonl"
        assert (run.folder / name).read_text() == (straight / name).read_text()
    return found


def log_disk_full(run):
    write = os.write

    def full(handle, line):
        if b'"step": 3' in line:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, line)

    run.monkeypatch.setattr(grpo.record.os, "write", full)
    found = run("--max-steps", 5, "--checkpoint-every", 2)
    run.monkeypatch.setattr(grpo.record.os, "write", write)
    assert [line["step"] for line in metrics(run.folder)] == [1, 2]
    load_checkpoint(find_checkpoint(run.folder)[0])
    assert run(resume=run.folder).status == 0
    return found


# -- training -----------------------------------------------------------------------------------


def loss_not_finite(run):
    """The run stops with the weights of step 1, and goes on to the same end without the fault."""
    run.reward(counted(alternating))
    straight = run.folder.with_name("straight")
    assert run("--output-dir", straight).status == 0
    calls, logprobs = [], grpo.loop.completion_logprobs

    def faulty(*arguments, **keywords):
        logp, entropy = logprobs(*arguments, **keywords)
        calls.append(1)
        if len(calls) == 2:
            logp[3] = logp[3] * math.nan
        return logp, entropy

    run.reward(counted(alternating))
    run.monkeypatch.setattr(grpo.loop, "completion_logprobs", faulty)
    found = run("--checkpoint-every", 0)
    assert find_checkpoint(run.folder)[0] == step_folder(run.folder, 1)
    assert same(weights(run.folder, 1), weights(straight, 1))
    assert [line["step"] for line in metrics(run.folder)] == [1]
    run.monkeypatch.setattr(grpo.loop, "completion_logprobs", logprobs)
    run.reward(counted(alternating))
    assert run(resume=run.folder).status == 0
    assert same(weights(run.folder, 3), weights(straight, 3))
    return found


def all_groups_dead(run):
    run.reward(lambda text, example: 1.0)
    found = run("--beta", 0.0)
    assert [line["frac_reward_zero_std"] for line in metrics(run.folder)] == [1.0] * 3
    assert all(line["reward"] == 1.0 and line["grad_norm"] == 0.0 for line in metrics(run.folder))
    assert same(weights(run.folder, 3), fresh_weights())
    return found


CHECKS = {
    "data/broken-maze": broken_maze,
    **{
        case: broken_problems(case)
        for case in (
            "data/bad-json-line",
            "data/missing-answer",
            "data/empty-file",
            "data/no-such-file",
            "data/latin-1",
            "data/no-answer-mark",
            "data/utf-16",
        )
    },
    "data/byte-order-mark": readable_problems("data/byte-order-mark"),
    "data/blank-line-at-end": readable_problems("data/blank-line-at-end"),
    "data/prompt-too-long": long_question,
    "settings/group-of-one": with_flags("--num-generations", 1),
    "settings/batch-not-divisible": with_flags("--completions-per-step", 6),
    "settings/misspelt": with_flags("--learning_rte", 1e-05),
    "settings/output-not-writable": output_not_writable,
    "settings/no-such-model": no_such_model,
    "settings/text-for-a-number": with_flags("--max_steps", "ten"),
    "reward/raises": reward_raises,
    "reward/all-nan": reward_all_nan,
    "reward/infinite": reward_infinite,
    "reward/hangs": reward_hangs,
    "reward/changes-its-input": reward_changes_its_input,
    "reward/close-open-flood": scored("reward/close-open-flood"),
    "reward/five-thousand-digits": scored("reward/five-thousand-digits"),
    "reward/deep-json": deep_json,
    "reward/lone-surrogate": lone_surrogate,
    "checkpoint/cut-in-half": damaged(cut_in_half),
    "checkpoint/broken-header": damaged(enormous_header),
    "checkpoint/missing-part": damaged(lambda folder: (folder / "optimizer.safetensors").unlink()),
    "checkpoint/other-model": other_model,
    "checkpoint/half-the-keys": damaged_model(half_the_keys),
    "checkpoint/code-in-a-pickle": damaged(pickle_for_state),
    "checkpoint/dangling-link": dangling_link,
    "checkpoint/other-settings": other_settings,
    "checkpoint/disk-full": disk_full,
    "checkpoint/killed-while-saving": killed_while_saving,
    "checkpoint/already-finished": already_finished,
    "checkpoint/nan-weights": damaged_model(nan_in_a_tensor),
    "checkpoint/resume-equals-straight": resume_equals_straight,
    "checkpoint/zero-bytes": damaged_model(lambda path: path.write_bytes(b"")),
    "checkpoint/log-disk-full": log_disk_full,
    "training/loss-not-finite": loss_not_finite,
    "training/all-groups-dead": all_groups_dead,
}
STARTS_FRESH = (other_settings, disk_full, killed_while_saving, resume_equals_straight,
                log_disk_full)  # fmt: skip


@pytest.mark.parametrize("case_id", CASES)
def test_robustness_case(case_id, run, request):
    case = CASES[case_id]
    check = CHECKS[case_id]
    if case["kind"] == "checkpoint" and check not in STARTS_FRESH:
        request.getfixturevalue("begun")
    found = check(run)

    expected = case["expected"]
    outcomes = expected["outcome"].split(" or ")
    if case_id == "checkpoint/dangling-link":
        outcomes = ["warning"]  # the run goes on from the newest whole checkpoint, and says so
    assert found.status == 0 or "error" in outcomes, found.text
    assert found.status != 0 or set(outcomes) & {"ok", "warning"}, found.text
    message = found.text
    assert "Traceback" not in message
    if found.status:
        message = [line for line in message.splitlines() if line.startswith("error: ")][-1]
        assert message == found.text.rstrip("\n").splitlines()[-1]  # one line, the last
    for mention in expected["message_mentions"]:
        assert OUR_NAMES.get(mention, mention).lower() in message.lower(), message


def test_no_case_is_forgotten():
    assert CHECKS.keys() == CASES.keys()


# -- what the cases do not say ------------------------------------------------------------------


def test_the_memory_of_the_device_running_out_is_told_with_the_ways_out(run):
    run.reward(counted(alternating))
    calls, logprobs = [], grpo.loop.completion_logprobs

    def full(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return logprobs(*arguments, **keywords)

    run.monkeypatch.setattr(grpo.loop, "completion_logprobs", full)
    found = run("--checkpoint-every", 0)
    assert found.status == 2 and "--tokens-per-micro-batch" in found.text
    assert find_checkpoint(run.folder)[0] == step_folder(run.folder, 1)


def test_a_bug_in_the_program_costs_no_whole_step(run):
    run.reward(counted(alternating))

    def buggy(self, kept):
        if self.step == 2:
            raise ZeroDivisionError

    run.monkeypatch.setattr(Training, "keep_completions", buggy)
    with pytest.raises(ZeroDivisionError):  # a bug is no UserError: its traceback is wanted
        run("--checkpoint-every", 2)
    assert find_checkpoint(run.folder)[0] == step_folder(run.folder, 2)


def test_a_prompt_that_is_too_long_is_named_and_never_cut(run):
    found = run("--max-prompt-length", 5)
    assert found.status == 2 and "training example" in found.text
    assert "12 tokens, over --max-prompt-length 5" in found.text  # the longest: what is needed
    nothing_was_trained(run)


def test_a_prompt_that_the_tokenizer_cannot_spell_is_refused(begun):
    """A model from scratch knows 3x3 mazes: the cells of a larger one would all be <unk>."""
    model = begun.folder / "grpo" / "merged"
    found = begun("--model", model, "--output-dir", "other", "--maze-size", 4)
    assert found.status == 2 and "cannot spell" in found.text and str(model) in found.text
    found = begun("--model", model, "--output-dir", "other", "--max-steps", 1)
    assert found.status == 0, found.text


def test_a_stop_while_the_model_is_loaded_leaves_nothing(run):
    enter = StopRequest.__enter__

    def stop_at_once(self):
        self.requested = True
        return enter(self)

    run.monkeypatch.setattr(StopRequest, "__enter__", stop_at_once)
    found = run()
    assert found.status == 130
    run.monkeypatch.setattr(StopRequest, "__enter__", enter)
    assert run(resume=run.folder).status == 0


def test_whoever_goes_back_has_gone_back_before_the_first_new_checkpoint(begun):
    begun.reward(lambda text, example: "not a number")
    assert begun(resume=step_folder(begun.folder, 1)).status == 2
    assert find_checkpoint(begun.folder)[0] == step_folder(begun.folder, 1)
    assert [line["step"] for line in metrics(begun.folder)] == [1]
    assert not json.loads((begun.folder / "results.json").read_text())


def test_a_checkpoint_that_was_set_aside_is_not_taken_for_a_run_without_any(begun):
    """It lies two folders below config.json, as a checkpoint does: the run began at step 0."""
    aside = begun.folder / "checkpoints" / ".set-aside-grpo-step-000002"
    step_folder(begun.folder, 2).rename(aside)
    before = files(begun.folder)
    found = begun("--max-steps", 4, resume=aside)
    assert found.status == 2 and "renamed" in found.text
    assert files(begun.folder) == before


def test_the_estimate_of_the_disk_is_near_what_is_written(finished):
    """Within a third: a file's header is large beside a model of a few thousand weights."""
    config, options, _ = parse([*TINY, "--output-dir", str(finished)])
    written = sum(len(content) for name, (content, _) in files(finished).items()
                  if name.endswith("safetensors"))  # fmt: skip
    _, tokens = load_task(config, options)
    config.keep_checkpoints = 2  # and one more while the next is written: three, as in the run
    assert (disk_needed(config, tokens) - LOG_BYTES) / written == pytest.approx(1, abs=1 / 3)


def test_a_run_that_the_disk_cannot_hold_ends_before_any_work(run):
    run.monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=LOG_BYTES))
    found = run()
    assert found.status == 2 and "too little space" in found.text
    assert len(found.text.splitlines()) == 1
    assert not any(path.is_file() for path in run.folder.rglob("*"))


def test_a_reward_that_is_not_of_this_task_is_named(run):
    found = run("--reward-weights", "corectness=2")
    assert found.status == 2 and "corectness" in found.text and "correctness" in found.text
