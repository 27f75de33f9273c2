import json
from pathlib import Path

import pytest
import torch
from conftest import (
    PROMPT,
    build_config,
    build_tokenizer,
    logits,
    plain_logits,
    save_trained_adapter,
    shake,
)
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.errors import UserError
from grpo.policy import load_policy

TOKENS = ["a", "b", "c", "\n"]


# ---- the reference -----------------------------------------------------------------------------


@torch.no_grad()
def test_reference_of_a_fresh_adapter_is_the_base(base):
    policy = load_policy(build_config(model=base, lora_rank=4))
    start = logits(policy)
    shake(policy.trainable_parameters())
    moved = logits(policy)
    assert not moved.allclose(start, atol=0.1)
    with policy.reference_mode():
        assert logits(policy).equal(start)
    assert logits(policy).equal(moved)


@torch.no_grad()
def test_reference_of_a_trained_adapter_is_that_adapter(base, tmp_path):
    """The bare base as reference would give a KL far from 0 at the first step."""
    adapter = save_trained_adapter(base, tmp_path / "adapter")
    policy = load_policy(build_config(model=base, adapter=adapter, lora_rank=16))
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    start = logits(policy)
    assert start.allclose(plain_logits(plain), atol=1e-4)
    assert not start.allclose(plain_logits(plain.unload()), atol=0.1)
    with policy.reference_mode():
        assert logits(policy).equal(start)
    shake(policy.trainable_parameters())
    assert not logits(policy).allclose(start, atol=0.1)
    with policy.reference_mode():
        assert logits(policy).equal(start)
    assert not any("reference" in name for name in policy.trainable_parameters())


@torch.no_grad()
def test_reference_of_full_fine_tuning_is_a_frozen_copy(base):
    policy = load_policy(build_config(model=base))
    start = logits(policy)
    shake(policy.trainable_parameters())
    with policy.reference_mode():
        assert logits(policy).equal(start)
    assert not logits(policy).allclose(start, atol=0.1)
    assert not any(p.requires_grad for p in policy.reference.parameters())
    ours = {p.data_ptr() for p in policy.model.parameters()}
    assert not ours & {p.data_ptr() for p in policy.reference.parameters()}


@pytest.mark.parametrize("start", ["fresh", "adapter", "full"])
def test_the_policy_is_back_after_an_exception_in_reference_mode(base, tmp_path, start):
    changes = {
        "fresh": {"lora_rank": 4},
        "adapter": {"adapter": save_trained_adapter(base, tmp_path / "adapter")},
        "full": {},
    }[start]
    policy = load_policy(build_config(model=base, **changes))
    names = set(policy.trainable_parameters())
    shake(policy.trainable_parameters())
    before = logits(policy)
    with pytest.raises(ZeroDivisionError), policy.reference_mode():
        assert not logits(policy).allclose(before, atol=0.1)
        raise ZeroDivisionError
    assert logits(policy).equal(before)
    assert set(policy.trainable_parameters()) == names
    logits(policy).sum().backward()
    assert all(p.grad is not None for n, p in policy.trainable_parameters().items() if "A" in n)


@pytest.mark.parametrize("changes", [{"beta": 0.0}, {"with_reference": False}])
def test_without_a_kl_term_no_reference_is_held(base, tmp_path, changes):
    adapter = save_trained_adapter(base, tmp_path / "adapter")
    with_reference = changes.pop("with_reference", True)
    full = load_policy(build_config(model=base, **changes), with_reference=with_reference)
    assert full.reference is None
    started = load_policy(
        build_config(model=base, adapter=adapter, **changes), with_reference=with_reference
    )
    assert not any("reference" in name for name, _ in started.model.named_parameters())
    for policy in (full, started):
        with pytest.raises(RuntimeError, match="no reference"), policy.reference_mode():
            pass


# ---- training ----------------------------------------------------------------------------------


def test_dropout_is_off_although_the_model_is_in_train_mode(saved_model, tmp_path):
    """With dropout on, sampler and scorer differ and the first ratio is not 1."""
    noisy = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    gpt2 = saved_model("gpt2", **noisy)
    qwen = saved_model("qwen2", attention_dropout=0.3)
    adapter = save_trained_adapter(qwen, tmp_path / "adapter", lora_dropout=0.3)
    for changes in ({"model": gpt2}, {"model": qwen}, {"model": qwen, "adapter": adapter}):
        for attention in ("grpo", "sdpa"):
            policy = load_policy(build_config(**changes), attention=attention)
            assert policy.model.training
            ids = torch.tensor([PROMPT])
            assert policy.model(ids).logits.equal(policy.model(ids).logits)


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4}, {"lora_rank": 4, "beta": 0.0}])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gradient_checkpointing_gives_the_same_gradients(saved_model, kind, changes):
    """Adapter + checkpointing once meant "does not require grad", and no gradient at all."""
    directory = saved_model(kind)
    gradients = []
    for checkpointing in (False, True):
        policy = load_policy(
            build_config(model=directory, gradient_checkpointing=checkpointing, **changes)
        )
        shake(policy.trainable_parameters())
        (logits(policy) ** 2).sum().backward()
        gradients.append({n: p.grad for n, p in policy.trainable_parameters().items()})
        assert policy.base.is_gradient_checkpointing == checkpointing
    plain, checkpointed = gradients
    assert plain and plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        assert gradient.abs().sum() > 0, name
        assert gradient.allclose(checkpointed[name], rtol=1e-4, atol=1e-5), name


def test_new_tokens_are_trained_under_lora_and_only_they(base):
    """LoRA freezes the embedding: without this, new tokens would stay near-random for ever."""
    policy = load_policy(
        build_config(model=base, lora_rank=4, add_tokens=True), new_tokens=["<|up|>", "<|left|>"]
    )
    rows = {n: p for n, p in policy.trainable_parameters().items() if "lora_" not in n}
    assert sorted(tuple(p.shape) for p in rows.values()) == [(2, 16), (2, 16)]  # embedding and head
    assert policy.head.out_features == 34 == policy.head.weight.shape[0]
    start = logits(policy).detach()
    with policy.reference_mode():
        assert logits(policy).equal(start)
        assert policy.head.out_features == 34
    before = policy.head.weight.detach().clone()
    shake(rows)
    after = policy.head.weight.detach()
    assert after[:32].equal(before[:32]) and not after[32:].allclose(before[32:], atol=0.1)


# ---- a model from scratch ----------------------------------------------------------------------


def test_scratch_is_a_small_tied_llama_over_the_tasks_tokens():
    policy = load_policy(build_config(scratch_layers=3), TOKENS)
    config = policy.base.config
    assert (config.vocab_size, config.num_hidden_layers) == (len(TOKENS) + 3, 3)
    assert config.intermediate_size == 3 * config.hidden_size == 48
    assert policy.context_length == 4096 and policy.dtype == torch.float32
    assert policy.stop_token_ids == [policy.tokenizer.eos_token_id] == [policy.end_token_id]
    assert policy.head.weight is policy.base.get_input_embeddings().weight
    assert len(policy.trainable_parameters()) == len(list(policy.base.parameters()))


def test_scratch_has_positions_for_the_longest_sequence_that_the_settings_allow():
    """20x20 mazes drawn at each step once ended in an error after the first evaluation."""
    config = build_config(max_prompt_length=5000, max_completion_length=3000)
    assert load_policy(config, TOKENS).context_length == 8000


def test_scratch_refuses_a_task_without_a_vocabulary():
    with pytest.raises(UserError, match="--model scratch: this task"):
        load_policy(build_config(), None)


# ---- stop tokens -------------------------------------------------------------------------------


def test_stop_ids_come_from_model_generation_config_and_tokenizer(saved_model):
    directory = saved_model("qwen3")
    path = Path(directory) / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [4, 2]}))
    tokenizer = build_tokenizer(
        special=["?"], chat_template="{% for m in messages %}{{ m['content'] }}?{% endfor %}"
    )
    tokenizer.save_pretrained(directory)
    policy = load_policy(build_config(model=directory))
    assert policy.stop_token_ids == [2, 4, 28]
    assert policy.end_token_id == 28  # a supervised target ends as the template's turns do


def test_a_models_own_cache_and_config_stay_out_of_training(base):
    policy = load_policy(build_config(model=base))
    assert policy.base.config.use_cache is False
    assert policy.original_config.use_cache is True
    assert AutoTokenizer.from_pretrained(base).get_vocab() == policy.tokenizer.get_vocab()
