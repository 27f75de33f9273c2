"""Distilled SFT data: a teacher's answers to a task's prompts, from an OpenAI-compatible endpoint.

    export OPENAI_API_KEY=...      # not needed by a server of your own
    python -m data.teacher --task gsm8k --url http://localhost:8000/v1 --model NAME \
        --output teacher.jsonl --examples 1000 --requests-per-minute 60
    python train.py --task gsm8k --sft-data teacher.jsonl ...

The task's own flags can be given too (--data-dir, --shots, ...), as can --preset and --seed. Right
answers go to the output; the others, with the reason, to <output>.rejected.jsonl. The prompts of
both are not asked again, so the same command goes on after a stop.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TextIO

from data import Example, Task, task_module
from data.endpoint import Endpoint, Pace, Reply
from data.sft_file import FORM
from grpo.config import Config
from grpo.config import parse as parse_training
from grpo.errors import UserError, exit_status
from grpo.flags import FlagParser, add_flags, checked, option, with_dashes

TASK_SETTINGS = {"task", "preset", "seed"}  # of train.py's own settings, what chooses the prompts
LOG_EVERY = 100


@dataclass
class Settings:
    """The teacher's own flags."""

    # fmt: off
    url: str = option("", "address of the endpoint, up to and with /v1")
    model: str = option("", "the teacher's name there")
    output: str = option("", "JSONL file to append to")
    examples: int = option(1000, "prompts to ask; 0 = all", at_least=0)
    keep: str = option("correct", "which answers to keep; a cut one is never kept",
                       choices=("correct", "all"))
    max_tokens: int = option(1024, "longest answer in tokens", positive=True)
    temperature: float = option(0.7, "of the teacher's sampling", at_least=0)
    requests_per_minute: float = option(60.0, "0 = no limit", at_least=0)
    concurrency: int = option(4, "requests in flight", positive=True, at_most=256)
    timeout: float = option(120.0, "seconds without an answer before a request is tried again",
                            positive=True)
    key_variable: str = option("OPENAI_API_KEY", "environment variable that holds the key")
    # fmt: on


def main(argv: list[str]) -> int:
    """Exit status: 0 when done, 2 for a mistake of the user's or the server's, 130 after Ctrl-C."""

    def work(argv: list[str]) -> int:
        settings, task = parse(argv)
        print(collect(settings, task, ask_by(settings)))
        return 0

    return exit_status(work, argv, "stopped; the same command goes on")


def parse(argv: list[str]) -> tuple[Settings, Task]:
    """The settings and the task with its own flags; UserError for whatever is wrong with them."""
    parser = FlagParser(
        prog="python -m data.teacher",
        description="Collect a teacher's answers to a task's prompts, as SFT data.",
        epilog="Also --task NAME, --preset, --seed and the task's own flags, as in: python "
        "train.py --task NAME --help.",
    )
    add_flags(parser, Settings, "teacher", {})
    given, rest = parser.parse_known_args([with_dashes(word) for word in argv])
    settings = Settings(**{n: checked(Settings, n, v) for n, v in vars(given).items()})
    for name, value in (("url", settings.url), ("model", settings.model),
                        ("output", settings.output)):  # fmt: skip
        if not value:
            raise UserError(f"--{name} is missing; see python -m data.teacher --help")
    if not settings.url.startswith(("http://", "https://")):
        raise UserError(f"--url {settings.url}: an address begins with http:// or https://")
    # Of the student nothing is known but that it can read: its prompts are those for such a model.
    config, options, flags = parse_training([*rest, "--model", Config.model])
    training = {f.name for f in fields(Config)} & flags - TASK_SETTINGS - {"model"}
    if training:
        raise UserError(f"--{min(training).replace('_', '-')} is a setting of train.py alone")
    return settings, task_module(config.task).load(options, config.seed, False)


def ask_by(settings: Settings) -> Callable[[list[dict[str, str]]], Reply]:
    """How to ask the teacher, with the key of the environment."""
    key = os.environ.get(settings.key_variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{settings.key_variable}: this is no key: it has characters of no header")
    pace = Pace(settings.requests_per_minute)
    return Endpoint(
        settings.url.rstrip("/").removesuffix("/chat/completions"),
        settings.model,
        key,
        settings.max_tokens,
        settings.temperature,
        settings.timeout,
        pace,
        lambda line: print(f"note: {line}", file=sys.stderr),
    ).ask


def collect(settings: Settings, task: Task, ask: Callable[[list[dict[str, str]]], Reply]) -> str:
    """Ask what is not asked yet, write each answer as it comes, and say how it went."""
    examples = task.sft or task.train
    examples = examples[: settings.examples or len(examples)]
    output = Path(settings.output)
    rejected = output.with_name(f"{output.name.removesuffix('.jsonl')}.rejected.jsonl")
    kept, wrong = asked_already(output), asked_already(rejected)
    left = {k: e for e in examples if (k := key_of(e)) not in kept | wrong}
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("a") as good, rejected.open("a") as bad:
            for example, reply in answers(ask, list(left.values()), settings.concurrency):
                reason = why_not(reply, example, task, settings.keep)
                write(bad if reason else good, example, reply.text, settings.model, reason)
                (wrong if reason else kept).add(key_of(example))
                show(len(kept), len(wrong), len(examples))
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror})") from None
    return (
        f"{len(kept)} answers are in {output}, {len(wrong)} that were not kept in {rejected}\n"
        f"to go on: python train.py --task {task.name} --sft-data {output}"
    )


def answers(
    ask: Callable[[list[dict[str, str]]], Reply], examples: list[Example], threads: int
) -> Iterator[tuple[Example, Reply]]:
    """Each example with its reply, as they come. The first failure ends all and is raised."""
    todo, done = queue.SimpleQueue(), queue.SimpleQueue()
    for example in examples:
        todo.put(example)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                example = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((example, ask(example.messages)))
            except Exception as error:
                stop.set()  # here, not where it is read: meanwhile this thread would ask the next
                done.put((example, error))

    for _ in range(min(threads, len(examples))):
        threading.Thread(target=work, daemon=True).start()  # Ctrl-C does not wait for answers
    try:
        for _ in examples:
            example, reply = done.get()
            if isinstance(reply, Exception):
                raise reply
            yield example, reply
    finally:
        stop.set()


def why_not(reply: Reply, example: Example, task: Task, keep: str) -> str:
    """Why an answer is not kept; "" if it is."""
    if reply.cut:
        return "cut by --max-tokens"
    if not reply.text.strip():
        return "no text"
    if keep == "all" or task.is_correct(reply.text, example):
        return ""
    return task.failure_reason(reply.text, example)


# ---- the files -----------------------------------------------------------------------------------


def key_of(example: Example) -> str:
    return json.dumps(example.messages)


def asked_already(path: Path) -> set[str]:
    """The prompts of a file's rows; a last line that a kill has torn is cut off.

    Raises UserError for a file of something else.
    """
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    found = set()
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            found.add(json.dumps(json.loads(line)["prompt"]))
        except (ValueError, LookupError, TypeError):
            raise UserError(
                f"{path}, line {number}: this is not {FORM}; give another --output"
            ) from None
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return found


def write(file: TextIO, example: Example, text: str, model: str, reason: str) -> None:
    row = {"prompt": example.messages, "completion": text, "level": example.level, "teacher": model}
    file.write(json.dumps(row | ({"reason": reason} if reason else {})) + "\n")
    file.flush()


def show(kept: int, rejected: int, total: int) -> None:
    """On a screen in place of the line before; in a log file a line now and then."""
    count, screen = kept + rejected, sys.stderr.isatty()
    if screen or count % LOG_EVERY == 0 or count == total:
        line = f"{count} of {total} prompts are answered, {kept} answers kept"
        end = "" if screen and count < total else "\n"
        print("\r" * screen + line, end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
