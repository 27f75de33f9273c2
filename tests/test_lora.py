import pytest
import torch
from conftest import KINDS, build_config, logits, plain_logits, save_trained_adapter
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo.errors import UserError
from grpo.optimizer import build_optimizer
from grpo.policy import load_policy

TOKENS = ["a", "b", "c", "\n"]


# ---- fresh LoRA --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_fresh_lora_answers_exactly_as_the_base(saved_model, kind):
    directory = saved_model(kind)
    base = load_policy(build_config(model=directory, beta=0.0))
    fresh = load_policy(build_config(model=directory, lora_rank=4))
    assert fresh.num_layers == 2 and fresh.context_length == 64
    with fresh.reference_mode():
        reference = logits(fresh)
    assert logits(fresh).equal(reference) and reference.allclose(logits(base), atol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(directory).eval()
    assert logits(fresh).allclose(plain_logits(plain), atol=1e-4)


def test_lora_trains_its_matrices_by_float32_masters_and_nothing_else(base):
    """AdamW's step of 1e-6 on a bfloat16 weight would round to nothing."""
    policy = load_policy(build_config(model=base, lora_rank=4, dtype="bfloat16"))
    parameters = policy.trainable_parameters()
    assert len(parameters) == 2 * 7 * 2  # A and B of 7 linear layers, 2 blocks; not the head
    assert all("lora_" in name for name in parameters)
    masters = build_optimizer(parameters).masters
    assert {p.dtype for p in masters.values()} == {torch.float32}
    assert {p.dtype for p in parameters.values()} == {torch.bfloat16}
    assert {p.dtype for p in policy.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert policy.dtype == torch.bfloat16
    assert logits(policy).dtype == torch.bfloat16


def test_lora_targets_by_name(base):
    policy = load_policy(build_config(model=base, lora_rank=2, lora_targets="q_proj, v_proj"))
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in policy.trainable_parameters()}
    assert layers == {"q_proj", "v_proj"}


def test_without_an_alpha_the_scale_is_1_at_any_rank(base):
    """A fixed alpha of 32 once made --lora-rank 8 four times as strong as --lora-rank 32."""
    for rank in (2, 8):
        for alpha, scale in ((None, 1.0), (4, 4 / rank)):
            policy = load_policy(build_config(model=base, lora_rank=rank, lora_alpha=alpha))
            layers = [m for m in policy.model.modules() if isinstance(m, LoraLayer)]
            assert layers and {m.scaling["default"] for m in layers} == {scale}


@pytest.mark.parametrize("targets", ["q_proj,v_prj", "lm_head", "proj"])
def test_unknown_lora_target_lists_the_linear_layers(base, targets):
    with pytest.raises(UserError) as caught:
        load_policy(build_config(model=base, lora_rank=2, lora_targets=targets))
    message = str(caught.value)
    assert f"'{targets.split(',')[-1]}'" in message
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in message
    assert "lm_head" not in message.partition(";")[2]


def test_the_seed_decides_the_adapter_and_nothing_outside(base):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second, other = (
        load_policy(build_config(model=base, lora_rank=4, seed=seed)).trainable_parameters()
        for seed in (1, 1, 2)
    )
    name = next(n for n in first if "lora_A" in n)
    assert first[name].equal(second[name]) and not first[name].equal(other[name])
    scratch = load_policy(build_config(seed=1), TOKENS)
    assert scratch.head.weight.equal(load_policy(build_config(seed=1), TOKENS).head.weight)
    assert torch.random.get_rng_state().equal(before)


# ---- a trained adapter's files -----------------------------------------------------------------


def damage(path, how):
    tensors = load_file(path)
    if how == "half":
        tensors = dict(sorted(tensors.items())[::2])
    elif how == "nan":
        next(iter(tensors.values())).view(-1)[0] = float("nan")
    elif how == "extra":
        tensors["base_model.model.lm_head.weight"] = torch.zeros(2)
    save_file(tensors, path)
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-50])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "header":
        path.write_bytes(b"\xff" * 7 + b"\x7f" + path.read_bytes()[8:])
    elif how == "gone":
        path.unlink()


@pytest.mark.parametrize(
    "how, wanted",
    [
        ("half", "missing"),
        ("nan", "NaN"),
        ("extra", "do not belong"),
        ("cut", "damaged"),
        ("empty", "damaged"),
        ("header", "damaged"),
        ("gone", "no such file"),
    ],
)
def test_a_damaged_adapter_is_refused_by_name(base, tmp_path, how, wanted):
    adapter = save_trained_adapter(base, tmp_path / "adapter")
    damage(tmp_path / "adapter" / "adapter_model.safetensors", how)
    with pytest.raises(UserError) as caught:
        load_policy(build_config(model=base, adapter=adapter))
    assert "adapter_model.safetensors" in str(caught.value) and wanted in str(caught.value)


def test_an_adapter_of_another_width_names_both(base, saved_model, tmp_path):
    adapter = save_trained_adapter(base, tmp_path / "adapter")
    wide = saved_model("llama", hidden_size=32)
    with pytest.raises(UserError, match="made for another model.*16.*32"):
        load_policy(build_config(model=wide, adapter=adapter))


def test_an_adapter_of_another_architecture_is_refused(base, saved_model, tmp_path):
    adapter = save_trained_adapter(base, tmp_path / "adapter")
    with pytest.raises(UserError, match="not made for this model"):
        load_policy(build_config(model=saved_model("gpt2"), adapter=adapter))


@pytest.mark.parametrize("change", [{"use_dora": True}, {"init_lora_weights": "pissa"}])
def test_adapters_that_could_not_be_merged_are_refused(base, tmp_path, change):
    adapter = save_trained_adapter(base, tmp_path / "adapter", **change)
    with pytest.raises(UserError, match=next(iter(change))):
        load_policy(build_config(model=base, adapter=adapter))


@pytest.mark.parametrize("text", ["{", '{"peft_type": "NOPE"}', "[]"])
def test_broken_adapter_settings_are_named(base, tmp_path, text):
    adapter = save_trained_adapter(base, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text(text)
    with pytest.raises(UserError, match="adapter_config.json: not the settings of an adapter"):
        load_policy(build_config(model=base, adapter=adapter))
    with pytest.raises(UserError, match="--adapter .*nowhere: no such directory"):
        load_policy(build_config(model=base, adapter=str(tmp_path / "nowhere")))
