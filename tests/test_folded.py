"""The folded model against the policy that it is a copy of."""

import pytest
import torch
from conftest import KINDS, build_model, shake
from peft import LoraConfig, get_peft_model
from tiny import policy_of, ragged_prompts

from grpo import folded
from grpo.attention import PackedLayout
from grpo.folded import FAMILY, FoldedModel, fold

IDS = ragged_prompts(3, seed=2)


def with_lora(kind, dtype=torch.float32, **changes):
    model = build_model(kind, attention="grpo", **changes).to(dtype)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    policy = policy_of(model)
    shake(policy.trainable_parameters())
    return policy


def logits(model):
    lengths = [len(p) for p in IDS]
    hidden = model.hidden_states(
        torch.tensor([sum(IDS, [])]),
        torch.tensor([[i for n in lengths for i in range(n)]]),
        PackedLayout(lengths, [], [], device=torch.device("cpu")),
    )
    return model.head(hidden)[0].float()


@pytest.mark.parametrize("kind", [k for k in KINDS if k in FAMILY])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@torch.no_grad()
def test_folded_logits_are_the_policys(kind, packed, monkeypatch):
    if not packed:
        monkeypatch.setattr(folded, "_pack", lambda weight: None)
    policy = with_lora(kind)
    model = fold(policy)
    assert isinstance(model, FoldedModel)
    assert torch.allclose(logits(model), logits(policy), rtol=0, atol=1e-4)
    with policy.model.disable_adapter():
        base = logits(policy)
        assert not torch.allclose(logits(model), base, atol=0.1), "the adapter does something"
        assert torch.allclose(logits(fold(policy)), base, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [k for k in KINDS if k in FAMILY])
@torch.no_grad()
def test_in_bfloat16_folding_is_off_by_rounding(kind):
    policy = with_lora(kind, torch.bfloat16)
    exact = with_lora(kind, torch.float64)
    ours, unfolded, wanted = logits(fold(policy)), logits(policy), logits(exact)
    error, usual = (ours - wanted).abs().mean(), (unfolded - wanted).abs().mean()
    assert error < 2 * usual, "folding rounds no more than bfloat16 does anyway"


@torch.no_grad()
def test_biases_are_folded_too():
    """Qwen2 has biases on query, key and value but not on its other maps."""
    policy = with_lora("qwen2")
    for name, parameter in policy.base.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    assert torch.allclose(logits(fold(policy)), logits(policy), rtol=0, atol=1e-4)


def test_a_fold_is_a_snapshot():
    policy = with_lora("llama")
    before = fold(policy)
    with torch.no_grad():
        first = logits(before)
        shake(policy.trainable_parameters(), seed=9)
        assert torch.equal(logits(before), first)
        assert not torch.allclose(logits(fold(policy)), first, atol=0.1)


def test_what_cannot_be_folded_samples_as_it_is():
    """Another family; new tokens' rows trained apart; an adapter around the head."""
    assert fold(policy_of(build_model("gpt2", attention="grpo"))) is None
    for changes in (
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ):
        model = build_model("llama", attention="grpo")
        assert fold(policy_of(get_peft_model(model, LoraConfig(r=2, **changes)))) is None
