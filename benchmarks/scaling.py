"""How our step grows: with the group, with the length, with a common system prompt, with time.

    groups    G from 8 to 32 on one prompt: more rows at a time, the same prompt once
    lengths   128, 1,024 and 4,096 tokens: time a token, and memory against --dry-run's estimate
    opening   1,500 tokens before every prompt, computed once a rollout and once a packed batch
    creep     memory after 10 and after 200 steps

Each measurement is a process of its own, so that its peak memory is its own. One JSON line each.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # each is started as a script

PROMPT, OPENING = 84, 1500
COMMON = ["--task", "maze", "--lora-rank", "16", "--lora-alpha", "32", "--beta", "0.04"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a model directory")
    parser.add_argument("what", nargs="*", choices=[[], *MEASUREMENTS], help="all if none is named")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # of the processes started here
    parser.add_argument("--steps", type=int, default=200, help="of creep")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024, 4096])
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one_step(args.model, **json.loads(args.one))))
        return
    for name in args.what or MEASUREMENTS:
        for line in MEASUREMENTS[name](args):
            print(json.dumps({"benchmark": name, **line}), flush=True)


# ---- what is compared ----------------------------------------------------------------------------


def groups(args):
    found = [in_a_process(args, prompts=1, group=g, new_tokens=128) for g in (8, 16, 32)]
    for before, line in zip([None, *found], found, strict=False):
        yield (
            line | {}
            if before is None
            else line
            | {
                "rollout_against_the_smaller": ratio(line, before, "rollout_tokens_per_second"),
                "training_seconds_a_token_against_the_smaller": ratio(
                    line, before, "training_seconds_a_token"
                ),
            }
        )


def lengths(args):
    for new_tokens in args.lengths:
        yield in_a_process(args, prompts=1, group=2, new_tokens=new_tokens, steps=1)


def opening(args):
    without, with_opening = (  # each step is one batch: the opening is computed once a batch
        in_a_process(args, prompts=4, group=8, new_tokens=100, opening=length, budget=8192)
        for length in (0, OPENING)
    )
    yield without
    yield with_opening | {
        "rollout_against_without": ratio(with_opening, without, "rollout_seconds"),
        "training_against_without": ratio(with_opening, without, "training_seconds"),
    }


def creep(args):
    yield in_a_process(args, prompts=1, group=4, new_tokens=8, steps=args.steps)


MEASUREMENTS = {"groups": groups, "lengths": lengths, "opening": opening, "creep": creep}


def ratio(line: dict, other: dict, name: str) -> float:
    return round(line[name] / other[name], 2)


def in_a_process(args, **settings) -> dict:
    print(f"{settings} started", file=sys.stderr)
    command = [sys.executable, __file__, "--model", args.model, "--one", json.dumps(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# ---- one measurement -----------------------------------------------------------------------------


def one_step(
    model: str,
    prompts: int,
    group: int,
    new_tokens: int,
    opening: int = 0,
    steps: int = 2,
    budget: int = 1280,
) -> dict:
    """The rollout and the update of the last of `steps` steps; no row stops by itself."""
    from grpo.config import parse
    from train import import_run

    sizes = {
        "model": model, "prompts-per-step": prompts, "num-generations": group,
        "max-prompt-length": opening + PROMPT, "max-completion-length": new_tokens,
        "rollout-rows": prompts * group, "tokens-per-micro-batch": budget,
    }  # fmt: skip
    flags = [str(word) for name, value in sizes.items() for word in (f"--{name}", value)]
    config, _, _ = parse([*COMMON, *flags])
    import_run(config)  # as train.py does, for the memory of what is not imported

    import torch

    from grpo.generate import generate
    from grpo.logprobs import completion_logprobs
    from grpo.loop import fixed_logprobs, grpo_loss
    from grpo.memory import estimate
    from grpo.optimizer import build_optimizer
    from grpo.packing import Group, micro_batches
    from grpo.policy import load_policy, load_shape
    from grpo.sampling import Sampling
    from grpo.startup import as_on_this_machine, keep_screen_clear, prepare_cpu

    keep_screen_clear()
    prepare_cpu(config.threads)
    policy = load_policy(config)
    policy.stop_token_ids = [-1]
    optimizer = build_optimizer(policy.trainable_parameters())
    optimizer.set_learning_rate(1e-6)
    random = torch.Generator().manual_seed(0)
    vocabulary = policy.base.config.vocab_size

    def ids(rows, length):
        return torch.randint(vocabulary, (rows, length), generator=random).tolist()

    shared = ids(1, opening)[0] if opening else []
    sampling = Sampling(config.temperature)
    memory = []
    for step in range(steps):
        rows = [shared + prompt for prompt in ids(prompts, PROMPT)]
        started = time.perf_counter()
        found = generate(policy, rows, group, new_tokens, sampling, random, config.rollout_rows)
        sampled = time.perf_counter()
        packed = [
            Group(p, [c.token_ids for c in g], list(range(i * group, (i + 1) * group)))
            for i, (p, g) in enumerate(zip(rows, found, strict=True))
        ]
        batches = list(micro_batches(packed, config.tokens_per_micro_batch, policy.device))
        advantages = torch.randn(prompts * group, generator=random)
        total = prompts * group * new_tokens
        fixed = fixed_logprobs(policy, batches, config)
        for batch, (old_logp, ref_logp) in zip(batches, fixed, strict=True):
            logp, _ = completion_logprobs(policy, batch, config.temperature, with_entropy=True)
            loss, _ = grpo_loss(
                logp, old_logp, ref_logp, advantages[batch.rows], batch.mask,
                rows=prompts * group, tokens=total, beta=config.beta,
            )  # fmt: skip
            loss.backward()
            optimizer.accumulate()
        optimizer.step()
        optimizer.zero_grad()
        done = time.perf_counter()
        memory.append(resident_megabytes())
        if steps > 10 and step % 10 == 9:
            print(f"step {step + 1} of {steps}, {memory[-1]} MB", file=sys.stderr)
    shape, dtype = load_shape(config, None)
    predicted = estimate(shape, as_on_this_machine(config, dtype), dtype.itemsize)["total"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    line = {
        "prompts": prompts,
        "group": group,
        "new_tokens": new_tokens,
        "opening": opening,
        "rollout_seconds": round(sampled - started, 2),
        "rollout_tokens_per_second": round(total / (sampled - started), 1),
        "training_seconds": round(done - sampled, 2),
        "training_seconds_a_token": round((done - sampled) / total, 5),
        "peak_mb": round(peak),
        "predicted_mb": round(predicted / 2**20),
        "predicted_against_peak": round(predicted / 2**20 / peak, 2),
    }
    if steps > 10:
        line |= {"steps": steps, "mb_after_10": memory[9], "mb_at_the_end": memory[-1]}
    return line


def resident_megabytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 2**20)


if __name__ == "__main__":
    main()
