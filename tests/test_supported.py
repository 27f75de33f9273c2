import pytest
from conftest import KINDS, build_config, logits

from grpo.errors import UserError
from grpo.policy import load_policy
from grpo.supported import check_supported

# ---- models that this project would run wrongly ------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_supported_shapes_pass(saved_model, kind, lora_rank):
    policy = load_policy(build_config(model=saved_model(kind), lora_rank=lora_rank))
    before = logits(policy)
    check_supported(policy, context=64)
    assert logits(policy).equal(before)
    assert policy.base.config._attn_implementation == "grpo"


def test_supported_in_bfloat16(base):
    check_supported(load_policy(build_config(model=base, dtype="bfloat16")), context=64)


def test_a_window_is_refused_only_if_a_text_could_be_longer(saved_model):
    window = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}
    policy = load_policy(build_config(model=saved_model("qwen2", **window)))
    assert "sliding_attention" in policy.base.config.layer_types
    check_supported(policy, context=32)
    with pytest.raises(UserError, match="32 tokens.*up to 33.*--max-completion-length"):
        check_supported(policy, context=33)


@pytest.mark.parametrize(
    "name, value",
    [("final_logit_softcapping", 30.0), ("logits_scaling", 8.0), ("attn_logit_softcapping", 50.0)],
)
def test_logits_changed_behind_the_head_are_refused(base, name, value):
    policy = load_policy(build_config(model=base))
    setattr(policy.base.config, name, value)
    with pytest.raises(UserError, match=f"{name} {value}"):
        check_supported(policy, context=16)


@pytest.mark.parametrize("kind", ["linear_attention", "mamba"])
def test_layers_without_attention_are_refused(base, kind):
    policy = load_policy(build_config(model=base))
    policy.base.config.layer_types = ["full_attention", kind]
    with pytest.raises(UserError, match=f"{kind} layers are not supported"):
        check_supported(policy, context=16)


def test_whatever_else_differs_is_found_by_the_trial(base):
    """For example a scale that no configuration tells of."""
    policy = load_policy(build_config(model=base))
    forward = policy.base.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.1
        return output

    policy.base.forward = scaled
    with pytest.raises(UserError, match="does not reproduce"):
        check_supported(policy, context=16)
    policy.base.forward = forward
    decoder_forward = policy.decoder.forward

    def without_layout(input_ids, position_ids, attention_mask, use_cache):
        return decoder_forward(input_ids=input_ids)

    policy.decoder.forward = without_layout
    with pytest.raises(UserError, match="Qwen2ForCausalLM does not take"):
        check_supported(policy, context=16)
