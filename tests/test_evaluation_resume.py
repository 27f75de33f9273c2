"""An evaluation that was stopped or killed goes on, and ends as if nothing had happened."""

import signal
from pathlib import Path

import pytest
import torch
from test_distributed import Server
from tiny import letters_task, tiny_policy

import grpo.evaluate
import train
from grpo.answers import UnfinishedAnswers, files_digest, weights_digest
from grpo.evaluate import evaluate
from grpo.interrupt import Stopped

TASK = letters_task(
    len,
    prompts=("a", "bc", "d", "ef", "g"),
    is_correct=lambda text, example: len(text) > 3,
    is_correct_lenient=lambda text, example: len(text) > 1,
)
SETTINGS = {"step": 3, "model": "1f"}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(grpo.evaluate, "FULL_BATCHES", 1)


def judge(policy, begun=None, on_finish=lambda rows: None):
    return evaluate(
        policy, TASK, TASK.evaluation, max_new_tokens=6, prompt_format="chat", max_rows=2,
        samples=3, seed=1, on_finish=on_finish,
        **({"done": begun.done, "on_answers": begun.add} if begun else {}),
    )  # fmt: skip


def unfinished(path, settings=SETTINGS, examples=TASK.evaluation):
    return UnfinishedAnswers(path / "start.jsonl.partial", examples, lambda: settings)


@pytest.fixture
def policy():
    return tiny_policy(stop=[2, 5, 9], initializer_range=0.1)


@pytest.fixture
def stopped(policy, tmp_path):
    """Folder of an evaluation that was stopped in its second chunk, with one chunk finished."""
    rows = []

    def on_finish(finished):
        rows.append(finished)
        if len(rows) > 2 * (1 + 3):
            raise Stopped

    with pytest.raises(Stopped):
        judge(policy, unfinished(tmp_path), on_finish)
    return tmp_path


def test_what_was_finished_before_a_stop_is_not_computed_again(policy, stopped):
    whole, rows = judge(policy), []
    assert len({a.samples_correct_lenient for a in whole.answers}) > 1  # else anything would do
    begun = unfinished(stopped)
    assert begun.done == whole.answers[:2]
    found = judge(policy, begun, rows.append)
    assert sum(rows) == 3 * (1 + 3)
    assert found.answers == whole.answers and found.summary() == whole.summary()
    assert unfinished(stopped).done == whole.answers  # killed just before results.json was written


@pytest.mark.parametrize("change", [{"step": 4}, {"model": "2f"}, {"temperature": 0.5}])
def test_answers_of_another_model_or_of_other_settings_are_not_taken_over(stopped, change):
    assert unfinished(stopped, {**SETTINGS, **change}).done == []
    assert unfinished(stopped).done == [], "the file is that of the new settings now"


def test_answers_to_other_questions_are_not_taken_over(stopped):
    first, second, *rest = TASK.evaluation
    assert len(unfinished(stopped, examples=[first, *rest]).done) == 1
    assert unfinished(stopped, examples=[second, first, *rest]).done == []


@pytest.mark.parametrize("torn", ['{"index": 2, "pro', '{"index": 2}\n', "\0\0\n", "7\n"])
def test_a_line_torn_by_a_kill_goes_and_what_follows_stands_on_a_line_of_its_own(
    policy, stopped, torn
):
    with open(stopped / "start.jsonl.partial", "a") as file:
        file.write(torn)
    begun = unfinished(stopped)
    assert len(begun.done) == 2
    judge(policy, begun)
    assert len(unfinished(stopped).done) == 5


def test_a_whole_row_without_its_line_break_is_computed_again(policy, stopped):
    """Taken over as it is, the next row would be on the same line and both would be lost."""
    path = stopped / "start.jsonl.partial"
    path.write_text(path.read_text().rstrip("\n"))
    begun = unfinished(stopped)
    assert len(begun.done) == 1
    judge(policy, begun)
    assert len(unfinished(stopped).done) == 5


def test_a_digest_knows_every_weight(policy, saved_model):
    before, folder = weights_digest(policy.model), Path(saved_model())
    saved = files_digest(folder)
    with torch.no_grad():
        list(policy.model.parameters())[-1].view(-1)[-1] += 1
    assert weights_digest(policy.model) != before
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    assert files_digest(folder) != saved


# ---- whole runs ----------------------------------------------------------------------------------

TEXT = """--task maze --device cpu --threads 1 --scratch-hidden-size 16 --scratch-layers 1
    --scratch-heads 2 --maze-train 50 --maze-sft 50 --eval-examples 6 --eval-samples 2 --sft-steps 2
    --sft-batch-size 4 --sft-learning-rate 0.02 --max-steps 1 --prompts-per-step 2 --lora-rank 2
    --num-generations 2 --rollout-rows 2 --checkpoint-every 1"""
FLAGS = TEXT.split()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    assert train.main([*FLAGS, "--output-dir", str(folder)]) == 0
    return folder


def stop_after(monkeypatch, chunks):
    """Have SIGTERM come after so many chunks of all evaluations; each has three."""
    add, calls = UnfinishedAnswers.add, []

    def add_and_stop(self, answers):
        add(self, answers)
        calls.append(answers)
        if len(calls) == chunks:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(UnfinishedAnswers, "add", add_and_stop)


@pytest.mark.parametrize("name, chunks", [("start", 1), ("after_sft", 5), ("after_grpo", 8)])
def test_a_stopped_run_goes_on_in_the_middle_of_its_evaluation(
    whole, tmp_path, monkeypatch, capfd, name, chunks
):
    """The model of a stage is read back from its files, its adapter merged, and is the same."""
    stop_after(monkeypatch, chunks)
    assert train.main([*FLAGS, "--output-dir", str(tmp_path)]) == 130
    assert (tmp_path / "evaluations" / f"{name}.jsonl.partial").exists()
    capfd.readouterr()
    assert train.main(["--resume", str(tmp_path)]) == 0
    assert f"eval {name}: {2 * (chunks % 3)} answers were there already" in capfd.readouterr().err
    files = sorted(p.name for p in (whole / "evaluations").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "evaluations").iterdir())
    for file in [*(f"evaluations/{n}" for n in files), "results.json"]:
        assert (tmp_path / file).read_bytes() == (whole / file).read_bytes(), file


def test_a_stage_that_is_done_otherwise_gets_answers_of_its_own(
    whole, tmp_path, monkeypatch, capfd
):
    stop_after(monkeypatch, 5)
    assert train.main([*FLAGS, "--output-dir", str(tmp_path)]) == 130
    partial = tmp_path / "evaluations" / "after_sft.jsonl.partial"
    assert len(partial.read_text().splitlines()) == 1 + 4
    capfd.readouterr()
    earlier = tmp_path / "checkpoints" / "sft-step-000001"
    assert train.main(["--resume", str(earlier), "--sft-learning-rate", "0.5"]) == 0
    assert "were there already" not in capfd.readouterr().err


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_ranks_stop_and_any_number_goes_on(server, whole, tmp_path, ranks):
    """The stop comes to the second rank alone, which does not write."""
    stop = """
import grpo.answers, grpo.evaluate, signal
grpo.evaluate.FULL_BATCHES = 1
add = grpo.answers.UnfinishedAnswers.add
def add_and_stop(self, answers):
    add(self, answers)
    if rank == 1:
        signal.raise_signal(signal.SIGTERM)
grpo.answers.UnfinishedAnswers.add = add_and_stop
"""
    folder = tmp_path / "run"
    flags = [*FLAGS, "--rollout-rows", 1, "--output-dir", folder]
    done = server.run(*flags, before=stop)
    assert [status for status, _ in done] == [130, 130], done
    done = server.run("--resume", folder, ranks=ranks)
    assert [status for status, _ in done] == [0] * ranks, done
    assert "eval start: 2 answers were there already" in done[0][1]
    answers = [(f / "evaluations" / "start.jsonl").read_text() for f in (folder, whole)]
    assert answers[0] == answers[1]
