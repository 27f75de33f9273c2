import json
from pathlib import Path

import pytest
import torch
from conftest import KINDS, build_config, build_model, build_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo.pretrained
from grpo.errors import UserError
from grpo.packing import Group, pack
from grpo.policy import load_policy
from grpo.pretrained import load_pretrained, pick_dtype
from grpo.supported import check_supported

PROMPT, COMPLETIONS = [3, 4, 5], [[6, 7, 8, 2], [9, 10, 2]]
TOKENS = ["a", "b", "c", "\n"]


def logits(policy):
    """[completion tokens, V] as training computes them."""
    batch = pack([Group(PROMPT, COMPLETIONS, [0, 1])], "cpu")
    hidden = policy.hidden_states(batch.input_ids, batch.position_ids, batch.layout)[0]
    return policy.head(hidden[batch.source])


def plain_logits(model, prompt=tuple(PROMPT), completions=tuple(COMPLETIONS)):
    """The same by transformers' own forward pass, one row at a time."""
    rows = [
        model(torch.tensor([[*prompt, *c]])).logits[0, len(prompt) - 1 : -1] for c in completions
    ]
    return torch.cat(rows)


def shake(parameters, seed=0):
    """Random adapter weights: what training would have made of them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def save_trained_adapter(model_directory, directory, **changes):
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **changes}
    model = AutoModelForCausalLM.from_pretrained(model_directory)
    peft_model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    shake({n: p for n, p in peft_model.named_parameters() if p.requires_grad})
    peft_model.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def base(saved_model):
    return saved_model("qwen2")


# ---- fresh LoRA --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_fresh_lora_answers_exactly_as_the_base(saved_model, kind):
    directory = saved_model(kind)
    base = load_policy(build_config(model=directory, beta=0.0))
    fresh = load_policy(build_config(model=directory, lora_rank=4))
    assert fresh.num_layers == 2 and fresh.context_length == 64
    assert logits(fresh).equal(logits(base))
    plain = AutoModelForCausalLM.from_pretrained(directory).eval()
    assert logits(fresh).allclose(plain_logits(plain), atol=1e-4)


def test_lora_trains_float32_matrices_and_nothing_else(base):
    policy = load_policy(build_config(model=base, lora_rank=4, dtype="bfloat16"))
    parameters = policy.trainable_parameters()
    assert len(parameters) == 2 * 7 * 2  # A and B of 7 linear layers, 2 blocks; not the head
    assert all("lora_" in name for name in parameters)
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    assert {p.dtype for p in policy.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert policy.dtype == torch.bfloat16
    assert logits(policy).dtype == torch.bfloat16


def test_lora_targets_by_name(base):
    policy = load_policy(build_config(model=base, lora_rank=2, lora_targets="q_proj, v_proj"))
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in policy.trainable_parameters()}
    assert layers == {"q_proj", "v_proj"}


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


# ---- dtype, device, 4 bits ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, device, frozen, quantized, parameters, fast, expected",
    [
        ("auto", "cpu", True, False, 49_999_999, True, torch.float32),  # too small to gain
        ("auto", "cpu", True, False, 50_000_000, True, torch.bfloat16),
        ("auto", "cpu", True, False, 50_000_000, False, torch.float32),
        ("auto", "cpu", False, False, 50_000_000, True, torch.float32),  # full fine-tuning
        ("auto", "cpu", True, True, 50_000_000, True, torch.float32),  # 4 bits on a CPU
        ("bfloat16", "cpu", False, False, 1, False, torch.bfloat16),
        ("float32", "cuda", True, False, 10**9, True, torch.float32),
        ("auto", "cuda", True, False, 1, True, torch.bfloat16),
        ("auto", "cuda", False, False, 1, False, torch.float32),  # never float16
    ],
)
def test_dtype_by_device(monkeypatch, name, device, frozen, quantized, parameters, fast, expected):
    monkeypatch.setattr(grpo.pretrained, "cpu_multiplies_bfloat16", lambda: fast)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: fast)
    assert pick_dtype(name, torch.device(device), frozen, quantized, parameters) == expected


def test_the_size_of_the_model_is_known_before_its_weights_are_read(base, monkeypatch):
    monkeypatch.setattr(grpo.pretrained, "cpu_multiplies_bfloat16", lambda: True)
    size = build_model("qwen2").num_parameters()
    for limit, dtype in ((size, torch.bfloat16), (size + 1, torch.float32)):
        monkeypatch.setattr(grpo.pretrained, "SMALL_MODEL", limit)
        assert load_policy(build_config(model=base, lora_rank=2)).dtype == dtype


def test_cuda_without_cuda_is_refused(base, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda"):
        load_policy(build_config(model=base, device="cuda"))
    assert load_policy(build_config(model=base, device="auto")).device.type == "cpu"


def test_nf4_base_with_lora_trains_on_the_cpu(saved_model):
    pytest.importorskip("bitsandbytes")
    directory = saved_model("llama", hidden_size=64, intermediate_size=128, initializer_range=0.1)
    policy = load_policy(build_config(model=directory, quantize="nf4", lora_rank=4))
    from bitsandbytes.nn import Params4bit

    base = policy.base.model.layers[0].self_attn.q_proj.base_layer.weight
    assert isinstance(base, Params4bit) and base.quant_state.quant_type == "nf4"
    plain = AutoModelForCausalLM.from_pretrained(directory).eval()
    near, exact = logits(policy), plain_logits(plain)
    assert 0 < (near - exact).norm() / exact.norm() < 0.3  # 4 bits, but the same model
    with policy.reference_mode(), torch.no_grad():
        assert logits(policy).equal(near)
    near.sum().backward()
    gradients = {n: p.grad for n, p in policy.trainable_parameters().items()}
    assert all(g is not None and g.isfinite().all() for g in gradients.values())
    assert all(g.abs().sum() > 0 for n, g in gradients.items() if "lora_B" in n)


@pytest.mark.parametrize(
    "changes, wanted",
    [
        ({"quantize": "nf4"}, "--lora-rank"),
        ({"model": "scratch", "quantize": "nf4", "lora_rank": 4}, "scratch"),
        ({"model": "scratch", "adapter": "x"}, "--adapter"),
    ],
)
def test_what_cannot_be_trained_is_refused(base, changes, wanted):
    with pytest.raises(UserError, match=wanted):
        load_policy(build_config(**{"model": base, **changes}), TOKENS)


# ---- what was named ----------------------------------------------------------------------------


def test_missing_directory_is_said_at_once_without_the_network(monkeypatch):
    def no_network(*args, **kwargs):
        raise AssertionError("asked transformers for a path that does not exist")

    monkeypatch.setattr(grpo.pretrained.AutoConfig, "from_pretrained", no_network)
    for name in ("./no-such-model", "/no/such/no-such-model", "runs/a/no-such-model"):
        with pytest.raises(UserError, match="no-such-model: no such directory"):
            load_policy(build_config(model=name))


def test_a_hub_name_without_the_hub_is_one_line_with_the_ways_out():
    with pytest.raises(UserError) as caught:
        load_policy(build_config(model="nobody/no-such-model"))
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in ("nobody/no-such-model", "network", "./my-model"))


def test_an_adapter_given_as_the_model_says_where_it_belongs(base, tmp_path):
    adapter = save_trained_adapter(base, tmp_path / "adapter")
    with pytest.raises(UserError, match="LoRA adapter; give it as --adapter"):
        load_policy(build_config(model=adapter))


def test_a_file_or_an_empty_directory_is_no_model(tmp_path):
    (tmp_path / "weights.gguf").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, wanted in (("weights.gguf", "is a file"), ("empty", "no config.json")):
        with pytest.raises(UserError, match=wanted):
            load_policy(build_config(model=str(tmp_path / name)))


def test_a_damaged_or_incomplete_weight_file_is_never_loaded_as_if_whole(base):
    weights = Path(base) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="model.safetensors: damaged"):
        load_policy(build_config(model=base))
    weights.write_bytes(whole)
    tensors = load_file(weights)
    bad = dict(tensors)
    bad["model.norm.weight"] = torch.full_like(bad["model.norm.weight"], float("nan"))
    save_file(bad, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match="model.norm.weight holds NaN"):
        load_policy(build_config(model=base))
    del tensors["model.norm.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match="missing.*model.norm.weight"):
        load_policy(build_config(model=base))


def test_code_that_comes_with_a_model_runs_only_by_the_flag(base):
    path = Path(base) / "config.json"
    config = json.loads(path.read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.OwnConfig"}}
    path.write_text(json.dumps(config))
    (Path(base) / "code.py").write_text("raise SystemExit('the code ran')\n")
    with pytest.raises(UserError, match="--trust-remote-code"):
        load_policy(build_config(model=base))


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


def test_scratch_refuses_sizes_and_tasks_that_do_not_work():
    with pytest.raises(UserError, match="--scratch-hidden-size 20.*--scratch-heads 3.*use 18"):
        load_policy(build_config(scratch_hidden_size=20, scratch_heads=3), TOKENS)
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


def test_a_quantised_model_is_not_taken_as_a_base(base):
    path = Path(base) / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="already quantised"):
        load_pretrained(build_config(model=base), torch.device("cpu"), "sdpa")


def test_a_models_own_cache_and_config_stay_out_of_training(base):
    policy = load_policy(build_config(model=base))
    assert policy.base.config.use_cache is False
    assert policy.original_config.use_cache is True
    assert AutoTokenizer.from_pretrained(base).get_vocab() == policy.tokenizer.get_vocab()
