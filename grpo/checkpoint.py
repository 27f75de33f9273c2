"""Checkpoints: whole or not there, and checked to the last byte before they are used.

A checkpoint is a folder checkpoints/<stage>-step-000100/ of safetensors files and a state.json.
It is written under another name, state.json last, and renamed when everything is on the disk: a
kill at any moment leaves the one before. state.json lists each file's size, hash and tensors.
There is no pickle: loading a checkpoint can run no code.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo.errors import UserError

FORMAT = 1
STAGES = ("sft", "grpo")  # in the order in which a run goes through them
STATE_FILE = "state.json"
WRITING, SET_ASIDE = ".writing-", ".set-aside-"
_NAME = re.compile(r"(?P<stage>[a-z]+)-step-(?P<step>\d{6,})")


def position(stage: str, step: int) -> tuple[int, int]:
    """Where in a run this is: sorts by stage, then by step."""
    return (STAGES.index(stage), step) if stage in STAGES else (-1, step)


def folder_position(folder: Path) -> tuple[int, int] | None:
    """The position that a checkpoint's name tells; None for any other name."""
    match = _NAME.fullmatch(folder.name)
    return position(match["stage"], int(match["step"])) if match else None


# ---------------------------------------------------------------------------------------------
# Save


def save_checkpoint(
    run_dir: str | Path,
    stage: str,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write one checkpoint, then delete the oldest ones of its stage beyond `keep` (1 or more).

    tensors: {"model": {name: tensor}, "optimizer": ...}, a safetensors file each; all finite.
    state: anything that JSON holds (counters, the data order, random_state(...)).
    Returns the folder. Raises UserError if the disk is full or a tensor is not finite; what was
    saved before is intact then, and nothing half-written stays behind.
    """
    for stem, group in tensors.items():
        _check_finite(group, f"step {step} of {stage}: nothing was saved: {stem}")
    folder = Path(run_dir) / "checkpoints"
    name = f"{stage}-step-{step:06d}"
    writing, final = folder / (WRITING + name), folder / name
    try:
        shutil.rmtree(writing, ignore_errors=True)  # of a run that was killed here
        writing.mkdir(parents=True)
        _write_files(writing, stage, step, tensors, state)
        set_aside_from(run_dir, position(stage, step))
        os.rename(writing, final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(writing, ignore_errors=True)
        before = find_checkpoint(run_dir)[0]
        kept = f"{before} is intact; --resume goes on from it" if before else "none was saved yet"
        raise UserError(f"{final}: {_disk_problem(error)}; of the checkpoints, {kept}") from error
    with contextlib.suppress(OSError):  # an old folder that stays is no reason to stop
        _delete_old(folder, stage, max(keep, 1))
    return final


def _write_files(
    folder: Path,
    stage: str,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
) -> None:
    files = {}
    for stem, group in tensors.items():
        path = folder / f"{stem}.safetensors"
        save_file(_storable(group), path)
        _sync(path)
        files[path.name] = {
            "bytes": path.stat().st_size,
            "sha256": _sha256(path),
            "tensors": sorted(group),
        }
    about = {"format": FORMAT, "stage": stage, "step": step, "files": files, "state": dict(state)}
    with open(folder / STATE_FILE, "w", encoding="utf-8") as f:
        json.dump(about, f, indent=1)
    _sync(folder / STATE_FILE)
    _sync(folder)


def _storable(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors of which no two share memory, as safetensors wants them."""
    seen: set[int] = set()
    ready = {}
    for name, tensor in group.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        ready[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return ready


def set_aside_from(run_dir: str | Path, here: tuple[int, int]) -> None:
    """Whoever goes back to an older checkpoint leaves those from `here` on: they are not newest.

    They are renamed, not deleted: nothing that was saved is lost.
    """
    folder = Path(run_dir) / "checkpoints"
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        there = folder_position(path)
        if there is not None and there >= here:
            aside = folder / (SET_ASIDE + path.name)
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)


def _delete_old(folder: Path, stage: str, keep: int) -> None:
    own = [p for p in folder.iterdir() if p.name.startswith(f"{stage}-") and folder_position(p)]
    own.sort(key=folder_position)
    for path in own[:-keep]:
        # Renamed first, so that a kill while deleting leaves nothing that looks whole.
        doomed = folder / (WRITING + path.name)
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        (doomed / STATE_FILE).unlink(missing_ok=True)
        shutil.rmtree(doomed, ignore_errors=True)


def _sync(path: Path) -> None:
    """Have the file, or the folder's list of names, on the disk before going on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _disk_problem(error: Exception) -> str:
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    # The safetensors writer reports the system's error as text only.
    if full or "os error 28" in str(error) or "No space left" in str(error):
        return "no space left on the device for this checkpoint; free some"
    return f"the checkpoint cannot be written ({error})"


# ---------------------------------------------------------------------------------------------
# Find


def find_checkpoint(run_dir: str | Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run, and notes on what was passed over.

    run_dir may also be a checkpoint's own folder: then it is that one. Raises UserError if there
    is no such folder.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: there is no such folder to resume from")
    if folder_position(run_dir) is not None:
        return run_dir, []
    folder = run_dir / "checkpoints"
    notes, found = [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith(WRITING):
            path = _finish_rename(path)
            if path.name.startswith(WRITING):
                notes.append(f"passed over an incomplete checkpoint: {path}")
                continue
        elif path.name.startswith(SET_ASIDE):
            notes.append(f"passed over a checkpoint of an abandoned course: {path}")
            continue
        if folder_position(path) is None:
            continue
        if (path / STATE_FILE).is_file():
            found.append(path)
        else:
            notes.append(f"passed over an incomplete checkpoint: {path} has no {STATE_FILE}")
    return max(found, key=folder_position, default=None), notes


def _finish_rename(writing: Path) -> Path:
    """A folder that is whole, killed just before its rename, gets its name; else it stays."""
    final = writing.with_name(writing.name.removeprefix(WRITING))
    try:
        files = json.loads((writing / STATE_FILE).read_text())["files"]
        whole = all((writing / n).stat().st_size == about["bytes"] for n, about in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return writing
    if not whole or final.exists():
        return writing
    os.rename(writing, final)
    return final


def previous_checkpoint(path: Path) -> Path | None:
    """The newest whole checkpoint before this one in the same run."""
    here = folder_position(path)
    whole = [p for p in path.parent.iterdir() if folder_position(p) and (p / STATE_FILE).is_file()]
    return max((p for p in whole if folder_position(p) < here), key=folder_position, default=None)


# ---------------------------------------------------------------------------------------------
# Load


def load_checkpoint(path: str | Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors by file stem, on the CPU, and the state with "stage" and "step" added.

    Everything is checked first. Raises UserError that names the file that is missing, cut short,
    changed or not finite, and the checkpoint before this one, if there is one.
    """
    path = Path(path)
    try:
        about = _read_state(path / STATE_FILE)
        loaded = {}
        for name, expected in about["files"].items():
            loaded[name.removesuffix(".safetensors")] = _read_tensors(path / name, expected)
    except UserError as error:
        previous = previous_checkpoint(path) if path.is_dir() else None
        advice = f"resume from the one before it: --resume {previous}" if previous else (
            "there is no checkpoint before it; restore the file or start again")
        raise UserError(f"{error}; {advice}") from None
    return loaded, {**about["state"], "stage": about["stage"], "step": about["step"]}


@contextlib.contextmanager
def _explained(path: Path, not_understood: str) -> Iterator[None]:
    """A file that is missing, cannot be read, or does not hold what it should, in one line."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: the file is missing") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path}: {not_understood}") from None


def _read_state(path: Path) -> dict[str, Any]:
    with _explained(path, "this is not the JSON state of a checkpoint"):
        about = json.loads(path.read_bytes())
        if about["format"] != FORMAT:
            raise UserError(f"{path}: format {about['format']}, but this program reads {FORMAT}")
        for file in about["files"].values():
            if not (file["bytes"] and file["sha256"] and isinstance(file["tensors"], list)):
                raise ValueError
        return {key: about[key] for key in ("stage", "step", "files", "state")}


def _read_tensors(path: Path, expected: Mapping[str, Any]) -> dict[str, Tensor]:
    """One safetensors file, checked from the outside in so that the message can say what is wrong:
    size of the header, names, values, and last the hash of all bytes."""
    names = set(_read_names(path, expected["bytes"]))
    absent = sorted(set(expected["tensors"]) - names)
    if absent:
        raise UserError(f"{path}: {len(absent)} of {len(expected['tensors'])} tensors are missing, "
                        f"{absent[0]} the first")  # fmt: skip
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: the file is broken ({error})") from None
    _check_finite(tensors, str(path))
    if _sha256(path) != expected["sha256"]:
        raise UserError(f"{path}: the file has changed since it was saved (its hash differs)")
    return tensors


def _read_names(path: Path, saved_bytes: int) -> list[str]:
    """The names in the header, read only if its stated length and its data fit the file."""
    with _explained(path, "the file is broken (no safetensors header)"):
        size = path.stat().st_size
        with open(path, "rb") as f:
            header_bytes = int.from_bytes(f.read(8), "little")
            if size == 0:
                raise UserError(f"{path}: the file is empty (0 bytes of {saved_bytes})")
            if size < 8 or header_bytes > size - 8:
                why = f"its header claims {header_bytes} bytes and the file has {size}"
                raise UserError(f"{path}: the file is cut short or broken ({why})")
            header = json.loads(f.read(header_bytes))
        tensors = {name: about for name, about in header.items() if name != "__metadata__"}
        end = max((about["data_offsets"][1] for about in tensors.values()), default=0)
    if 8 + header_bytes + end != size:
        raise UserError(f"{path}: the file is cut short or broken ({size} bytes of {saved_bytes})")
    return list(tensors)


def _check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise UserError(f"{where}: tensor {name} has non-finite values (NaN or infinite)")


def load_into(
    parameters: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, Tensor], source: str
) -> None:
    """Copy tensors into the parameters of the same names; all of them fit, or none is touched.

    Raises UserError, naming source, where a name is missing or unknown, or a shape differs.
    """
    for wrong, what in (
        (sorted(set(parameters) - set(tensors)), "is missing"),
        (sorted(set(tensors) - set(parameters)), "is not in this model"),
    ):
        if wrong:
            raise UserError(f"{source}: {wrong[0]} {what} ({len(wrong)} such tensors in all); "
                            "give the model and the LoRA settings of the run")  # fmt: skip
    for name, parameter in parameters.items():
        saved, here = tuple(tensors[name].shape), tuple(parameter.shape)
        if saved != here:
            raise UserError(f"{source}: {name} is {saved} there and {here} in this model; "
                            "give the model and the LoRA settings of the run")  # fmt: skip
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


# ---------------------------------------------------------------------------------------------
# Random generators


def random_state(generators: Mapping[str, torch.Generator]) -> dict[str, str]:
    """The state of each generator, as JSON takes it."""
    return {
        name: base64.b64encode(generator.get_state().numpy().tobytes()).decode()
        for name, generator in generators.items()
    }


def restore_random_state(
    generators: Mapping[str, torch.Generator], saved: Mapping[str, Any]
) -> None:
    """Set each generator to its saved state; UserError if one is absent or of another kind."""
    for name, generator in generators.items():
        try:
            words = bytearray(base64.b64decode(saved[name], validate=True))
            generator.set_state(torch.frombuffer(words, dtype=torch.uint8))
        except (KeyError, TypeError, ValueError, RuntimeError):
            raise UserError(
                f"the checkpoint has no fitting state of the random generator '{name}' (another "
                "device or another version); sampling cannot go on exactly; start again"
            ) from None
