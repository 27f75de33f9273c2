"""The columns of a comparison: the answers of one model each, read from a run or made now.

No torch until a model has to answer: what is on the disk is shown at once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.errors import UserError

ORDER = ("start", "after_sft", "after_grpo")  # then any others, by name
NEEDED = {"prompt", "completion", "correct"}


@dataclass(frozen=True)
class Column:
    """rows: as evaluations/*.jsonl has them; source: the run as it was named, "" if none has it."""

    name: str
    rows: list[dict[str, Any]]
    source: str = ""

    def by_prompt(self) -> dict[tuple[str, int], dict[str, Any]]:
        """The rows by their prompt, and how often it came before: twice asked is two questions."""
        seen: Counter[str] = Counter()
        found = {}
        for row in self.rows:
            prompt = json.dumps(row["prompt"], sort_keys=True)
            found[prompt, seen[prompt]] = row
            seen[prompt] += 1
        return found


# ---- what is on the disk ------------------------------------------------------------------------


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a .jsonl file; a line that a kill has torn is left out.

    Raises UserError for a file that cannot be read.
    """
    found = []
    for line in _text(path).split("\n"):
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict):
            found.append(values)
    return found


def read_object(path: Path) -> dict[str, Any]:
    """A file that is one JSON object; raises UserError for any other, or none."""
    try:
        values = json.loads(_text(path))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{path}: this is not the JSON of a run; restore the file")
    return values


def read_column(path: Path) -> Column:
    """The answers of one evaluations/*.jsonl; there may be none."""
    rows = [row for row in read_lines(path) if row.keys() >= NEEDED and _is_chat(row["prompt"])]
    return Column(path.stem, rows, str(path.parent.parent))


def _is_chat(prompt: Any) -> bool:
    turns = prompt if isinstance(prompt, list) else []
    return bool(turns) and all(isinstance(t, dict) and "content" in t for t in turns)


def saved_columns(run: Path) -> list[Column]:
    """All evaluations of a run that hold answers, in the order in which a run makes them."""
    rank = {name: place for place, name in enumerate(ORDER)}
    files = sorted(
        (run / "evaluations").glob("*.jsonl"), key=lambda f: (rank.get(f.stem, len(ORDER)), f.stem)
    )
    return [column for file in files if (column := read_column(file)).rows]


def find_run(path: Path) -> Path | None:
    """The run's folder that this is, or that it lies in; None if it is of no run."""
    for folder in (path, *path.absolute().parents[:3]):
        if "task" in _config(folder):
            return folder
    return None


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return read_object(path) if path.is_file() else {}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


# ---- what the user named ------------------------------------------------------------------------


def columns_of(words: Sequence[str], flags: Sequence[str]) -> list[Column]:
    """The columns that the words name, in their order: see grpo.compare's --help.

    flags: those of train.py, for the models that have to answer; without --task among them, the
    settings are those of the first run that is named or that a named model lies in.
    Raises UserError for a word that names nothing, before any model answers.
    """
    found = [_saved(word) for word in words]
    models = [Path(word) for word, columns in zip(words, found, strict=True) if columns is None]
    if models:
        runs = (find_run(_split(word)[0]) for word in words)
        run = None if "--task" in flags else next((r for r in runs if r), None)
        if run is None and "--task" not in flags:
            raise UserError(f"{models[0]}: a model has to answer something; say --task NAME")
        settings = [_settings(model, run, flags) for model in models]
        answered = iter([answer_now(model, *s) for model, s in zip(models, settings, strict=True)])
    return [c for columns in found for c in ([next(answered)] if columns is None else columns)]


def _split(word: str) -> tuple[Path, str]:
    """runs/x:after_sft as the run and the evaluation; a path that exists is taken as it is."""
    path, (folder, _, name) = Path(word), word.rpartition(":")
    if path.exists() or not folder or not Path(folder).is_dir():
        return path, ""
    return Path(folder), name


def _saved(word: str) -> list[Column] | None:
    """The columns that are on the disk; None for a model directory."""
    path, name = _split(word)
    if not path.exists():
        raise UserError(f"{word}: there is no such run, file or model directory")
    if path.is_file():
        if not (column := read_column(path)).rows:
            raise UserError(f"{word}: there are no answers in it; give an evaluations/*.jsonl")
        return [column]
    if (path / "adapter_config.json").is_file():
        raise UserError(f"{word}: an adapter alone cannot answer; give the model in grpo/merged")
    if not name and "model_type" in _config(path):
        return None
    columns = saved_columns(path)
    if not columns:
        raise UserError(f"{word}: neither a run with answers in evaluations/ nor a model directory")
    chosen = [c for c in columns if name in ("", c.name)]
    if not chosen:
        there = ", ".join(c.name for c in columns)
        raise UserError(f"{word}: this run has no answers called {name}; it has {there}")
    return chosen


# ---- a model that answers now -------------------------------------------------------------------


def _settings(model: Path, run: Path | None, flags: Sequence[str]) -> tuple[Any, Any]:
    """(config, options) under which train.py --stage eval would judge the model."""
    from grpo.config import parse

    base = ["--resume", str(run)] if run else []
    fixed = ["--model", str(model), "--adapter", "none", "--quantize", "none", "--stage", "eval"]
    config, options, _ = parse([*base, *fixed, *flags])
    return config, options


def answer_now(model: Path, config: Any, options: Any) -> Column:
    """The model's greedy answers to the first config.eval_examples held-out examples."""
    from tqdm import tqdm

    from grpo.answers import row_of
    from grpo.evaluate import evaluate
    from grpo.policy import load_policy
    from grpo.startup import check_prompts, keep_screen_clear, load_task, prepare_cpu
    from grpo.supported import check_supported

    keep_screen_clear()
    prepare_cpu(config.threads)
    task, scratch_tokens = load_task(config, options)
    policy = load_policy(config, scratch_tokens, task.new_tokens, with_reference=False)
    check_supported(policy, config.max_prompt_length + config.max_episode_length)
    check_prompts(config, task, policy)
    examples = task.evaluation[: config.eval_examples]
    with tqdm(total=len(examples), desc=str(model), unit="row", leave=False) as bar:
        found = evaluate(
            policy,
            task,
            examples,
            max_new_tokens=config.max_completion_length,
            prompt_format=config.prompt_format,
            turns=config.turns,
            max_rows=config.rollout_rows,
            on_finish=bar.update,
        )
    return Column(str(model), [row_of(i, a) for i, a in enumerate(found.answers)])
