"""The work that ours and the peers are given: the same prompts, rewards and flags.

Only the standard library: every worker imports this, each in its own virtual environment.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

PROBLEMS = 64  # different prompts of the training steps
SYSTEM = (
    "You solve problems in arithmetic. Write down your steps one after the other inside "
    "<reasoning> tags, then the number alone, without a unit, inside <answer> tags."
)
PROBLEM = (
    "{who} picks {first} {what} on Monday and {second} {what} on Tuesday, then gives {third} of "
    "them to a good friend. How many {what} are left?"
)
PEOPLE = ("Maria", "David", "Peter", "Anna")
THINGS = ("apples", "eggs", "flowers", "berries")
MEMORY_SIGNS = ("out of memory", "cublas_status_alloc_failed")


def messages(index: int) -> list[dict[str, str]]:
    """Problem `index` of an endless row of them, as a chat. Two-digit numbers, so that the prompts
    of all problems have about the same length."""
    problem = PROBLEM.format(
        who=PEOPLE[index % 4],
        what=THINGS[index // 4 % 4],
        first=20 + index * 7 % 80,
        second=20 + index * 11 % 80,
        third=10 + index * 3 % 30,
    )
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem}]


def prompts(tokenizer, count: int, length: int, first: int = 0) -> list[list[int]]:
    """The ids of problems first .. first + count - 1, of exactly `length` tokens each: what is too
    long loses its beginning, what is too short is repeated in front."""
    rows = []
    for index in range(first, first + count):
        text = tokenizer.apply_chat_template(
            messages(index), add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(text, add_special_tokens=False).input_ids
        rows.append((ids * -(-length // len(ids)))[-length:])
    return rows


def problems(path: str | None) -> list[list[dict[str, str]]]:
    """The chats of the training steps: those of the file, or PROBLEMS of the made ones."""
    if path is None:
        return [messages(i) for i in range(PROBLEMS)]
    return json.loads(Path(path).read_text("utf-8"))


def reward(text: str) -> float:
    """The share of vowels: free to compute, and it differs between any two completions."""
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


def cores() -> list[int]:
    """A CPU number of each physical core that this process may use: two threads of one core slow
    matrix products down, so every worker computes on as many threads."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    found = {}
    for cpu in sorted(usable):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found.setdefault(siblings.read_text() if siblings.is_file() else cpu, cpu)
    return list(found.values())


# ---- the device's memory -------------------------------------------------------------------------


def cap_memory(args: argparse.Namespace) -> None:
    """Before anything is on the GPU: its allocator refuses more than --memory-gb."""
    if args.memory_gb and args.device == "cuda":
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_gb * 1e9 / total))


def end_of_step(args: argparse.Namespace) -> None:
    """Wait for the device. A CPU's memory has no allocator that refuses: it is looked at here."""
    if args.device == "cuda":
        import torch

        torch.cuda.synchronize()
    elif args.memory_gb and peak_rss_mb() * 2**20 > args.memory_gb * 1e9:
        raise MemoryError(f"{peak_rss_mb()} MB are held, of {args.memory_gb:g} GB that may be")


def memory_peaks(device: str) -> dict[str, float | None]:
    """In 10^9 bytes; on a CPU of the whole process."""
    if device == "cpu":
        return {"allocated_gb": round(peak_rss_mb() * 2**20 / 1e9, 3), "reserved_gb": None}
    import torch

    return {
        "allocated_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3),
        "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 3),
    }


def run(main: Callable[[], None]) -> None:
    """main(), where lack of memory ends in one line, which the drivers show."""
    try:
        main()
    except Exception as error:
        reason = memory_ran_out(error)
        if reason is None:
            raise
        sys.exit(f"out of memory: {reason}")


def memory_ran_out(error: BaseException | None) -> str | None:
    """The words of this error, or of one that led to it, if memory was short; else None. What
    fails while a CUDA graph is captured ends the capture with an error of its own."""
    while error is not None:
        text = " ".join(str(error).split())
        if isinstance(error, MemoryError) or any(sign in text.lower() for sign in MEMORY_SIGNS):
            return text[:160] or type(error).__name__
        error = error.__cause__ or error.__context__
    return None


# ---- flags and the JSON line ---------------------------------------------------------------------


def rollout_parser(description: str) -> argparse.ArgumentParser:
    parser = _parser(description, new_tokens=100)
    parser.add_argument(
        "--prompt-tokens", type=positive, default=84, help="of every prompt, exactly"
    )
    return parser


def step_parser(description: str) -> argparse.ArgumentParser:
    parser = _parser(description, new_tokens=128)
    parser.add_argument("--steps", type=positive, default=2, help="measured, after one that is not")
    parser.add_argument(
        "--fixed-length", action="store_true", help="no row stops before --new-tokens"
    )
    parser.add_argument("--problems", metavar="FILE", help="JSON, a list of chats; default: made")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--memory-gb", type=float, help="10^9 bytes for the process; none = no cap")
    parser.add_argument("--lora-rank", type=positive, default=16)
    parser.add_argument("--lora-alpha", type=positive, default=32)
    parser.add_argument("--quantize", choices=("none", "nf4"), default="none")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    return parser


def _parser(description: str, new_tokens: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="a model directory")
    parser.add_argument("--prompts", type=positive, default=4, help="different ones")
    parser.add_argument("--group", type=positive, default=8, help="completions of each")
    parser.add_argument("--new-tokens", type=positive, default=new_tokens, help="of a completion")
    parser.add_argument("--temperature", type=float, default=0.9)
    return parser


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def report(seconds: float, tokens: float, packages: tuple[str, ...], **more) -> None:
    """One JSON line. seconds: of the measured work; tokens: completion tokens in that time."""
    print(
        json.dumps(
            {
                "seconds": round(seconds, 3),
                "tokens": round(tokens, 1),
                "tokens_per_second": round(tokens / seconds, 2),
                "peak_rss_mb": peak_rss_mb(),
                "versions": {name: version(name) for name in packages},
                **more,
            }
        ),
        flush=True,
    )


def peak_rss_mb() -> int:
    """The most memory that this process has held."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // 2**20


def progress(text: str) -> None:
    """A line that the driver shows; whatever else a library writes to stderr it does not."""
    print(f"progress: {text}", file=sys.stderr, flush=True)
