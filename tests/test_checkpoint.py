"""Checkpoints: the damage that they meet, and that nothing saved before is lost.

The names in the comments are those of tests/cases/robustness_cases.json.
"""

import errno
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import grpo.checkpoint as checkpoint
from grpo.checkpoint import (
    find_checkpoint,
    load_checkpoint,
    load_into,
    random_state,
    restore_random_state,
    save_checkpoint,
)
from grpo.errors import UserError


def tensors(value=1.0, width=4):
    model = {f"layer.{i}.weight": torch.full((width, 3), value + i) for i in range(4)}
    return {"model": model, "optimizer": {"a.exp_avg": torch.full((5,), value)}}


def save(run, step, stage="grpo", keep=2, value=None):
    value = float(step) if value is None else value
    return save_checkpoint(run, stage, step, tensors(value), {"epoch": step}, keep)


def names(run):
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def refused(path):
    with pytest.raises(UserError) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- save, find, load ---------------------------------------------------------------------------


def test_what_is_loaded_is_what_was_saved_bit_for_bit(tmp_path):
    shared = torch.arange(6.0)
    saved = {
        "model": {"bf16": torch.tensor([1e-3], dtype=torch.bfloat16), "t": shared.view(2, 3).T},
        "optimizer": {"step": torch.tensor(7), "u8": torch.tensor([255], dtype=torch.uint8),
                      "same": shared, "empty": torch.zeros(0)},
        "nothing": {},
    }  # fmt: skip
    saved["optimizer"]["tied"] = saved["optimizer"]["same"]
    path = save_checkpoint(tmp_path, "sft", 100, saved, {"seen": [1, 2]}, keep=1)
    assert path == tmp_path / "checkpoints" / "sft-step-000100"
    loaded, state = load_checkpoint(path)
    assert state == {"stage": "sft", "step": 100, "seen": [1, 2]}
    assert set(loaded) == set(saved)
    for stem, group in saved.items():
        assert set(loaded[stem]) == set(group)
        for name, tensor in group.items():
            assert loaded[stem][name].dtype == tensor.dtype
            assert torch.equal(loaded[stem][name], tensor)


def test_old_checkpoints_of_the_stage_go_and_those_of_the_other_stay(tmp_path):
    save(tmp_path, 10, stage="sft")
    for step in (2, 4, 6, 1_000_000):
        save(tmp_path, step)
    assert names(tmp_path) == ["grpo-step-000006", "grpo-step-1000000", "sft-step-000010"]
    save(tmp_path, 1_000_001, keep=0)  # never none at all
    assert names(tmp_path) == ["grpo-step-1000001", "sft-step-000010"]


def test_the_newest_is_by_stage_and_number_not_by_name_or_date(tmp_path):
    assert find_checkpoint(tmp_path) == (None, [])
    for step in (999_999, 1_000_000):
        save(tmp_path, step)
    sft = save(tmp_path, 2_000_000, stage="sft", keep=9)
    # SFT comes first in a run: starting it anew sets the later GRPO aside.
    assert find_checkpoint(tmp_path)[0] == sft
    newest = save(tmp_path, 1)
    assert find_checkpoint(tmp_path)[0] == newest
    assert find_checkpoint(newest) == (newest, [])


def test_going_back_to_an_older_checkpoint_loses_nothing_and_wins(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step, keep=9)
    later = files(tmp_path / "checkpoints" / "grpo-step-000006")
    new = save(tmp_path, 4, keep=9, value=9.0)  # gone on from step 2
    path, notes = find_checkpoint(tmp_path)
    assert path == new
    assert load_checkpoint(path)[0]["optimizer"]["a.exp_avg"][0] == 9.0
    assert "abandoned" in notes[0] and len(notes) == 2
    assert files(tmp_path / "checkpoints" / ".set-aside-grpo-step-000006") == later


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        find_checkpoint(tmp_path / "nowhere")


# -- killed -------------------------------------------------------------------------------------

SAVE_AND_DIE = """
import os, signal, sys
import torch
import grpo.checkpoint as checkpoint

group = {"w": torch.full((100,), 2.0)}

def save_and_die(run, fatal):
    count = 0
    def counted(function):
        def call(*arguments, **keywords):
            nonlocal count
            count += 1
            if count == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)
        return call
    checkpoint.save_file = counted(checkpoint.save_file)
    checkpoint._sync = counted(checkpoint._sync)
    checkpoint.os.rename = counted(os.rename)
    checkpoint.shutil.rmtree = counted(checkpoint.shutil.rmtree)
    checkpoint.save_checkpoint(run, "grpo", 2, {"model": group, "optimizer": group}, {}, keep=1)

for run in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        save_and_die(run, int(os.path.basename(run)))
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_killed_at_any_moment_there_is_a_whole_checkpoint(tmp_path):
    """checkpoint/killed-while-saving, at each of the operations of a save in turn."""
    runs = {fatal: tmp_path / str(fatal) for fatal in range(2, 14)}
    before = {fatal: files(save(run, 1, keep=1)) for fatal, run in runs.items()}
    subprocess.run([sys.executable, "-c", SAVE_AND_DIE, *map(str, runs.values())],
                   cwd=Path(__file__).parent.parent, check=True)  # fmt: skip
    steps, noted = {}, {}
    for fatal, run in runs.items():
        path, notes = find_checkpoint(run)
        steps[fatal], noted[fatal] = load_checkpoint(path)[1]["step"], "incomplete" in str(notes)
        if steps[fatal] == 1:
            assert files(path) == before[fatal]
    # 2 to 5 write and sync two files; 6 and 7 sync state.json and the folder; 8 renames; 9 syncs;
    # 10 to 12 delete the checkpoint before; 13 never comes. From 6 on all bytes are written.
    assert steps == {fatal: 1 if fatal < 6 else 2 for fatal in runs}
    assert all(noted[fatal] for fatal in (2, 3, 4, 5))


def test_an_incomplete_folder_is_passed_over_with_a_note_and_cleared_by_the_next_save(tmp_path):
    whole = save(tmp_path, 2)
    torn = save(tmp_path, 4)
    torn.rename(torn.with_name(".writing-grpo-step-000004"))
    (torn.with_name(".writing-grpo-step-000004") / "model.safetensors").unlink()
    path, notes = find_checkpoint(tmp_path)
    assert path == whole and "incomplete" in notes[0] and "grpo-step-000004" in notes[0]
    save(tmp_path, 4)
    assert names(tmp_path) == ["grpo-step-000002", "grpo-step-000004"]


def test_a_folder_without_its_state_is_passed_over(tmp_path):
    whole, torn = save(tmp_path, 2), save(tmp_path, 4)
    (torn / "state.json").unlink()
    path, notes = find_checkpoint(tmp_path)
    assert path == whole and "state.json" in notes[0]


# -- no space -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch, error):
    first = save(tmp_path, 1)  # checkpoint/disk-full
    before = files(first)

    def full(group, path):
        Path(path).write_bytes(b"half")
        if "optimizer" in str(path):
            raise error

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UserError, match="no space left") as caught:
        save(tmp_path, 2)
    assert str(first) in str(caught.value) and "\n" not in str(caught.value)
    assert names(tmp_path) == ["grpo-step-000001"] and files(first) == before
    load_checkpoint(first)


def test_a_folder_that_cannot_be_written_says_why(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot be written"):
        save(tmp_path, 1)


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    first = save(tmp_path, 1)  # training/loss-not-finite
    with pytest.raises(UserError, match=r"step 2.*layer\.0\.weight.*NaN"):
        save(tmp_path, 2, value=float("nan"))
    assert names(tmp_path) == [first.name]


# -- damaged ------------------------------------------------------------------------------------


def test_a_weight_file_cut_in_half(tmp_path):
    first, second = save(tmp_path, 1), save(tmp_path, 2)  # checkpoint/cut-in-half
    before = files(first)
    weights = second / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    message = refused(second)
    assert str(weights) in message and f"--resume {first}" in message
    assert files(first) == before
    load_checkpoint(first)


@pytest.mark.parametrize("content", [b"", b"abc"])
def test_a_weight_file_of_no_bytes(tmp_path, content):
    path = save(tmp_path, 1)  # checkpoint/zero-bytes
    (path / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refused(path)


@pytest.mark.parametrize("start", [b"\xff" * 7 + b"\x7f", b"\x00\x00\x00\x00\x01" + bytes(3)])
def test_a_header_that_claims_to_be_enormous(tmp_path, monkeypatch, start):
    path = save(tmp_path, 1)  # checkpoint/broken-header
    weights = path / "model.safetensors"
    weights.write_bytes(start + weights.read_bytes()[8:])
    monkeypatch.setattr(checkpoint, "load_file", lambda path: pytest.fail("it was believed"))
    message = refused(path)
    assert "model.safetensors" in message and "header" in message


@pytest.mark.parametrize("header", [b"not JSON", b"[]", b'{"w": 3}', b'{"w": {"shape": [1]}}'])
def test_a_header_that_is_none(tmp_path, header):
    path = save(tmp_path, 1)
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "model.safetensors" in refused(path)


def test_a_missing_file_is_named(tmp_path):
    path = save(tmp_path, 1)  # checkpoint/missing-part
    (path / "optimizer.safetensors").unlink()
    message = refused(path)
    assert "optimizer.safetensors" in message and "missing" in message
    assert "no checkpoint before it" in message


def test_half_the_tensors_are_not_taken_for_all(tmp_path):
    path = save(tmp_path, 1)  # checkpoint/half-the-keys
    weights = path / "model.safetensors"
    save_file(dict(list(load_file(weights).items())[::2]), weights)
    message = refused(path)
    assert "missing" in message and "2 of 4" in message and "model.safetensors" in message


def test_nan_in_a_tensor_is_named(tmp_path):
    path = save(tmp_path, 1)  # checkpoint/nan-weights
    weights = path / "model.safetensors"
    group = load_file(weights)
    group["layer.2.weight"][0, 0] = float("nan")
    save_file(group, weights)
    message = refused(path)
    assert "NaN" in message and "layer.2.weight" in message


def test_a_single_flipped_bit_is_noticed(tmp_path):
    path = save(tmp_path, 1)
    weights = path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    assert "hash" in refused(path)


class Marker:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_state_file_cannot_run_code(tmp_path):
    path = save(tmp_path, 1)  # checkpoint/code-in-a-pickle
    (path / "state.json").write_bytes(pickle.dumps(Marker(tmp_path / "marker")))
    assert "state.json" in refused(path)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "null", '{"format": 99}', "[" * 100_000,
                '{"format": 1, "stage": "grpo", "step": 1, "files": {"a": 3}, "state": {}}'],
)  # fmt: skip
def test_a_state_file_of_something_else_is_named(tmp_path, content):
    path = save(tmp_path, 1)
    (path / "state.json").write_text(content)
    assert "state.json" in refused(path)


def test_the_state_lists_each_file_so_that_others_can_check_it(tmp_path):
    about = json.loads((save(tmp_path, 1) / "state.json").read_text())
    assert about["format"] == 1 and about["step"] == 1
    assert about["files"]["model.safetensors"]["tensors"] == [f"layer.{i}.weight" for i in range(4)]
    assert re.fullmatch("[0-9a-f]{64}", about["files"]["optimizer.safetensors"]["sha256"])


# -- into a model -------------------------------------------------------------------------------


def parameters(width=4):
    group = tensors(1.0, width)["model"]
    return {name: torch.nn.Parameter(torch.zeros_like(t)) for name, t in group.items()}


def test_load_into_copies_all_tensors_or_none():
    into = parameters()
    load_into(into, tensors(1.0)["model"], "here")
    assert into["layer.3.weight"][0, 0] == 4.0 and into["layer.3.weight"].requires_grad

    into = parameters()
    with pytest.raises(UserError, match="here.*layer.3.weight is missing"):
        load_into(into, dict(list(tensors()["model"].items())[:3]), "here")
    with pytest.raises(UserError, match="extra is not in this model"):
        load_into(into, tensors()["model"] | {"extra": torch.zeros(1)}, "here")
    assert all((p == 0).all() for p in into.values())


def test_a_model_of_another_width_is_refused_with_both_widths():
    with pytest.raises(UserError, match=r"layer\.0\.weight.*16.*32"):  # checkpoint/other-model
        load_into(parameters(width=32), tensors(1.0, width=16)["model"], "here")


# -- random generators --------------------------------------------------------------------------


def test_generators_go_on_where_they_were(tmp_path):
    generators = {"sampling": torch.Generator().manual_seed(3)}
    torch.rand(5, generator=generators["sampling"])
    path = save_checkpoint(tmp_path, "grpo", 1, {}, {"random": random_state(generators)}, keep=1)
    expected = torch.rand(5, generator=generators["sampling"])
    fresh = {"sampling": torch.Generator()}
    restore_random_state(fresh, load_checkpoint(path)[1]["random"])
    assert torch.equal(torch.rand(5, generator=fresh["sampling"]), expected)


@pytest.mark.parametrize("saved", [{}, {"sampling": "AAAA"}, {"sampling": [1, 2]}])
def test_a_generator_without_its_state_is_named(saved):
    with pytest.raises(UserError, match="sampling"):
        restore_random_state({"sampling": torch.Generator()}, saved)
