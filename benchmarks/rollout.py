"""Rollout: 4 prompts x 8 completions, ours against transformers' generate on the same model."""

import torch
from common import SHAPE, random_model, random_policy, report, side_by_side

from grpo.generate import generate
from grpo.sampling import Sampling

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 84, 64


def main() -> None:
    policy, plain = random_policy(), random_model("sdpa").eval()
    prompts = torch.randint(SHAPE["vocab_size"], (PROMPTS, PROMPT_TOKENS))

    def ours():
        random = torch.Generator().manual_seed(0)
        generate(policy, prompts.tolist(), GROUP, NEW_TOKENS, Sampling(0.9), random)

    def other():
        rows = prompts.repeat_interleave(GROUP, dim=0)
        plain.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=True,
            temperature=0.9,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )

    result = side_by_side(ours, other)
    result["tokens_per_second"] = round(PROMPTS * GROUP * NEW_TOKENS / result["ours_seconds"])
    report("rollout against transformers generate", result)


if __name__ == "__main__":
    main()
