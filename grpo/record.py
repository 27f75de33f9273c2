"""The run directory: everything a run leaves behind, except its checkpoints and its model.

    config.json       the settings
    metrics.jsonl     a line a step: {"stage": "grpo", "step": 3, "reward": 0.4, ...}
    completions/      samples of prompts, completions and rewards, never overwritten
    tensorboard/      the metrics again, a TensorBoard run a stage
    results.json      the evaluations
    collected.jsonl   what --stage collect has found (grpo/collect.py writes it)
    curves.png        the metrics as a picture (grpo/curves.py draws it)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from grpo.checkpoint import position
from grpo.curves import draw_curves
from grpo.errors import UserError

# The progress bar: the reward (SFT: the loss) comes first, then these. GRPO's loss says nothing.
SHOWN = ("grad_norm", "reward_std", "kl", "completions/mean_length", "step_time")
# A fresh run would take these for its own.
PARTS = ("metrics.jsonl", "results.json", "collected.jsonl", "checkpoints", "sft", "grpo")


def check_output(run_dir: Path, resume: bool, needed_bytes: int = 0) -> None:
    """Raise UserError for a folder that a run could not write to; it is made, and nothing more.

    needed_bytes: what the run will write, roughly; 0 to leave the free space unchecked.
    """
    where = f"--output-dir {run_dir}"
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{where}: the output folder is an ordinary file; give another name")
    if not resume and (run_dir / "config.json").exists():
        raise UserError(
            f"{where}: this output folder holds a run; --resume {run_dir} goes on with "
            "it, another name starts a new one"
        )
    if not resume and (found := [n for n in PARTS if (run_dir / n).exists()]):
        raise UserError(
            f"{where}: this output folder has a {found[0]} of something else; give another name"
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".probe"
        probe.write_text("can this folder be written to?")
        probe.unlink()
    except OSError as error:
        raise cannot_write(run_dir, error) from error
    free = shutil.disk_usage(run_dir).free
    if needed_bytes > free:
        raise UserError(
            f"{where}: too little space on the output folder's disk: {free / 1e9:.1f} GB are "
            f"free, the run needs about {needed_bytes / 1e9:.1f} GB; free some, or keep fewer "
            "checkpoints (--keep-checkpoints)"
        )


@contextlib.contextmanager
def only_run_in(run_dir: Path) -> Iterator[None]:
    """Inside, no other process can work in this folder, which exists; the system ends the claim.

    Raises UserError if another one is at work there. A folder that is still empty at the end is
    removed: whoever corrects a mistake found at the start can use its name again.
    """
    folder = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise UserError(
            f"--output-dir {run_dir}: another run is at work in this output folder; wait for it, "
            "stop it, or give another name"
        ) from None
    except OSError:
        pass  # a network disk without locks: then nothing is claimed
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            run_dir.rmdir()  # fails unless it is empty
        os.close(folder)


class Recorder:
    """Writes one run directory; use it as a context manager.

    resume: go on in a directory that a run has begun; a fresh run refuses one.
    resume_at: (stage, step) of the checkpoint that is gone on from; the metrics after it are cut
        off, since their steps are done again. None with resume=True starts the metrics afresh.

    Raises UserError, at once, for a directory that cannot be made or written, and one that holds
    another run.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config_json: str,
        *,
        resume: bool = False,
        resume_at: tuple[str, int] | None = None,
    ):
        self.run_dir = Path(run_dir)
        self.resume_at = resume_at
        self._boards: dict[str, Any] = {}
        check_output(self.run_dir, resume)
        if resume:
            self._cut_metrics()
        try:
            (self.run_dir / "completions").mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_write(self.run_dir, error) from error
        write_aside(self.run_dir / "config.json", config_json)
        self._metrics = os.open(
            self.run_dir / "metrics.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
        )

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(*([UserError] if kind else [])):  # the first failure is told
            self.close()

    def close(self) -> None:
        """Also writes what TensorBoard still holds back. Raises UserError if the disk is full."""
        boards, self._boards = self._boards, {}
        if self._metrics >= 0:
            os.close(self._metrics)
        self._metrics = -1
        failed = None
        for board in boards.values():
            try:
                board.close()
            except OSError as error:
                failed = error
        if failed:
            raise cannot_write(self.run_dir / "tensorboard", failed) from failed

    # -- at the start ---------------------------------------------------------------------------

    def _cut_metrics(self) -> None:
        """Keep the lines up to the step that is resumed from; a torn last line goes too."""
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return
        last = position(*self.resume_at) if self.resume_at else (-2, 0)
        kept = [line for line, at in _lines(path) if position(at["stage"], at["step"]) <= last]
        write_aside(path, "".join(line + "\n" for line in kept))

    # -- during the run -------------------------------------------------------------------------

    def metrics(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Append one line to metrics.jsonl, and the same to TensorBoard.

        A value that is not finite becomes null. Raises UserError if the disk is full; the lines
        written before stay whole.
        """
        numbers = {name: float(value) for name, value in values.items()}
        finite = {n: v if math.isfinite(v) else None for n, v in numbers.items()}
        line = json.dumps({"stage": stage, "step": step, **finite}) + "\n"
        self._append(line.encode())
        try:
            board = self._board(stage)
            for name, value in numbers.items():
                board.add_scalar(name, value, step)
        except OSError as error:  # its writer thread reports a full disk at a later call
            raise cannot_write(self.run_dir / "tensorboard", error) from error

    def _append(self, line: bytes) -> None:
        """All of the line or nothing of it."""
        size = os.fstat(self._metrics).st_size
        try:
            written = os.write(self._metrics, line)
            if written < len(line):
                raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            os.ftruncate(self._metrics, size)
            raise cannot_write(self.run_dir / "metrics.jsonl", error) from error

    def _board(self, stage: str) -> Any:
        """The TensorBoard writer of a stage. Each has a folder: their steps would collide."""
        if stage not in self._boards:
            at = self.resume_at
            purge = at[1] + 1 if at and at[0] == stage else 0
            folder = self.run_dir / "tensorboard" / stage
            self._boards[stage] = _summary_writer(str(folder), purge if folder.exists() else None)
        return self._boards[stage]

    def completions(self, stage: str, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write a sample of completions to completions/<stage>-step-000123.jsonl, a row a line.

        Never overwrites: a step done again after a resume writes the same file, and only if its
        content differs it gets a name of its own, with .2, .3 and so on before the ending.
        """
        # Half a surrogate pair in a text is escaped by json and so survives any encoding.
        text = "".join(json.dumps(dict(row)) + "\n" for row in rows)
        name, number = f"{stage}-step-{step:06d}", 1
        path = self.run_dir / "completions" / f"{name}.jsonl"
        while path.exists():
            if path.read_bytes() == text.encode():
                return path
            number += 1
            path = path.with_name(f"{name}.{number}.jsonl")
        write_aside(path, text)
        return path

    def result(self, key: str, value: Any) -> None:
        """Set one entry of results.json, such as "after_sft"; the others stay."""
        path = self.run_dir / "results.json"
        results = {**read_results(self.run_dir), key: value}
        write_aside(path, json.dumps(results, indent=2) + "\n")

    def keep_results(self, names: Iterable[str]) -> None:
        """Leave only these entries in results.json: of the others, the run has gone back."""
        path, names, results = self.run_dir / "results.json", set(names), read_results(self.run_dir)
        if not names >= results.keys():
            kept = {name: value for name, value in results.items() if name in names}
            write_aside(path, json.dumps(kept, indent=2) + "\n")

    def progress(self, stage: str, total: int, initial: int = 0) -> Progress:
        """A progress bar over the steps of a stage; initial: the steps done before a resume."""
        return Progress(stage, total, initial)

    def curves(self, title: str = "") -> Path:
        """Draw curves.png from metrics.jsonl; lines with eval/accuracy mark the evaluations."""
        path = self.run_dir / "curves.png"
        lines = [values for _, values in _lines(self.run_dir / "metrics.jsonl")]
        try:
            draw_curves(lines, path, title or self.run_dir.name)
        except OSError as error:
            raise cannot_write(path, error) from error
        return path


class SilentRecorder(Recorder):
    """That of every rank but the first: one is enough to write the directory."""

    def __init__(self, run_dir: str | Path):
        self.run_dir = Path(run_dir)

    def _nothing(self, *_: object, **__: object) -> None:
        pass

    close = metrics = completions = result = keep_results = curves = _nothing


def read_results(run_dir: Path) -> dict[str, Any]:
    """results.json, {} if there is none yet."""
    path = run_dir / "results.json"
    try:
        return dict(json.loads(path.read_bytes())) if path.exists() else {}
    except (ValueError, TypeError, OSError):
        raise UserError(f"{path}: not the JSON of results; move it away to go on") from None


class Progress:
    """The bar of one stage, a context manager; what tells whether it learns comes first."""

    def __init__(self, stage: str, total: int, initial: int = 0, file: Any = None):
        screen = file or sys.stderr
        self._bar = tqdm(
            total=total,
            initial=initial,
            desc=stage,
            unit="step",
            file=screen,
            # A log file gets a line now and then instead of ten a second.
            mininterval=0.1 if screen.isatty() else 10.0,
            dynamic_ncols=True,
        )

    def step(self, metrics: Mapping[str, float]) -> None:
        """One step done, with its metrics."""
        order = ("reward" if "reward" in metrics else "loss", *SHOWN)
        known = (name for name in order if not math.isnan(metrics.get(name, math.nan)))
        shown = ((name.split("/")[-1], metrics[name]) for name in known)
        self._bar.set_postfix_str(", ".join(f"{n} {v:.3g}" for n, v in shown), refresh=False)
        self._bar.update()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.write(line, file=self._bar.fp)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()


def _summary_writer(folder: str, purge_step: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # slow to import

    return SummaryWriter(folder, purge_step=purge_step)


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The whole lines of metrics.jsonl, each with its values; a torn one is left out."""
    found = []
    for line in path.read_text("utf-8", "replace").splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
            position(values["stage"], values["step"])
        except (ValueError, KeyError, TypeError):
            continue
        found.append((line, values))
    return found


def write_aside(path: Path, text: str) -> None:
    """Replace the file at once or not at all; a file that has this content already is left."""
    if path.is_file() and path.read_bytes() == text.encode():
        return
    aside = path.with_name(f".{path.name}.writing")
    try:
        with open(aside, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def disk_is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def cannot_write(path: Path, error: OSError) -> UserError:
    if disk_is_full(error):
        why = "no space left on the device; free some, then go on with --resume"
    else:
        why = f"cannot be written ({error.strerror}); give another --output-dir"
    return UserError(f"output: {path}: {why}")
