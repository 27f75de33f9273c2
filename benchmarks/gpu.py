"""Whole GRPO steps on a GPU under a memory cap, ours and TRL's: a table, and JSON line by line.

The models have the shapes of Qwen2.5 and random weights, so that no hub is needed: each is written
as an ordinary transformers directory, measured, and deleted. No row ends before its length. TRL
samples by transformers' generate. Each measurement is a process of its own; one that runs out of
memory is a row that says so. `--shapes tiny --device cpu` tries the script out on a CPU, where the
cap is compared with the memory of the whole process after every step.
Only the standard library: a large parent would count in the memory of what it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from peers import WORKERS, Failed, run_worker, say

OURS, TRL = "ours", "TRL"
WRITER = Path(__file__).parent / "random_model.py"


@dataclass(frozen=True)
class Shape:
    """A model's shape, and the steps that it is trained on.

    peer_rows: of one backward pass of TRL, whose logits are those of all its rows at once.
    flags: further ones of train.py.
    """

    what: str
    model: dict[str, int | bool]  # of a Qwen2Config
    prompts: int
    group: int
    prompt_tokens: int  # the longest; the shortest has half as many
    new_tokens: int
    peer_rows: int
    lora_rank: int = 32
    quantize: str = "none"
    gradient_checkpointing: bool = True
    flags: tuple[str, ...] = ("--preset", "a10")


def qwen(hidden: int, intermediate: int, layers: int, heads: int, shared: int, vocabulary: int):
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "vocab_size": vocabulary,
        "tie_word_embeddings": hidden < 3584,  # the 7B model has a head of its own
    }


TINY = {
    "model": qwen(64, 128, 2, 4, 2, 512),
    "prompts": 2,
    "group": 4,
    "prompt_tokens": 16,
    "new_tokens": 8,
    "peer_rows": 4,
    "lora_rank": 4,
}
SHAPES = {
    "0.5b": Shape(  # the source's gsm8k run: 4.67 s a step on an A10 with vLLM
        "0.5B",
        qwen(896, 4864, 24, 14, 2, 151_936),
        prompts=4,
        group=8,
        prompt_tokens=256,
        new_tokens=200,
        peer_rows=8,
    ),
    "1.5b": Shape(
        "1.5B NF4",
        qwen(1536, 8960, 28, 12, 2, 151_936),
        prompts=2,
        group=4,
        prompt_tokens=612,
        new_tokens=4096,
        peer_rows=1,
        quantize="nf4",
    ),
    "7b": Shape(
        "7B NF4",
        qwen(3584, 18_944, 28, 28, 4, 152_064),
        prompts=2,
        group=8,
        prompt_tokens=512,
        new_tokens=1024,
        peer_rows=2,
        quantize="nf4",
    ),
    "tiny": Shape("tiny", **TINY),
    "tiny-nf4": Shape("tiny NF4", **TINY, quantize="nf4"),
}
REAL = ("0.5b", "1.5b", "7b")


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # of several, TRL would take them all
    about = {"device": device_name(args.device), "date": time.strftime("%Y-%m-%d")}
    about |= {"memory_cap_gb": args.memory_gb}
    results = []
    for name in args.shapes:
        for who, result in measure(name, args):
            shape = SHAPES[name]
            line = {"benchmark": f"GRPO step, {shape.what}", "name": name, "who": who}
            results.append({**line, **result, **about})
            print(json.dumps(results[-1]), flush=True)
    print("\n" + markdown(results, about))
    return int(any("failed" in result for result in results))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=REAL, help=", ".join(SHAPES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--memory-gb", type=float, default=24.0, help="10^9 bytes for a process")
    parser.add_argument("--steps", type=int, default=3, help="measured, after one that is not")
    parser.add_argument("--trl", default=sys.executable, help="the Python that has TRL")
    parser.add_argument("--folder", help="where models are written; 7b needs 15 GB")
    args = parser.parse_args(argv)
    if args.memory_gb <= 0:
        parser.error(f"--memory-gb {args.memory_gb}: more than 0")
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: at least 1")
    if shutil.which(args.trl) is None:
        parser.error(f"--trl {args.trl}: there is no such program")
    if args.folder and not Path(args.folder).is_dir():
        parser.error(f"--folder {args.folder}: there is no such folder")
    return args


# ---- measuring -----------------------------------------------------------------------------------


def measure(name: str, args: argparse.Namespace):
    """(who, result) of ours, then of TRL. A result without figures has "failed", "out_of_memory"
    or "skipped", with the reason."""
    with tempfile.TemporaryDirectory(prefix=f"grpo-{name}-", dir=args.folder) as folder:
        try:
            say(f"{name}: a model with random weights is written to {folder}")
            written_apart(name, folder, args.device)
        except Failed as failure:
            yield from ((who, {"failed": str(failure)}) for who in (OURS, TRL))
            return
        yield OURS, figures([sys.executable, *ours_flags(name, folder, args)], f"{name}, ours")
        if installed("trl", args.trl):
            yield TRL, figures([args.trl, *trl_flags(name, folder, args)], f"{name}, TRL")
        else:
            yield TRL, {"skipped": "not installed"}


def figures(command: list[str], label: str) -> dict:
    try:
        return run_worker(command, label)
    except Failed as failure:
        _, mark, reason = str(failure).partition("out of memory: ")
        return {"out_of_memory": reason} if mark else {"failed": str(failure)}


def ours_flags(name: str, folder: str, args: argparse.Namespace) -> list[str]:
    shape = SHAPES[name]
    return [
        *(str(WORKERS / "ours_step.py"), *step_flags(shape, folder, args)),
        *("--flags", *shape.flags, "--max-prompt-length", str(shape.prompt_tokens)),
    ]


def trl_flags(name: str, folder: str, args: argparse.Namespace) -> list[str]:
    shape = SHAPES[name]
    mixed = ["--dtype", "bfloat16", "--bf16"] if args.device == "cuda" else []
    rows = ["--rows", str(shape.peer_rows)]
    return [str(WORKERS / "trl_step.py"), *step_flags(shape, folder, args), *rows, *mixed]


def step_flags(shape: Shape, folder: str, args: argparse.Namespace) -> list[str]:
    """What both workers are told, in the words of workload.step_parser."""
    values = {
        "model": folder,
        "problems": str(Path(folder) / "problems.json"),
        "device": args.device,
        "memory-gb": args.memory_gb,
        "steps": args.steps,
        "prompts": shape.prompts,
        "group": shape.group,
        "new-tokens": shape.new_tokens,
        "lora-rank": shape.lora_rank,
        "lora-alpha": shape.lora_rank,
        "quantize": shape.quantize,
    }
    switches = ["--fixed-length"] + ["--gradient-checkpointing"] * shape.gradient_checkpointing
    return [*switches, *(word for name, v in values.items() for word in (f"--{name}", str(v)))]


def written_apart(name: str, folder: str, device: str) -> None:
    """random_model.py in a process of its own, which leaves the GPU's memory clean."""
    shape = SHAPES[name]
    flags = [*("--config", json.dumps(shape.model)), *("--device", device)]
    flags += ["--prompt-tokens", str(shape.prompt_tokens)]
    command = [sys.executable, str(WRITER), folder, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        raise Failed(f"the model could not be written: {reason}")


def installed(package: str, python: str) -> bool:
    asked = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", asked]).returncode == 0


def device_name(device: str) -> str:
    """As torch names it; an end in one line where it is not there, before any work."""
    asked = "import torch; print(torch.cuda.get_device_name(), 'torch', torch.__version__)"
    if device == "cpu":
        asked = "import torch; print('cpu, torch', torch.__version__)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        sys.exit(
            f"error: --device {device}: torch finds none ({reason}); "
            "--shapes tiny --device cpu tries this script out"
        )
    return done.stdout.strip()


# ---- the table -----------------------------------------------------------------------------------

COLUMNS = {
    "s a step": ("seconds", ".2f"),
    "rollout tokens/s": ("rollout_tokens_per_second", ",.0f"),
    "training tokens/s": ("train_tokens_per_second", ",.0f"),
    "allocated, GB": ("allocated_gb", ".2f"),
    "reserved, GB": ("reserved_gb", ".2f"),
    "`--dry-run`, GB": ("dry_run_gb", ".2f"),
}


def markdown(results: list[dict], about: dict) -> str:
    """A row a measurement, those of one shape below each other, the machine and the date below."""
    head = ["configuration", "", *COLUMNS, "times faster"]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    lines += ["| " + " | ".join(row(result, results)) + " |" for result in results]
    cap = f"at most {about['memory_cap_gb']:g} GB a process"
    return "\n".join([*lines, "", f"{about['device']}, {cap}, {about['date']}"])


def row(result: dict, results: list[dict]) -> list[str]:
    shape = SHAPES[result["name"]]
    rows = shape.prompts * shape.group
    what = f"{shape.what}, LoRA r{shape.lora_rank}, {rows} rows of {shape.new_tokens:,} tokens"
    if "seconds" not in result:
        return [what, result["who"], why_empty(result), *[""] * len(COLUMNS)]
    cells = [
        "–" if result.get(name) is None else format(result[name], how)
        for name, how in COLUMNS.values()
    ]
    return [what, result["who"], *cells, times_faster(result, results)]


def why_empty(result: dict) -> str:
    if "out_of_memory" in result:
        return f"out of memory ({result['out_of_memory']})".replace("|", "/")
    return (result.get("skipped") or f"failed: {result['failed']}").replace("|", "/")


def times_faster(ours: dict, results: list[dict]) -> str:
    """By the completion token, beside ours where TRL has a figure too."""
    peer = [r for r in results if r["name"] == ours["name"] and r["who"] == TRL]
    if ours["who"] == TRL or not peer or "seconds" not in peer[0]:
        return ""
    return f"**{ours['tokens_per_second'] / peer[0]['tokens_per_second']:.1f}**"


if __name__ == "__main__":
    sys.exit(main())
