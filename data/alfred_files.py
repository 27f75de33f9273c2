"""ALFRED's trajectories: reading its own tree of files or a JSONL file a split, and fetching it.

ALFRED (Shridhar et al. 2020, arXiv 1912.01734; MIT licence) publishes json_2.1.0: a folder for each
trajectory, <split>/<task>/<trial>/traj_data.json. Most of that is of no use here, so that
`make data TASK=alfred` makes of it a file a split, alfred_<split>.jsonl, of a trajectory a line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data.alfred_actions import ACTION_IDS
from data.jsonl import read_jsonl, text_field
from grpo.errors import UserError, exit_status
from grpo.flags import FlagParser

# How many trajectories each split has as published.
SPLITS = {"train": 6574, "valid_seen": 251, "valid_unseen": 255}
VERBS = {
    "GotoLocation": "goto",
    "PickupObject": "pickup",
    "PutObject": "put",
    "ToggleObject": "toggle",
    "CoolObject": "cool",
    "SliceObject": "slice",
    "CleanObject": "clean",
    "HeatObject": "heat",
}
NO_OPERATION = "NoOp"  # at the end of most plans; no action

DOWNLOAD = "https://ai2-vision-alfred.s3-us-west-2.amazonaws.com/json_2.1.0.7z"
TREE = "json_2.1.0"
FILE = "traj_data.json"
FORM = '{"path": text, "task_type": text, "scene": text, "high_pddl": [[action, object], …], …}'
TIMEOUT = 60  # seconds without an answer


@dataclass(frozen=True)
class Annotation:
    """How a person put it: the goal, and for each step a sentence, with the blanks it came with."""

    goal: str
    steps: tuple[str, ...]


@dataclass(frozen=True)
class Trajectory:
    """path: its folder below json_2.1.0. scene: the floor plan. pddl_params: what the goal is
    about. high_pddl: the plan as written, [action, object, receptacle of a put] a step."""

    path: str
    task_type: str
    scene: str
    pddl_params: Mapping[str, Any]
    high_pddl: tuple[tuple[str, ...], ...]
    annotations: tuple[Annotation, ...]

    @cached_property
    def actions(self) -> tuple[str, ...]:
        return plan_actions(self.high_pddl)


def plan_actions(high_pddl: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """A plan as verb and object, in lower case. An object that is empty is the one last picked up.

    >>> plan_actions([["PickupObject", "cup"], ["HeatObject", ""], ["PutObject", "cup", "desk"]])
    ('pickup cup', 'heat cup', 'put cup')
    """
    actions, last = [], ""
    for action, *arguments in high_pddl:
        if action == NO_OPERATION:
            continue
        target = (arguments[0].lower() if arguments else "") or last
        if action == "PickupObject":
            last = target
        actions.append(f"{VERBS[action]} {target}".strip())
    return tuple(actions)


def oddities(trajectories: Sequence[Trajectory]) -> list[tuple[str, str]]:
    """(path, what is odd): flaws of the data, none of which costs a trajectory its place.

    An object that was empty; an action that is none of the 225; an object treated that is not the
    one last picked up; a person who described fewer steps than there are.
    """
    found = []
    for t in trajectories:
        empty = [step[0] for step in t.high_pddl if step[0] != NO_OPERATION and not any(step[1:])]
        found += [(t.path, f"{action} of nothing") for action in empty]
        found += [(t.path, f"no action: {a}") for a in t.actions if a not in ACTION_IDS]
        found += [(t.path, f"not what is held: {a}") for a in _mistreated(t.actions)]
        short = sum(len(a.steps) != len(t.actions) for a in t.annotations)
        found += [(t.path, f"{short} descriptions of another length")] * bool(short)
    return found


def _mistreated(actions: Sequence[str]) -> list[str]:
    last, wrong = "", []
    for verb, _, target in (action.partition(" ") for action in actions):
        if verb == "pickup":
            last = target
        elif verb in ("clean", "cool", "heat") and target != last:
            wrong.append(f"{verb} {target}")
    return wrong


# ---------------------------------------------------------------------------------------------
# Records


def make_trajectory(record: Mapping[str, Any]) -> Trajectory:
    """Of a line of the JSONL files. Raises UserError for what is missing, a plan above all: the
    test splits have none."""
    path, task_type, scene = (text_field(record, n) for n in ("path", "task_type", "scene"))
    plan, annotations = record.get("high_pddl"), record.get("anns")
    if not isinstance(plan, list) or not plan:
        raise UserError(f'{path}: there is no plan ("high_pddl"); the test splits have none')
    for step in plan:
        _check_step(step, path)
    if not isinstance(annotations, list) or not annotations:
        raise UserError(f'{path}: there are no annotations ("anns")')
    return Trajectory(
        path=path,
        task_type=task_type,
        scene=scene,
        pddl_params=record.get("pddl_params") or {},
        high_pddl=tuple(tuple(step) for step in plan),
        annotations=tuple(_annotation(a, path) for a in annotations),
    )


def _check_step(step: Any, path: str) -> None:
    texts = isinstance(step, list) and step and all(isinstance(part, str) for part in step)
    if not texts or step[0] not in {*VERBS, NO_OPERATION}:
        raise UserError(f"{path}: {step!r:.60} is no step of a plan")


def _annotation(given: Any, path: str) -> Annotation:
    if not isinstance(given, dict):
        raise UserError(f"{path}: {given!r:.60} is no annotation")
    steps = given.get("high_descs") or []
    if not isinstance(steps, list) or not all(isinstance(s, str) for s in steps):
        raise UserError(f'{path}: its "high_descs" are not a list of texts')
    goal = " ".join(text_field(given, "task_desc").split())
    if not goal:
        raise UserError(f'{path}: its "task_desc" is empty')
    return Annotation(goal, tuple(steps))


def compact(original: Mapping[str, Any], path: str) -> dict[str, Any]:
    """ALFRED's own record as a line of the JSONL files: what is needed here, some 2 KB of 50."""
    scene, plan = original.get("scene") or {}, original.get("plan") or {}
    actions = [step.get("discrete_action") or {} for step in plan.get("high_pddl") or []]
    annotations = (original.get("turk_annotations") or {}).get("anns") or []
    return {
        "path": path,
        "task_type": original.get("task_type"),
        "pddl_params": original.get("pddl_params"),
        "scene": scene.get("floor_plan"),
        "high_pddl": [[a.get("action"), *a.get("args", [])] for a in actions],
        "anns": [{n: a.get(n) for n in ("task_desc", "high_descs")} for a in annotations],
    }


def read_tree(root: Path, split: str) -> list[dict[str, Any]]:
    """Every trajectory below root/split, compact, in the order of the paths."""
    records = []
    for path in sorted((root / split).glob(f"*/*/{FILE}")):
        try:
            original = json.loads(path.read_text("utf-8"))
            records.append(compact(original, path.parent.relative_to(root).as_posix()))
        except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:
            raise UserError(f"{path}: no trajectory of ALFRED's ({error})") from None
    return records


# ---------------------------------------------------------------------------------------------
# Where the files are


def read_split(split: str, data_dir: str | None) -> list[Trajectory]:
    """The trajectories of a split, from --data-dir, $GRPO_DATA or what `make data` has fetched.

    Says in a line if they are fewer or more than were published. Raises UserError, with what to put
    where, if there are none.
    """
    for folder in _folders(data_dir):
        file, tree = folder / f"alfred_{split}.jsonl", folder / split
        if file.is_file():
            trajectories = read_jsonl(file, make_trajectory, FORM)
        elif next(tree.glob(f"*/*/{FILE}"), None):
            file, trajectories = tree, [make_trajectory(r) for r in read_tree(folder, split)]
        else:
            continue
        _compare(split, len(trajectories), file)
        return trajectories
    where = f"--data-dir {data_dir}" if data_dir else "GRPO_DATA and the cache"
    raise UserError(
        f"ALFRED's {split} split is not in {where}: neither alfred_{split}.jsonl nor "
        f"{split}/<task>/<trial>/{FILE}; {ways()}"
    )


def _folders(data_dir: str | None) -> Iterator[Path]:
    """Where to look, in order: a folder that is given by name is the only one."""
    given = [data_dir] if data_dir else [os.environ.get("GRPO_DATA"), cache_folder()]
    for root in (Path(folder).expanduser() for folder in given if folder):
        yield from (root, root / "alfred", root / TREE, root / "alfred" / TREE)


def _compare(split: str, found: int, where: Path) -> None:
    if found != SPLITS[split]:
        print(
            f"warning: {where} has {found:,} trajectories, not the {SPLITS[split]:,} of ALFRED's "
            f"{split}; figures do not compare with those of others",
            file=sys.stderr,
        )


def ways() -> str:
    return (
        f"fetch it with `make data TASK=alfred`, or unpack {DOWNLOAD} and give the folder that has "
        f"{TREE} as --data-dir or GRPO_DATA"
    )


def cache_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "grpo-by-hand" / "alfred"


# ---------------------------------------------------------------------------------------------
# Fetching and converting: python -m data.alfred_files


def fetch_and_convert() -> None:
    """Download ALFRED's archive, unpack it aside, keep the JSONL files alone."""
    import subprocess  # here, as below, since they take longer to load than --help should
    import tempfile

    folder, unpack = cache_folder(), find_unpacker()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        archive = Path(aside, "archive.7z")
        download(archive)
        if subprocess.run(unpack(archive, Path(aside)), stdout=subprocess.DEVNULL).returncode:
            raise UserError(f"{DOWNLOAD}: the download cannot be unpacked; {ways()}")
        convert(Path(aside, TREE), folder)


def convert(tree: Path, folder: Path) -> None:
    """Each split of ALFRED's tree as folder/alfred_<split>.jsonl."""
    for split in SPLITS:
        records = read_tree(tree, split)
        for record in records:
            make_trajectory(record)  # what cannot be read later is told now
        _compare(split, len(records), tree / split)
        path = folder / f"alfred_{split}.jsonl"
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(r) + "\n" for r in records), "utf-8")
        partial.replace(path)
        print(f"{path}: {len(records):,} trajectories")


def find_unpacker() -> Callable[[Path, Path], list[str]]:
    """The command that unpacks a .7z file into a folder, by a program that this machine has."""
    import shutil

    for program in ("7z", "7za", "7zr", "7zz"):
        if shutil.which(program):
            return lambda archive, folder: [program, "x", "-y", f"-o{folder}", str(archive)]
    if shutil.which("bsdtar"):
        return lambda archive, folder: ["bsdtar", "-xf", str(archive), "-C", str(folder)]
    raise UserError("ALFRED comes as a .7z archive: install 7z (p7zip-full) or bsdtar first")


def download(path: Path) -> None:
    import http.client
    import shutil
    import urllib.request

    print(f"downloading {DOWNLOAD}")
    try:
        with urllib.request.urlopen(DOWNLOAD, timeout=TIMEOUT) as answer, path.open("wb") as file:
            shutil.copyfileobj(answer, file)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(f"{DOWNLOAD} cannot be downloaded ({reason}); {ways()}") from None


def main(argv: Sequence[str]) -> int:
    FlagParser(
        prog="python -m data.alfred_files",
        description="Download ALFRED's archive and convert it to JSON Lines.",
    ).parse_args(argv)
    fetch_and_convert()
    return 0


if __name__ == "__main__":  # make data TASK=alfred
    sys.exit(exit_status(main, sys.argv[1:], "stopped; nothing was kept"))
