"""From `python train.py` to the first GRPO step, and that step left out: a model from scratch, and
with --model DIR one from the disk. Each in fresh processes, in turns; the files are cached."""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import report

TRAIN = Path(__file__).parent.parent / "train.py"
SMALLEST = {
    "--task": "maze",
    "--maze-size": "3",
    "--stage": "grpo",
    "--max-steps": "1",
    "--eval-examples": "0",
    "--prompts-per-step": "1",
    "--num-generations": "2",
    "--max-completion-length": "8",
}
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", metavar="DIR", help="a model's directory, timed as well")
    models = {"scratch": "scratch", "model": parser.parse_args().model}
    seconds = {name: [] for name, model in models.items() if model}
    for _ in range(1 + ROUNDS):
        for name, all_seconds in seconds.items():
            all_seconds.append(start_seconds(models[name]))
    # The first round reads the files into the cache.
    report(
        "start to the first step, without it",
        {f"{name}_seconds": round(statistics.median(s[1:]), 2) for name, s in seconds.items()},
    )


def start_seconds(model: str) -> float:
    """Seconds from the start of the process to the line of its first step, less that step's."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        flags = {**SMALLEST, "--model": model, "--output-dir": str(run)}
        command = [sys.executable, str(TRAIN), *itertools.chain(*flags.items())]
        started = time.time()
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        metrics = run / "metrics.jsonl"  # of one line, so that this is when it was written
        first = json.loads(metrics.read_text())
        return metrics.stat().st_mtime - started - first["step_time"]


if __name__ == "__main__":
    main()
