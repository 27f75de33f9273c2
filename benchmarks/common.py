"""What the benchmarks share: a model with random weights, and timing two things side by side."""

from __future__ import annotations

import json
import logging
import platform
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

# It warns when it is imported, with peft, that it lacks an optional package.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from grpo.attention import ATTENTION  # noqa: E402
from grpo.policy import Policy  # noqa: E402

# The shape of SmolLM2-135M with a third of its layers: large enough for the products to count.
SHAPE = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def random_model(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation=attention))


def random_policy() -> Policy:
    """A policy without a tokenizer, whose stop token never comes."""
    model = random_model(ATTENTION)
    return Policy(
        model=model,
        tokenizer=SimpleNamespace(eos_token_id=None),
        stop_token_ids=[-1],
        device=torch.device("cpu"),
        dtype=torch.float32,
        original_config=model.config,
    )


def side_by_side(ours: Callable[[], None], other: Callable[[], None], rounds: int = 3) -> dict:
    """Median seconds of each and the ratio other / ours, run in turns after one warm-up each."""
    ours(), other()
    seconds = {"ours": [], "other": []}
    for _ in range(rounds):
        for name, call in (("ours", ours), ("other", other)):
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["other"], strict=True)]
    return {
        "ours_seconds": round(statistics.median(seconds["ours"]), 3),
        "other_seconds": round(statistics.median(seconds["other"]), 3),
        "times_faster": round(statistics.median(ratios), 2),
    }


def report(name: str, result: dict) -> None:
    """One JSON line."""
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps({"benchmark": name, **result, **machine, "cpu": platform.machine()}))
