"""transformers' generate with a LoRA adapter by peft: sampled tokens and the log-prob of each.

generate returns no log-probs; its tempered scores of every step are kept as it goes, and the
sampled tokens' entries are normalised one step at a time, which holds the least memory.
"""

import argparse
import time

import workload


def arguments(argv=None) -> argparse.Namespace:
    parser = workload.rollout_parser(__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args(argv)


def main(argv=None) -> None:
    args = arguments(argv)
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(len(workload.cores()))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    base.generation_config.eos_token_id = None  # no row stops early
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).eval()

    @torch.no_grad()
    def rollout(first: int):
        rows = workload.prompts(tokenizer, args.prompts, args.prompt_tokens, first)
        ids = torch.tensor(rows).repeat_interleave(args.group, dim=0)
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=args.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=args.new_tokens,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        tokens = output.sequences[:, args.prompt_tokens :]
        logprobs = [
            scores.float().log_softmax(-1).gather(1, tokens[:, i : i + 1])
            for i, scores in enumerate(output.scores)
        ]
        return tokens, torch.cat(logprobs, dim=1)

    rollout(first=args.prompts)  # other prompts to warm up on
    started = time.perf_counter()
    tokens, logprobs = rollout(first=0)
    seconds = time.perf_counter() - started
    assert tokens.shape == logprobs.shape == (args.prompts * args.group, args.new_tokens)
    workload.report(
        seconds,
        tokens.numel(),
        ("torch", "transformers", "peft"),
        dtype=args.dtype,
        threads=torch.get_num_threads(),
        prompt_tokens=args.prompt_tokens,
    )


if __name__ == "__main__":
    main()
