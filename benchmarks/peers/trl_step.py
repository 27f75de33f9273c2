"""TRL's GRPOTrainer: seconds of a whole step, LoRA and a reference included, on the CPU."""

import argparse
import tempfile
import time

import workload


def arguments(argv=None) -> argparse.Namespace:
    parser = workload.step_parser(__doc__)
    parser.add_argument("--bf16", action="store_true", help="its mixed precision; else float32")
    return parser.parse_args(argv)


def main(argv=None) -> None:
    args = arguments(argv)
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(len(workload.cores()))
    ends: list[float] = []  # of the steps
    tokens: list[int] = []  # completion tokens of each

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())
            took = f", {ends[-1] - ends[-2]:.1f} s" if len(ends) > 1 else ""
            workload.progress(f"step {len(ends)} of {args.steps + 1}{took}")

    def vowels(completions, completion_ids, **_):
        tokens.append(sum(len(ids) for ids in completion_ids))
        return [workload.reward(turns[0]["content"]) for turns in completions]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=args.bf16,
            per_device_train_batch_size=args.group,
            gradient_accumulation_steps=args.prompts,
            num_generations=args.group,
            max_completion_length=args.new_tokens,
            beta=0.04,
            temperature=args.temperature,
            gradient_checkpointing=False,
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
                [{"prompt": workload.messages(i)} for i in range(workload.PROBLEMS)]
            ),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
            callbacks=[Clock()],
        )
        trainer.train()
    assert len(tokens) == len(ends) == args.steps + 1
    dtype = str(trainer.model.get_base_model().dtype).removeprefix("torch.")
    workload.report(
        (ends[-1] - ends[0]) / args.steps,
        sum(tokens[1:]) / args.steps,
        ("torch", "transformers", "peft", "trl"),
        dtype=f"{dtype}, bfloat16 autocast" if args.bf16 else dtype,
        threads=torch.get_num_threads(),
        steps=args.steps,
        fixed_length=args.fixed_length,
    )


if __name__ == "__main__":
    main()
