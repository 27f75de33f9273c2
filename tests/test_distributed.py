"""Two ranks: the run of one process, written once, and an end for all of them when one fails.

One run is by torchrun itself. The others are forks of a server that has imported everything, with
the variables that torchrun sets.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fork_server import ENVIRONMENT, REPO, ForkServer
from safetensors.torch import load_file
from test_command_line import FLAGS, TINY, lines, steps
from tiny import letters_task, tiny_policy
from torch import nn

import grpo.distributed as distributed
import grpo.interrupt
from grpo.errors import UserError
from grpo.evaluate import evaluate
from grpo.pretrained import pick_device
from grpo.startup import default_threads, physical_cores

SECONDS = 60  # a rank that waits this long waits for ever

# 5 prompts, 5 examples and 5 questions: never the same number on both ranks.
FEW_STEPS = f"""{FLAGS} --sft-steps 3 --sft-batch-size 5 --max-steps 3 --prompts-per-step 5
    --eval-examples 5 --checkpoint-every 1 --completions-every 1 --eval-samples 4 --eval-every 2
    --num-iterations 2 --scale-rewards batch --beta 0.05"""
SHORT = FEW_STEPS.split()
SFT = [*TINY, "--stage", "sft", "--eval-examples", 0]
GRPO = [*TINY, "--stage", "grpo", "--eval-examples", 0, "--checkpoint-every", 0]


class Server(ForkServer):
    """Forks runs of one rank or of two."""

    def start(self, *argv, ranks=2, before=""):
        """before: Python that each rank runs first; it knows its `rank`."""
        forked = [self.fork(argv, variables=v, before=before) for v in torchrun_variables(ranks)]
        return Run(self, forked)

    def run(self, *argv, **more):
        """(exit status, what it printed) of each rank."""
        return self.start(*argv, **more).end()


class Run:
    def __init__(self, server, ranks):
        self.server, self.ranks, self.statuses = server, ranks, {}

    def send(self, number, rank):
        os.kill(self.ranks[rank][0], number)

    def texts(self):
        return [log.read_text() if log.exists() else "" for _, log in self.ranks]

    def wait_for(self, condition):
        """The value of condition() once it is true."""
        deadline = time.monotonic() + SECONDS
        while not (found := condition()):
            if time.monotonic() > deadline:
                for pid, _ in self.ranks:
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(self.texts())
            time.sleep(0.005)
        return found

    def status(self, rank):
        """The rank's exit status, once it has ended."""
        if rank not in self.statuses:
            ended = self.wait_for(lambda: self.server.poll(self.ranks[rank][0]))
            self.statuses[rank] = int(ended)
        return self.statuses[rank]

    def end(self):
        statuses = [self.status(rank) for rank in range(len(self.ranks))]
        return list(zip(statuses, self.texts(), strict=True))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun_variables(ranks):
    """What torchrun sets for each rank; nothing for one process without it."""
    if ranks == 1:
        return [{}]
    common = {
        "TORCHELASTIC_RUN_ID": "none",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def torchrun(*argv, cwd, script=REPO / "train.py"):
    command = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-addr", "127.0.0.1",
               "--master-port", free_port(), script, *argv]  # fmt: skip
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def model(server, tmp_path_factory):
    """A model that answers some mazes: a fresh one earns nothing, so that GRPO would idle."""
    folder = tmp_path_factory.mktemp("model") / "run"
    ((status, text),) = server.run(*SFT, "--output-dir", folder, ranks=1)
    assert status == 0, text
    return folder / "sft"


@pytest.fixture(scope="module")
def one(server, model):
    """The folder of a run by one process."""
    folder = model.parent.parent / "one"
    ((status, text),) = server.run(*SHORT, "--model", model, "--output-dir", folder, ranks=1)
    assert status == 0, text
    return folder


@pytest.fixture(scope="module")
def two(model):
    """(the folder of the same run by torchrun with two, what it printed)"""
    folder = model.parent.parent / "two"
    done = torchrun(*SHORT, "--model", model, "--output-dir", folder, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    return folder, done


def assert_same_weights(one, other, model="grpo/merged"):
    """Up to the order in which float32 gradients are summed. Adam makes a whole step of a gradient
    that is nothing but such rounding, hence a mean."""
    ours, theirs = (load_file(folder / model / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    for name, weights in ours.items():
        gap = (weights - theirs[name]).abs().mean() / weights.abs().mean()
        assert gap < 1e-5, (name, gap)


def assert_same_lines(one, other):
    ours, theirs = lines(one), lines(other)
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
    for line, expected in zip(ours, theirs, strict=True):
        for name, value in expected.items():
            if isinstance(value, float):
                assert line[name] == pytest.approx(value, rel=1e-4, abs=1e-5), (name, expected)
            else:
                assert line[name] == value, (name, expected)


def names(folder):
    """Every file; TensorBoard's have the time and the process in their names."""
    files = (str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    return sorted(name.partition("tfevents")[0] for name in files)


def saved(folder):
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


# -- the same run -------------------------------------------------------------------------------


def test_two_ranks_collect_the_rows_of_one_process(server, model, tmp_path):
    """The last batch is one prompt: a rank has none of it."""
    flags = [*TINY, "--stage", "collect", "--model", model, "--collect-prompts", 49,
             "--num-generations", 8, "--rollout-rows", 8]  # fmt: skip
    for ranks in (1, 2):
        folder = tmp_path / f"{ranks}"
        found = server.run(*flags, "--output-dir", folder, ranks=ranks)
        assert [status for status, _ in found] == [0] * ranks, found
    one, two = tmp_path / "1", tmp_path / "2"
    assert len((one / "collected.jsonl").read_text().splitlines()) > 1
    for name in ("collected.jsonl", "collected.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_two_ranks_are_the_run_of_one_process_with_the_same_batch(one, two):
    """The same completions, since a row keeps its random numbers; the same advantages over the
    whole batch, the same denominators, and so the same weights."""
    folder, _ = two
    assert_same_lines(folder, one)
    assert any(line.get("grad_norm") for line in lines(one) if line["stage"] == "grpo")
    for model in ("sft", "grpo/merged"):
        assert_same_weights(folder, one, model)
    for step in (1, 2, 3):
        ours, theirs = (
            [json.loads(row) for row in (f / "completions" / name).read_text().splitlines()]
            for f, name in ((f, f"grpo-step-00000{step}.jsonl") for f in (folder, one))
        )
        assert len(ours) == 20  # the whole step's
        for row, expected in zip(ours, theirs, strict=True):
            assert row.pop("advantage") == pytest.approx(expected.pop("advantage"), abs=1e-6)
            assert row == expected
    for name in ("start", "after_sft", "after_grpo"):
        answers = [(f / "evaluations" / f"{name}.jsonl").read_text() for f in (folder, one)]
        assert answers[0] == answers[1] and len(answers[0].splitlines()) == 5
    results = [json.loads((f / "results.json").read_text()) for f in (folder, one)]
    assert results[0] == results[1]


def test_two_ranks_write_and_print_once(one, two):
    folder, done = two
    assert names(folder) == names(one)
    assert saved(folder) == [f"{s}-step-00000{n}" for s in ("grpo", "sft") for n in (2, 3)]
    assert done.stdout.count("everything is in") == 1
    assert done.stderr.count("sft: 100%") == 1 and done.stderr.count("\nafter_grpo: ") == 1


def test_one_process_goes_on_from_a_checkpoint_of_two_and_two_from_one_of_one(
    server, one, two, tmp_path
):
    """One checkpoint is enough for any number of ranks: sampling goes on where it was."""
    for begun, ranks in ((two[0], 1), (one, 2)):
        folder = Path(shutil.copytree(begun, tmp_path / begun.name))
        done = server.run("--resume", folder / "checkpoints" / "grpo-step-000002", ranks=ranks)
        assert [status for status, _ in done] == [0] * ranks, done
        assert steps(folder, "grpo") == [1, 2, 3]
        assert_same_weights(folder, one)
        assert_same_lines(folder, one)


ONE_LIVE_GROUP = """
import grpo.loop
def rewards(table, weights, count):
    return [float(i) if rank == 0 and i < 4 else 1.0 for i in range(count)]
grpo.loop.weighted_sum = rewards
"""
TELL_WEIGHTS = """
import grpo.stages, hashlib, os
finish = grpo.stages.finish
def tell(name, this, policy, *rest):
    weights = [p.detach().numpy().tobytes() for p in policy.trainable_parameters().values()]
    os.write(1, f"weights {hashlib.sha256(b''.join(weights)).hexdigest()}\\n".encode())
    finish(name, this, policy, *rest)
grpo.stages.finish = tell
"""


def test_a_rank_without_anything_to_learn_takes_part_in_the_update(server, model, tmp_path):
    """The second rank's groups have no spread, and of one group's micro-batches a rank gets none:
    it must neither stay out of the sum nor leave its weights where they were."""
    for ranks in (1, 2):
        flags = (*GRPO, "--model", model, "--max-steps", 2, "--output-dir", tmp_path / str(ranks))
        done = server.run(*flags, ranks=ranks, before=ONE_LIVE_GROUP + TELL_WEIGHTS)
        assert [status for status, _ in done] == [0] * ranks, done
    weights = [line for _, text in done for line in text.splitlines() if "weights " in line]
    assert len(weights) == 2 and weights[0] == weights[1]  # to the last bit
    assert [line["frac_reward_zero_std"] for line in lines(tmp_path / "2")] == [0.5, 0.5]
    assert all(line["grad_norm"] > 0 for line in lines(tmp_path / "2"))
    assert_same_lines(tmp_path / "2", tmp_path / "1")
    assert_same_weights(tmp_path / "2", tmp_path / "1")


def test_two_ranks_fill_the_same_buffer(server, model, tmp_path):
    """Each judges its own completions; which groups are kept and when it is full is known to all.
    2 prompts a step, of which an update of a full buffer of 3 or 4 leaves a rank one or none."""
    filtered = ("--filter", "accuracy", "--filter-lower", 0, "--filter-upper", 1)
    filtered += ("--buffer-groups", 3, "--buffer-updates", 2)
    filtered += ("--prompts-per-step", 2, "--max-steps", 4)
    for ranks in (1, 2):
        flags = (*GRPO, "--model", model, *filtered, "--output-dir", tmp_path / str(ranks))
        done = server.run(*flags, ranks=ranks, before=TELL_WEIGHTS)
        assert [status for status, _ in done] == [0] * ranks, done
    weights = [line for _, text in done for line in text.splitlines() if "weights " in line]
    assert len(weights) == 2 and weights[0] == weights[1]  # to the last bit
    assert [line["filter/buffer"] for line in lines(tmp_path / "2")] == [2, 0, 2, 0]
    assert_same_lines(tmp_path / "2", tmp_path / "1")
    assert_same_weights(tmp_path / "2", tmp_path / "1")


# -- an end for all -----------------------------------------------------------------------------

# What goes wrong in the second step, on one rank only.
FAILURES = {
    "a reward": ("""
import grpo.loop
from grpo.errors import UserError
score, calls = grpo.loop.score, []
def broken(*args):
    calls.append(1)
    if len(calls) == 2:
        raise UserError("reward 'luck' raised ZeroDivisionError")
    return score(*args)
if rank == 1:
    grpo.loop.score = broken
""", "error: reward 'luck' raised ZeroDivisionError"),
    "the loss": ("""
import grpo.loop
from grpo.training import Training
require_finite = Training.require_finite
def spoilt(self, value, what):
    return require_finite(self, float("nan") if self.step == 1 else value, what)
if rank == 1:
    Training.require_finite = spoilt
""", "error: step 2 of grpo: the loss is nan"),
    "the disk": ("""
from grpo.errors import UserError
from grpo.record import Recorder
def full(self, stage, step, rows):
    if step == 2:
        raise UserError("no space left on the device")
if rank == 0:
    Recorder.completions = full
""", "error: no space left"),
    "a bug": ("""
import grpo.loop
from grpo.training import Training
update = Training.update
def buggy(self):
    if self.step == 1:
        raise ZeroDivisionError("a bug")
    return update(self)
if rank == 1:
    Training.update = buggy
""", "error: rank 1 failed with ZeroDivisionError: a bug"),
}  # fmt: skip


SLOW_DISK = """
import grpo.training, time
save_checkpoint = grpo.training.save_checkpoint
def slow(*args):
    time.sleep(0.3)
    return save_checkpoint(*args)
grpo.training.save_checkpoint = slow
"""


@pytest.mark.parametrize("what", FAILURES)
def test_what_fails_on_one_rank_ends_all_with_one_line_and_the_last_step_saved(
    server, model, tmp_path, what
):
    """The others wait in a sum, for ever, or torchrun kills them before they have saved."""
    before, message = FAILURES[what]
    flags = (*GRPO, "--model", model, "--output-dir", tmp_path / "run", "--completions-every", 1)
    run = server.start(*flags, before=ONE_LIVE_GROUP + SLOW_DISK + before)
    run.status(rank=1)  # the rank that torchrun would kill the first one for
    assert saved(tmp_path / "run") == ["grpo-step-000001"]
    (first, shown), (second, silent) = run.end()
    assert first == 2 and shown.splitlines()[-1].startswith(message), shown
    assert shown.count("error: ") == 1 and "Traceback" not in shown
    if what == "a bug":
        assert second == 1 and "ZeroDivisionError" in silent.splitlines()[-1]
    else:
        assert (second, silent) == (2, "")


def test_a_rank_that_is_killed_leaves_nobody_waiting(server, tmp_path):
    folder = tmp_path / "run"
    run = server.start(*SFT, "--sft-steps", 100_000, "--output-dir", folder)
    run.wait_for(lambda: len(steps(folder, "sft")) >= 3)  # the second is saved
    run.send(signal.SIGKILL, rank=1)
    (first, shown), (second, _) = run.end()
    assert (first, second) == (2, -signal.SIGKILL)
    last = shown.splitlines()[-1]
    assert last.startswith("error: another process") and "--resume" in last, shown


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(server, tmp_path, rank):
    folder = tmp_path / "run"
    flags = (*SFT, "--sft-steps", 100_000, "--checkpoint-every", 0)
    run = server.start(*flags, "--output-dir", folder)
    run.wait_for(lambda: len(steps(folder, "sft")) >= 2)
    run.send(signal.SIGTERM, rank)
    (first, shown), (second, silent) = run.end()
    assert (first, second, silent) == (130, 130, ""), shown
    assert f"to go on: python train.py --resume {folder}" in shown
    assert saved(folder) == [f"sft-step-{steps(folder, 'sft')[-1]:06d}"]


def test_a_signal_to_one_rank_ends_an_evaluation(server, model, tmp_path):
    """Only that rank can leave its part half done; the other one must not wait for its answers."""
    folder = tmp_path / "run"
    slow = """
import grpo.episodes, time
generate = grpo.episodes.generate
def slow(*args, **more):
    print("begun")
    time.sleep(0.5)
    return generate(*args, **more)
grpo.episodes.generate = slow
"""
    run = server.start(*TINY, "--model", model, "--output-dir", folder, before=slow)
    run.wait_for(lambda: "begun" in run.texts()[0])
    run.send(signal.SIGTERM, rank=1)
    (first, shown), (second, _) = run.end()
    assert (first, second) == (130, 130), shown
    assert not (folder / "results.json").exists() and "--resume" in shown


def test_fewer_prompts_than_ranks_are_refused_at_the_start(server, tmp_path):
    for flag in ("--prompts-per-step", "--sft-batch-size"):
        done = server.run(*TINY, flag, 1, "--output-dir", tmp_path / "run")
        assert [status for status, _ in done] == [2, 2] and done[1][1] == ""
        assert done[0][1].startswith(f"error: {flag} 1 ") and "2 processes" in done[0][1]
        assert len(done[0][1].splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("lag", [0, 0.5])
def test_a_mistake_is_told_once_above_what_torchrun_says(tmp_path, lag):
    """It was not told at all where the first process lagged: torchrun had ended it."""
    script = tmp_path / "lags.py"
    script.write_text(
        "import os, runpy, sys, time\n"
        f"time.sleep({lag} if os.environ['RANK'] == '0' else 0)\n"
        f"sys.path.insert(0, {str(REPO)!r})\n"
        f"runpy.run_path({str(REPO / 'train.py')!r}, run_name='__main__')\n"
    )
    done = torchrun("--learning_rte", "1e-5", cwd=tmp_path, script=script)
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1 and "learning_rate" in told[0], done.stderr


# -- the parts ----------------------------------------------------------------------------------


def rank_of(monkeypatch, rank, ranks):
    for name, value in torchrun_variables(ranks)[rank].items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 8, 17])
def test_shares_are_neighbours_even_and_complete(monkeypatch, ranks, count):
    shares = []
    for rank in range(ranks):
        rank_of(monkeypatch, rank, ranks)
        shares.append(list(range(count))[distributed.share(count)])
    assert [i for own in shares for i in own] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_cluster_s_variables_make_no_ranks_without_torchrun(monkeypatch):
    """A job's WORLD_SIZE without a process group: the run would wait for others, silently."""
    rank_of(monkeypatch, 1, 2)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert (distributed.rank(), distributed.world_size(), distributed.is_first()) == (0, 1, True)
    value = object()
    assert distributed.gather(value) == [value]


def test_gradients_are_summed_in_buckets_and_none_stays_none_only_if_it_is_so_everywhere(
    monkeypatch
):
    """AdamW passes over a parameter without a gradient, and decays one whose gradient is 0."""
    rank_of(monkeypatch, 0, 2)
    shapes = [(2, 3), (4,), (3,), (5,), (1,)]
    ours = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    theirs = [torch.randn(shape) for shape in shapes]
    for i in (0, 1, 4):
        ours[i].grad = torch.randn(shapes[i])
    ours[0].grad = ours[0].grad.T.contiguous().T  # as a transposed product leaves it
    expected = [theirs[i] + (0 if p.grad is None else p.grad) for i, p in enumerate(ours)]
    used_there = [True, True, True, False, True]
    calls = []

    def all_reduce(flat):
        others = torch.cat([t.flatten() for t, u in zip(theirs, used_there, strict=True) if u])
        done = sum(calls)
        flat += others[done : done + len(flat)]
        calls.append(len(flat))

    monkeypatch.setattr(distributed, "gather", lambda flags: [flags, used_there])
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(distributed, "BUCKET", 8)
    distributed.sum_gradients(ours)
    assert ours[3].grad is None
    for i in (0, 1, 2, 4):
        assert torch.equal(ours[i].grad, expected[i])
    assert calls == [6, 8]


def test_the_samples_of_an_evaluation_do_not_depend_on_the_number_of_ranks(monkeypatch):
    task = letters_task(None, list("abcde"), is_correct=lambda text, example: len(text) > 1)
    policy = tiny_policy(initializer_range=0.1)

    def judge():
        return evaluate(policy, task, task.evaluation, max_new_tokens=4, prompt_format="chat",
                        max_rows=8, samples=8, seed=3)  # fmt: skip

    answers = judge().answers
    whole = [tuple(vars(answer).values())[1:] for answer in answers]  # all but the example
    assert len({a.samples_correct for a in answers}) > 2  # else any random numbers would do
    found = []

    def gather(answers):
        found.extend(answers)
        return [whole]

    monkeypatch.setattr(grpo.interrupt, "gather", gather)
    for rank in (0, 1):
        rank_of(monkeypatch, rank, 2)
        judge()
    assert found == whole


def test_each_rank_has_a_gpu_and_a_part_of_the_cores(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == torch.device("cuda")
    rank_of(monkeypatch, 1, 2)
    assert pick_device("auto") == torch.device("cuda", 1)
    assert pick_device("cpu") == torch.device("cpu")
    assert default_threads() == max(1, physical_cores() // 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="--nproc-per-node 2.* GPU of its own, and 1 can be seen"):
        pick_device("cuda")
