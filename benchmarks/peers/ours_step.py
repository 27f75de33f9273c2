"""Our whole GRPO step, by the loop that `train.py` runs: seconds, completion tokens, memory."""

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import workload

from train import import_run

NO_STOP = [-1]  # no model has it


def arguments(argv=None) -> argparse.Namespace:
    parser = workload.step_parser(__doc__)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more of train.py's")
    return parser.parse_args(argv)


def settings(args: argparse.Namespace, folder: str) -> list[str]:
    """Flags of train.py that say the same as TRL's settings in trl_step.py."""
    values = {
        "model": args.model,
        "dtype": args.dtype,
        "device": args.device,
        "quantize": args.quantize,
        "lora-rank": args.lora_rank,
        "lora-alpha": args.lora_alpha,
        "beta": 0.04,
        "temperature": args.temperature,
        "prompts-per-step": args.prompts,
        "num-generations": args.group,
        "max-completion-length": args.new_tokens,
        "rollout-rows": args.prompts * args.group,
        "learning-rate": 1e-6,
        "max-steps": args.steps + 1,
        "sft-steps": 0,
        "eval-examples": 0,
        "checkpoint-every": 0,
        "output-dir": str(Path(folder) / "run"),
    }
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [*words, *["--gradient-checkpointing"] * args.gradient_checkpointing, *args.flags]


def main(argv=None) -> None:
    args = arguments(argv)
    from grpo.config import parse

    with tempfile.TemporaryDirectory() as folder:
        config, options, _ = parse(settings(args, folder))
        import_run(config)  # as train.py does, for the memory of what is not imported
        measure(args, config, options)


def measure(args: argparse.Namespace, config, options) -> None:
    """Train args.steps + 1 steps as `train.py --stage grpo` would, and report all but the first."""
    import torch

    import grpo.loop
    from data import Example, Task
    from grpo.interrupt import StopRequest
    from grpo.memory import estimate
    from grpo.policy import load_policy, load_shape
    from grpo.stages import Run, begin
    from grpo.startup import keep_screen_clear, prepare_cpu
    from grpo.tokenizer import render_prompt

    keep_screen_clear()
    prepare_cpu(config.threads)
    workload.cap_memory(args)
    shape, dtype = load_shape(config, None)
    examples = [Example(chat, "", None) for chat in workload.problems(args.problems)]
    rewards = {"vowels": lambda text, example: workload.reward(text)}
    task = Task("vowels", examples, [], rewards, is_correct=lambda text, example: False)
    with ExitStack() as files, StopRequest() as stop:
        policy = load_policy(config)
        # What the estimate is held against: room for these prompts, not for any of the task's.
        prompts = [render_prompt(policy.tokenizer, e.messages, "chat") for e in examples]
        config.max_prompt_length = max(map(len, prompts))
        if args.fixed_length:
            policy.stop_token_ids = NO_STOP
        run = Run(config, options, task, None, None, stop, files)
        training = begin(run, "grpo", policy, config.max_steps)

        ends: list[float] = []  # of the steps
        tokens: list[float] = []  # completion tokens of each
        rollouts: list[float] = []  # completion tokens a second of each
        trainings: list[float] = []
        finish_step = training.finish_step

        def timed(metrics: dict[str, float]) -> None:
            finish_step(metrics)
            workload.end_of_step(args)
            ends.append(time.perf_counter())
            tokens.append(metrics["completions/mean_length"] * args.prompts * args.group)
            rollouts.append(metrics["tokens_per_second/rollout"])
            trainings.append(metrics["tokens_per_second/train"])
            assert metrics["frac_reward_zero_std"] == 0, "a group was left out: less work"
            took = metrics["step_time"]
            workload.progress(f"step {len(ends)} of {config.max_steps}, {took:.1f} s")

        training.finish_step = timed
        grpo.loop.train(policy, task, config, training)
    assert len(ends) == args.steps + 1
    workload.report(
        (ends[-1] - ends[0]) / args.steps,
        sum(tokens[1:]) / args.steps,
        ("torch", "transformers", "peft"),
        dtype=str(policy.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        steps=args.steps,
        fixed_length=args.fixed_length,
        rollout_tokens_per_second=round(statistics.harmonic_mean(rollouts[1:]), 1),
        train_tokens_per_second=round(statistics.harmonic_mean(trainings[1:]), 1),
        dry_run_gb=round(estimate(shape, config, dtype.itemsize)["total"] / 1e9, 3),
        **workload.memory_peaks(args.device),
    )


if __name__ == "__main__":
    workload.run(main)
