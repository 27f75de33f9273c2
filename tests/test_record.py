"""The run directory: nothing lost, nothing twice, nothing overwritten."""

import errno
import io
import json
import math
import os
from types import SimpleNamespace

import pytest

import grpo.record as record
from grpo.curves import smoothed
from grpo.errors import UserError
from grpo.record import Progress, Recorder, check_output


@pytest.fixture
def board(monkeypatch):
    """TensorBoard with its scalars in a list: importing the real one takes seconds."""
    calls = []

    def writer(folder, purge_step):
        calls.append(("open", os.path.basename(folder), purge_step))
        return SimpleNamespace(
            add_scalar=lambda name, value, step: calls.append((name, value, step)),
            close=lambda: calls.append(("closed",)),
        )

    monkeypatch.setattr(record, "_summary_writer", writer)
    return calls


def start(folder, resume=False, **keywords):
    return Recorder(folder, '{"saved": true}', resume=resume, **keywords)


def read_lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# -- at the start -------------------------------------------------------------------------------


def test_an_output_path_that_is_a_file_is_found_before_training(tmp_path):
    (tmp_path / "run").write_text("mine")  # settings/output-not-writable
    with pytest.raises(UserError, match="output.*ordinary file"):
        start(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"


def test_an_output_folder_that_cannot_be_made_or_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="output.*file/run"):
        start(tmp_path / "file" / "run")

    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(record.Path, "write_text", denied)  # root may write anywhere
    with pytest.raises(UserError, match="output.*Permission denied"):
        start(tmp_path / "run")


def test_a_disk_that_is_too_small_for_the_run_is_found_at_the_start(tmp_path):
    with pytest.raises(UserError, match="output.*too little space.*--keep-checkpoints"):
        check_output(tmp_path / "run", resume=False, needed_bytes=10**18)


def test_a_fresh_run_never_mixes_with_an_old_one(tmp_path, board):
    start(tmp_path / "run").close()
    with pytest.raises(UserError, match="holds a run.*--resume"):
        start(tmp_path / "run")
    start(tmp_path / "run", resume=True).close()
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"saved": True}


# -- metrics ------------------------------------------------------------------------------------


def test_metrics_are_a_line_a_step_in_the_file_and_in_tensorboard(tmp_path, board):
    with start(tmp_path / "run") as recorder:
        recorder.metrics("sft", 1, {"loss": 2.0})
        recorder.metrics("grpo", 1, {"reward": 0.5, "kl": float("nan")})
    assert read_lines(tmp_path / "run") == [
        {"stage": "sft", "step": 1, "loss": 2.0},
        {"stage": "grpo", "step": 1, "reward": 0.5, "kl": None},
    ]
    assert ("open", "sft", None) in board and ("reward", 0.5, 1) in board


def test_a_resume_repeats_no_line(tmp_path, board):
    folder = tmp_path / "run"
    with start(folder) as recorder:
        for stage in ("sft", "grpo"):
            for step in (1, 2, 3, 4):
                recorder.metrics(stage, step, {"loss": float(step)})
    with open(folder / "metrics.jsonl", "a") as f:
        f.write('{"stage": "grpo", "st')  # killed while a line was written
    (folder / "tensorboard" / "grpo").mkdir(parents=True)
    with start(folder, resume=True, resume_at=("grpo", 2)) as recorder:
        recorder.metrics("grpo", 3, {"loss": 3.0})
    steps = [(line["stage"], line["step"]) for line in read_lines(folder)]
    assert steps == [("sft", s) for s in (1, 2, 3, 4)] + [("grpo", s) for s in (1, 2, 3)]
    assert ("open", "grpo", 3) in board  # TensorBoard hides what it has from step 3 on


def test_going_back_to_sft_drops_the_lines_of_grpo(tmp_path, board):
    folder = tmp_path / "run"
    with start(folder) as recorder:
        for stage in ("sft", "grpo"):
            recorder.metrics(stage, 1, {})
            recorder.metrics(stage, 2, {})
    start(folder, resume=True, resume_at=("sft", 1)).close()
    assert [(line["stage"], line["step"]) for line in read_lines(folder)] == [("sft", 1)]
    start(folder, resume=True).close()  # killed before its first checkpoint
    assert read_lines(folder) == []


def test_a_resume_with_nothing_to_do_changes_no_file(tmp_path, board):
    folder = tmp_path / "run"  # checkpoint/already-finished
    with start(folder) as recorder:
        recorder.metrics("grpo", 2, {"loss": 1.0})
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.glob("*.*")}
    start(folder, resume=True, resume_at=("grpo", 2)).close()
    assert before == {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.glob("*.*")}


@pytest.mark.parametrize("fault", ["refused", "torn"])
def test_a_full_disk_leaves_whole_lines(tmp_path, board, monkeypatch, fault):
    write = os.write  # checkpoint/log-disk-full

    def full(handle, line):
        if fault == "refused":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, line[: len(line) // 2])

    recorder = start(tmp_path / "run")
    recorder.metrics("grpo", 1, {"reward": 1.0})
    monkeypatch.setattr(record.os, "write", full)
    with pytest.raises(UserError, match="no space left"):
        recorder.metrics("grpo", 2, {"reward": 1.0})
    monkeypatch.undo()
    recorder.close()
    assert (tmp_path / "run" / "metrics.jsonl").read_text().endswith('"reward": 1.0}\n')
    assert len(read_lines(tmp_path / "run")) == 1


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_tensorboard_finds_the_disk_full_only_when_it_is_closed(tmp_path, board, monkeypatch):
    recorder = start(tmp_path / "run")  # ended with a traceback instead of a line
    recorder.metrics("sft", 1, {"loss": 1.0})
    recorder.metrics("grpo", 1, {"loss": 1.0})
    boards = list(recorder._boards.values())
    boards[0].close = full_disk
    with pytest.raises(UserError, match="tensorboard: no space left"):
        recorder.close()
    assert board[-1] == ("closed",), "the other writer was left open"
    recorder.close()  # nothing is left to close


def test_a_disk_full_at_the_end_does_not_hide_the_first_failure(tmp_path, board):
    with pytest.raises(ValueError, match="the first"), start(tmp_path / "run") as recorder:
        recorder.metrics("sft", 1, {"loss": 1.0})
        recorder._boards["sft"].close = full_disk
        raise ValueError("the first")


def test_real_tensorboard_events_are_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with start(tmp_path / "run") as recorder:
        recorder.metrics("grpo", 1, {"reward": 0.25})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "grpo"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.25)]


# -- completions, results -----------------------------------------------------------------------


def test_completions_are_never_overwritten_and_survive_half_a_surrogate_pair(tmp_path):
    rows = [{"prompt": "p", "completion": "goto \ud800", "reward": 0.5}]
    with start(tmp_path / "run") as recorder:
        first = recorder.completions("grpo", 123, rows)
        assert first.name == "grpo-step-000123.jsonl"
        assert recorder.completions("grpo", 123, rows) == first  # done again: the same bytes
        other = recorder.completions("grpo", 123, [{"completion": "other"}])
        third = recorder.completions("grpo", 123, [{"completion": "third"}])
    assert [other.name, third.name] == ["grpo-step-000123.2.jsonl", "grpo-step-000123.3.jsonl"]
    assert json.loads(first.read_text()) == rows[0]
    assert len(list(first.parent.iterdir())) == 3


def test_results_keep_their_other_entries(tmp_path):
    with start(tmp_path / "run") as recorder:
        recorder.result("start", {"accuracy": 0.1})
        recorder.result("sft", {"accuracy": 0.6})
        recorder.result("sft", {"accuracy": 0.7})
        path = tmp_path / "run" / "results.json"
        assert json.loads(path.read_text()) == {
            "start": {"accuracy": 0.1},
            "sft": {"accuracy": 0.7},
        }
        path.write_text("broken")
        with pytest.raises(UserError, match=r"results\.json"):
            recorder.result("grpo", {})
    assert path.read_text() == "broken"


# -- what is seen -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metrics", "first"),
    [
        (
            {"loss": 0.0, "kl": 0.01, "grad_norm": 0.5, "reward": 1.25, "step_time": 2.0},
            "reward 1.25, grad_norm 0.5, kl 0.01",
        ),
        ({"grad_norm": 1.0, "loss": 2.5}, "loss 2.5, grad_norm 1"),
        # a step without anything to learn from
        ({"kl": math.nan, "grad_norm": 0.0, "reward": 1.0, "step_time": 2.0},
         "reward 1, grad_norm 0, step_time 2"),
    ],
)
def test_the_bar_shows_reward_and_grad_norm_first(metrics, first):
    screen = io.StringIO()
    with Progress("grpo", total=10, initial=4, file=screen) as bar:
        bar.step(metrics)
        bar.say("warning: something")
    assert "5/10" in screen.getvalue() and first in screen.getvalue()
    assert "warning: something\n" in screen.getvalue()


def test_curves_are_drawn_from_whatever_was_recorded(tmp_path, board):
    with start(tmp_path / "run") as recorder:
        path = recorder.curves()  # of nothing at all
        empty = path.read_bytes()
        for step in (1, 2, 3):
            recorder.metrics("sft", step, {"loss": 3.0 - step})
            recorder.metrics("grpo", step, {"reward": float(step), "kl": float("inf")})
            recorder.metrics("grpo", step, {"entropy": math.nan if step < 3 else 1.0})
            recorder.metrics("grpo", step, {"eval/accuracy": step / 4})
        recorder.curves("a title")
    assert path.read_bytes().startswith(b"\x89PNG") and path.read_bytes() != empty
    assert not list(path.parent.glob(".*"))


def test_the_trend_has_the_mean_of_each_window():
    assert smoothed([0, 3, 0, 3], 3) == [1.5, 1.0, 2.0, 1.5]
    assert smoothed([5.0], 3) == [5.0] and smoothed([1, 2], 1) == [1.0, 2.0]
