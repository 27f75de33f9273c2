"""Training pass: 2 prompts x 8 completions, the prompt once a group against padded rows."""

import torch
from common import SHAPE, random_model, random_policy, report, side_by_side

from grpo.logprobs import completion_logprobs
from grpo.packing import Group, pack

PROMPTS, GROUP, PROMPT_TOKENS, COMPLETION_TOKENS = 2, 8, 84, 64


def main() -> None:
    policy, plain = random_policy(), random_model("sdpa")
    vocabulary = SHAPE["vocab_size"]
    prompts = torch.randint(vocabulary, (PROMPTS, PROMPT_TOKENS))
    completions = torch.randint(vocabulary, (PROMPTS * GROUP, COMPLETION_TOKENS))
    batch = pack(
        [
            Group(
                prompt.tolist(),
                completions[i * GROUP : (i + 1) * GROUP].tolist(),
                list(range(i * GROUP, (i + 1) * GROUP)),
            )
            for i, prompt in enumerate(prompts)
        ],
        "cpu",
    )

    def ours():
        completion_logprobs(policy, batch, 1.0)[0].sum().backward()
        policy.model.zero_grad()

    def other():
        rows = torch.cat([prompts.repeat_interleave(GROUP, dim=0), completions], dim=1)
        logits = plain(rows, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1].float()
        logits.log_softmax(-1).gather(-1, completions[..., None]).sum().backward()
        plain.zero_grad()

    report("training pass, packed against padded rows", side_by_side(ours, other))


if __name__ == "__main__":
    main()
