import json
from pathlib import Path

import pytest
import torch
from conftest import (
    build_config,
    build_model,
    logits,
    plain_logits,
    save_trained_adapter,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import grpo.pretrained
from grpo.errors import UserError
from grpo.policy import load_policy
from grpo.pretrained import load_pretrained, pick_dtype

TOKENS = ["a", "b", "c", "\n"]


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
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: fast)
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


def test_a_quantised_model_is_not_taken_as_a_base(base):
    path = Path(base) / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="already quantised"):
        load_pretrained(build_config(model=base), torch.device("cpu"), "sdpa")
