"""TRL's GRPOTrainer: seconds of a whole step, LoRA and a reference included."""

import argparse
import tempfile
import time

import workload


def arguments(argv=None) -> argparse.Namespace:
    parser = workload.step_parser(__doc__)
    parser.add_argument("--bf16", action="store_true", help="its mixed precision; else float32")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights"
    )
    parser.add_argument("--rows", type=workload.positive, help="of one backward pass; none = group")
    args = parser.parse_args(argv)
    args.rows = args.rows or args.group
    if args.prompts * args.group % args.rows:
        parser.error(f"--rows {args.rows} does not divide the {args.prompts * args.group} rows")
    return args


def main(argv=None) -> None:
    args = arguments(argv)
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(len(workload.cores()))
    workload.cap_memory(args)
    ends: list[float] = []  # of the steps
    tokens: list[int] = []  # completion tokens of each
    rollouts: list[float] = []  # seconds of each

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            workload.end_of_step(args)
            ends.append(time.perf_counter())
            took = f", {ends[-1] - ends[-2]:.1f} s" if len(ends) > 1 else ""
            workload.progress(f"step {len(ends)} of {args.steps + 1}{took}")

    def vowels(completions, completion_ids, **_):
        tokens.append(sum(len(ids) for ids in completion_ids))
        return [workload.reward(turns[0]["content"]) for turns in completions]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=args.device == "cpu",
            model_init_kwargs={"dtype": args.dtype, **quantized(args)},
            bf16=args.bf16,
            per_device_train_batch_size=args.rows,
            gradient_accumulation_steps=args.prompts * args.group // args.rows,
            num_generations=args.group,
            max_completion_length=args.new_tokens,
            beta=0.04,
            temperature=args.temperature,
            gradient_checkpointing=args.gradient_checkpointing,
            learning_rate=1e-6,
            max_steps=args.steps + 1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            generation_kwargs={"min_new_tokens": args.new_tokens} if args.fixed_length else None,
        )
        trainer = GRPOTrainer(
            model=args.model,
            reward_funcs=vowels,
            args=config,
            train_dataset=Dataset.from_list(
                [{"prompt": chat} for chat in workload.problems(args.problems)]
            ),
            peft_config=LoraConfig(
                r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules="all-linear"
            ),
            callbacks=[Clock()],
        )
        generate = trainer.model.generate

        def timed(*inputs, **more):
            started = time.perf_counter()
            output = generate(*inputs, **more)
            workload.end_of_step(args)
            rollouts.append(time.perf_counter() - started)
            return output

        trainer.model.generate = timed
        trainer.train()
    assert len(tokens) == len(ends) == len(rollouts) == args.steps + 1
    seconds, rollout_seconds = ends[-1] - ends[0], sum(rollouts[1:])
    dtype = str(trainer.model.get_base_model().dtype).removeprefix("torch.")
    workload.report(
        seconds / args.steps,
        sum(tokens[1:]) / args.steps,
        ("torch", "transformers", "peft", "trl"),
        dtype=f"{dtype}, bfloat16 autocast" if args.bf16 else dtype,
        threads=torch.get_num_threads(),
        steps=args.steps,
        fixed_length=args.fixed_length,
        rollout_tokens_per_second=round(sum(tokens[1:]) / rollout_seconds, 1),
        train_tokens_per_second=round(sum(tokens[1:]) / (seconds - rollout_seconds), 1),
        **workload.memory_peaks(args.device),
    )


def quantized(args: argparse.Namespace) -> dict:
    """from_pretrained's argument for a base in 4 bits, as ours has it."""
    if args.quantize == "none":
        return {}
    import torch
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, args.dtype),
    )
    return {"quantization_config": config}


if __name__ == "__main__":
    workload.run(main)
