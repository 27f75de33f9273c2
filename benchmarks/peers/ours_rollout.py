"""Our generator on a loaded model with a LoRA adapter: rows of one length, or --mixed lengths.

--mixed: every row ends at a length drawn from --shortest .. --longest, all equally likely, and
there are more rows than slots. Its useful tokens a second stand beside those of full rows: of
--new-tokens each, and of the mean of the mixed lengths, which costs as much attention.
"""

import argparse
import time

import workload

NO_STOP = [-1]  # no model has it


def arguments(argv=None) -> argparse.Namespace:
    parser = workload.rollout_parser(__doc__)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--mixed", action="store_true", help="rows of different lengths")
    parser.add_argument("--rows", type=workload.positive, default=96, help="of --mixed, in groups")
    parser.add_argument("--slots", type=workload.positive, default=32, help="rows decoded together")
    parser.add_argument(
        "--shortest", type=workload.positive, default=20, help="row of --mixed, in tokens"
    )
    parser.add_argument(
        "--longest", type=workload.positive, default=400, help="row of --mixed, in tokens"
    )
    args = parser.parse_args(argv)
    if args.mixed and args.rows % args.group:
        parser.error(f"--rows {args.rows} is no multiple of --group {args.group}")
    if args.shortest > args.longest:
        parser.error(f"--shortest {args.shortest} is above --longest {args.longest}")
    return args


def main(argv=None) -> None:
    args = arguments(argv)
    import torch

    from grpo.config import Config
    from grpo.generate import generate
    from grpo.policy import load_policy
    from grpo.sampling import Sampling
    from grpo.startup import prepare_cpu

    prepare_cpu(0)
    policy = load_policy(
        Config(model=args.model, dtype=args.dtype, device="cpu", lora_rank=16, lora_alpha=32)
    )

    def rollout(count: int, length: int, stop: list[int], first: int = 0, uniforms=None):
        """(seconds, the rows' lengths) of `count` prompts, each for a group of rows."""
        policy.stop_token_ids = stop
        rows = workload.prompts(policy.tokenizer, count, args.prompt_tokens, first)
        random = torch.Generator().manual_seed(0)
        started = time.perf_counter()
        groups = generate(
            policy,
            rows,
            args.group,
            length,
            Sampling(args.temperature),
            random,
            args.slots,
            uniforms=uniforms,
        )
        seconds = time.perf_counter() - started
        return seconds, [len(c.logprobs) for group in groups for c in group]

    def full_rows(length: int) -> tuple[float, int]:
        """(seconds, tokens) of rows that all have `length` tokens."""
        seconds, lengths = rollout(args.prompts, length, NO_STOP)
        assert set(lengths) == {length}
        return seconds, sum(lengths)

    rollout(args.prompts, args.new_tokens, NO_STOP, first=args.prompts)  # others, to warm up on
    seconds, tokens = full_rows(args.new_tokens)
    more = {}
    if args.mixed:
        full_speed = tokens / seconds
        drawn, uniforms, stop = mixed_lengths(args, policy.head.weight.shape[0])
        count = args.rows // args.group
        seconds, lengths = rollout(count, args.longest, stop, uniforms=uniforms)
        assert abs(sum(lengths) / sum(drawn) - 1) < 0.1, "the rows did not end at their lengths"
        tokens = sum(lengths)
        mean = round(tokens / args.rows)
        same_seconds, same_tokens = full_rows(mean)
        more = {
            "rows": args.rows,
            "slots": args.slots,
            "lengths": [min(lengths), mean, max(lengths)],
            "full_tokens_per_second": round(full_speed, 2),
            "share_of_full": round(tokens / seconds / full_speed, 3),
            "same_mean_tokens_per_second": round(same_tokens / same_seconds, 2),
            "share_of_same_mean": round(tokens / seconds * same_seconds / same_tokens, 3),
        }
    workload.report(
        seconds,
        tokens,
        ("torch", "transformers", "peft"),
        dtype=str(policy.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        prompt_tokens=args.prompt_tokens,
        **more,
    )


def mixed_lengths(args: argparse.Namespace, vocabulary: int):
    """(the rows' lengths, uniform numbers that end each row there, the tokens that stop).

    A token is drawn where the running sum of the probabilities, in the order of the ids, passes the
    uniform number. The last hundredth of the ids stops. A row's numbers stay below 0.9 before its
    last token, so that none of those is drawn; from there on they are as near to 1 as can be, and
    one is: at once, or a token later where the model is very sure of something else.
    """
    import torch

    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(args.shortest, args.longest + 1, (args.rows,), generator=random)
    uniforms = 0.9 * torch.rand(args.rows, args.longest, generator=random)
    uniforms[torch.arange(args.longest) >= lengths[:, None] - 1] = 1 - 2**-24
    stop = list(range(vocabulary - max(1, vocabulary // 100), vocabulary))
    return lengths.tolist(), uniforms, stop


if __name__ == "__main__":
    main()
