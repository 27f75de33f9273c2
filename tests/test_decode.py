"""A decode step must be fit for a CUDA graph, which is captured without a device here.

On the meta device nothing is computed, so whatever asks for a number fails as it would during a
capture; and a tensor on the CPU among the arguments would be copied to the device.
"""

import pytest
import torch
from tiny import tiny_policy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo.policy
from grpo.cache import KeyValueCache
from grpo.decode import DecodeStep
from grpo.lora import new_lora
from grpo.sampling import Sampling

META = torch.device("meta")


class NothingOnTheCpu(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        assert all(x.is_meta for x in tensors), f"{func} has a tensor on the CPU"
        return out


def decode_once(policy, model, sampling, common):
    """4 rows of 2 prompts, one of them spare."""
    config = policy.base.config
    heads = config.num_key_value_heads
    dim = config.hidden_size // config.num_attention_heads
    cache = KeyValueCache(policy.num_layers, 4, 4, 10, 256, common=common, growing=False)
    cache.allocate(torch.empty(1, heads, dim, dtype=policy.dtype, device=META))
    cache.blocks.add_rows(3)
    cache.make_room([256, 8, 8])
    step = DecodeStep(
        model=model,
        cache=cache,
        sampling=sampling,
        uniforms=torch.empty(4, 256, device=META) if sampling.temperature else None,
        rows=[0, 1, 2, 0],
        tokens=[1, 2, 3, 0],
        lengths=[0, 1, 2, 0],
        of_prompt=[0, 0, 1],
        prompt_lengths=[10, 7],
        common=common,
        device=META,
        grid=(4, 2),
    )
    with NothingOnTheCpu():
        tokens, logprobs = step(256)
    assert tokens.shape == logprobs.shape == (4,)


def lora_policy(kind="qwen2"):
    policy = tiny_policy(kind, dtype=torch.bfloat16)
    policy.model = new_lora(policy.model, 4, None, "all-linear").train().to(META)
    return policy


@pytest.mark.parametrize("common", [0, 64])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.9), Sampling(0.0), Sampling(0.9, top_k=5), Sampling(0.9, top_p=0.9, min_p=0.1)],
    ids=["plain", "greedy", "top-k", "top-p"],
)
def test_a_step_of_the_folded_model_asks_nothing_of_the_host(sampling, common):
    policy = lora_policy()
    with torch.inference_mode():
        decode_once(policy, policy.folded(), sampling, common)


def test_a_step_of_a_base_that_is_not_folded_asks_nothing_of_the_host(monkeypatch):
    """A 4-bit base: at every step all adapters were compared with those of the step before."""
    monkeypatch.setattr(grpo.policy, "fold", lambda *args: None)
    # While a stream is captured, transformers does not look for packed sequences either.
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda tensor=None: True)
    policy = lora_policy()
    with torch.inference_mode():
        assert policy.folded() is None
        decode_once(policy, policy.modules, Sampling(0.9), 0)
