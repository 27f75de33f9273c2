import errno
import json
from pathlib import Path

import pytest
import torch
from conftest import (
    KINDS,
    PROMPT,
    build_config,
    build_tokenizer,
    logits,
    plain_logits,
    save_trained_adapter,
    shake,
)
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

import grpo.export
from grpo.errors import UserError
from grpo.export import save_adapter, save_merged, write_model_card, written_aside
from grpo.policy import load_policy

TOKENS = ["a", "b", "c", "\n", *"defghij"]


def moved(**changes):
    """A policy with its trainable weights shaken, as if trained, and its logits."""
    policy = load_policy(build_config(**changes), TOKENS, new_tokens=["<|up|>", "<|left|>"])
    shake(policy.trainable_parameters())
    with torch.no_grad():
        return policy, logits(policy)


@torch.no_grad()
def merged_logits(directory):
    return plain_logits(AutoModelForCausalLM.from_pretrained(directory).eval())


# ---- the merged model in plain transformers ----------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_merged_equals_the_adapter(saved_model, tmp_path, kind):
    policy, expected = moved(model=saved_model(kind), lora_rank=4)
    save_merged(policy, tmp_path / "merged")
    assert merged_logits(tmp_path / "merged").allclose(expected, atol=1e-4)
    with torch.no_grad():
        assert logits(policy).equal(expected)  # saving has not touched the policy


def test_merged_of_a_trained_adapter_is_not_of_the_reference(saved_model, tmp_path):
    base = saved_model("llama")
    adapter = save_trained_adapter(base, tmp_path / "adapter", lora_alpha=16, use_rslora=True)
    policy, expected = moved(model=base, adapter=adapter)
    save_merged(policy, tmp_path / "merged")
    assert merged_logits(tmp_path / "merged").allclose(expected, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_merged_with_new_tokens_holds_their_trained_rows(saved_model, tmp_path, tied):
    base = saved_model("qwen3", tie_word_embeddings=tied)
    policy, expected = moved(model=base, lora_rank=4, add_tokens=True)
    save_merged(policy, tmp_path / "merged")
    assert expected.shape[1] == 34
    assert merged_logits(tmp_path / "merged").allclose(expected, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer("a<|left|>").input_ids == [3, 33]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embedding is head) == tied
    reloaded = load_policy(build_config(model=str(tmp_path / "merged"), lora_rank=2))
    assert logits(reloaded).allclose(expected, atol=1e-4)


def test_merged_of_a_4_bit_base_answers_as_the_policy_did(saved_model, tmp_path):
    """Over the unquantised base the adapter would meet weights that it was never trained on."""
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
    base = saved_model("llama", **sizes)
    policy, expected = moved(model=base, lora_rank=4, quantize="nf4")
    save_merged(policy, tmp_path / "merged")
    assert merged_logits(tmp_path / "merged").allclose(expected, atol=1e-4)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float32"
    with torch.no_grad():
        assert logits(policy).equal(expected)


def test_merged_mixture_of_experts_has_every_experts_adapter(tmp_path):
    """peft wraps the experts as parameters of one module, one wrapper within the other."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.5}
    config = MixtralConfig(**sizes, **heads, **ends, num_local_experts=4, num_experts_per_tok=2)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    policy, expected = moved(model=str(tmp_path / "model"), lora_rank=4)
    assert any("experts" in name for name in policy.trainable_parameters())
    save_merged(policy, tmp_path / "merged")
    assert merged_logits(tmp_path / "merged").allclose(expected, atol=1e-4)


def test_merged_of_full_fine_tuning(saved_model, tmp_path):
    policy, expected = moved(model=saved_model("gpt2"))
    save_merged(policy, tmp_path / "merged")
    assert merged_logits(tmp_path / "merged").allclose(expected, atol=1e-4)


def test_merged_in_bfloat16_keeps_the_dtype_and_rounds_once(saved_model, tmp_path):
    base = saved_model("qwen2", initializer_range=0.1)
    policy, expected = moved(model=base, lora_rank=4, dtype="bfloat16")
    save_merged(policy, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert model.dtype == torch.bfloat16
    assert plain_logits(model).allclose(expected, rtol=0.05, atol=0.15)


def test_merged_brings_nothing_of_ours_along(saved_model, tmp_path):
    policy, _ = moved(model=saved_model("qwen2", attention_dropout=0.3), lora_rank=4)
    save_merged(policy, tmp_path / "merged")
    text = (tmp_path / "merged" / "config.json").read_text()
    config = json.loads(text)
    assert "grpo" not in text
    assert config["attention_dropout"] == 0.3 and config.get("use_cache", True)
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert not any("lora" in name or "base_layer" in name for name in weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([PROMPT])
    longer = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert longer.shape == (1, 6)


def test_a_published_generation_config_that_contradicts_itself_can_be_saved(saved_model, tmp_path):
    base = saved_model("llama")
    path = Path(base) / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [2, 4], "temperature": 0.6}))
    policy, _ = moved(model=base, lora_rank=2)
    save_merged(policy, tmp_path / "merged")
    generation = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").generation_config
    assert generation.eos_token_id == [2, 4] and generation.temperature == 0.6


def test_scratch_goes_to_plain_transformers_and_back(tmp_path):
    policy, expected = moved(scratch_layers=3)
    save_merged(policy, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert tokenizer("abc\n").input_ids == [3, 4, 5, 6]
    assert tokenizer.decode([3, 4, 5, 6]) == "abc\n"
    assert model.config.eos_token_id == tokenizer.eos_token_id == 1
    assert plain_logits(model).allclose(expected, atol=1e-4)
    again = load_policy(build_config(model=str(tmp_path / "model")))
    assert logits(again).equal(logits(policy))
    assert again.stop_token_ids == policy.stop_token_ids


# ---- the adapter in plain peft -----------------------------------------------------------------


@pytest.mark.parametrize("start", ["fresh", "trained"])
@torch.no_grad()
def test_adapter_loads_in_plain_peft(saved_model, tmp_path, start):
    base = saved_model("qwen2")
    changes = {"lora_rank": 4}
    if start == "trained":
        changes = {"adapter": save_trained_adapter(base, tmp_path / "start")}
    policy, expected = moved(model=base, **changes)
    save_adapter(policy, tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["lora_alpha"] == 8 and settings["r"] == 4
    assert settings["base_model_name_or_path"] == base
    names = {p.name for p in (tmp_path / "adapter").iterdir()}
    assert names >= {"adapter_model.safetensors", "tokenizer.json"}
    assert not names & {"reference", "README.md"}
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
    ).eval()
    assert plain_logits(plain).allclose(expected, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_adapter_with_new_tokens_comes_back_as_the_start(saved_model, tmp_path, tied):
    base = saved_model("qwen3", tie_word_embeddings=tied)
    policy, expected = moved(model=base, lora_rank=4, add_tokens=True)
    save_adapter(policy, tmp_path / "adapter")
    config = build_config(model=base, adapter=str(tmp_path / "adapter"), add_tokens=True)
    again = load_policy(config, new_tokens=["<|up|>", "<|left|>"])
    assert logits(again).allclose(expected, atol=1e-5)
    with again.reference_mode():
        assert logits(again).equal(logits(again)) and logits(again).allclose(expected, atol=1e-5)
    assert again.head.out_features == 34
    with pytest.raises(UserError, match="--add-tokens: the adapter .* without"):
        load_policy(config, new_tokens=["<|down|>"])
    plain = AutoModelForCausalLM.from_pretrained(base)
    plain.resize_token_embeddings(34)
    plain = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    assert plain_logits(plain).allclose(expected, atol=1e-4)


def test_without_an_adapter_there_is_none_to_save(tmp_path):
    policy, _ = moved()
    with pytest.raises(UserError, match="no adapter"):
        save_adapter(policy, tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


# ---- nothing is lost ---------------------------------------------------------------------------


def test_a_kill_while_saving_leaves_the_old_export_whole(tmp_path, monkeypatch):
    policy, expected = moved()
    save_merged(policy, tmp_path / "model")
    shake(policy.trainable_parameters(), seed=1)
    write = PreTrainedModel.save_pretrained

    def killed(self, directory, *args, **kwargs):
        write(self, directory, *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", killed)
    with pytest.raises(KeyboardInterrupt):
        save_merged(policy, tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert merged_logits(tmp_path / "model").allclose(expected, atol=1e-4)
    monkeypatch.undo()
    save_merged(policy, tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert merged_logits(tmp_path / "model").allclose(logits(policy), atol=1e-4)


def test_what_an_earlier_kill_left_behind_is_no_obstacle(tmp_path):
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "model.safetensors").write_text("half")
    policy, expected = moved()
    save_merged(policy, tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert merged_logits(tmp_path / "model").allclose(expected, atol=1e-4)


def test_a_full_disk_is_one_line_and_the_old_export_stays(tmp_path, monkeypatch):
    policy, expected = moved()
    save_merged(policy, tmp_path / "model")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(UserError, match="model: cannot be written.*No space left"):
        save_merged(policy, tmp_path / "model")
    assert merged_logits(tmp_path / "model").allclose(expected, atol=1e-4)


def test_if_the_last_rename_fails_the_old_export_comes_back(tmp_path, monkeypatch):
    target = tmp_path / "model"
    with written_aside(target) as partial:
        (partial / "a.safetensors").write_text("old")
    rename = Path.rename

    def fails(self, other):
        if self.name.endswith(".partial"):
            raise OSError("no")
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(UserError), written_aside(target) as partial:
        (partial / "a.safetensors").write_text("new")
    assert (target / "a.safetensors").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_other_peoples_files_are_not_swept_away(tmp_path):
    (tmp_path / "thesis.txt").write_text("the only copy")
    with pytest.raises(UserError, match="something else"), written_aside(tmp_path):
        pass
    with pytest.raises(UserError, match="something else"), written_aside(tmp_path / "thesis.txt"):
        pass
    assert (tmp_path / "thesis.txt").read_text() == "the only copy"


# ---- the card ----------------------------------------------------------------------------------


def test_model_card_states_task_base_settings_results_and_how_to_load(saved_model, tmp_path):
    base = saved_model("llama")
    policy, _ = moved(model=base, lora_rank=4)
    settings = {"model": base, "adapter": None, "lora_rank": 4, "beta": 0.04, "quantize": "none"}
    results = {"before": {"accuracy": 0.5}, "after grpo": {"accuracy": 0.9123456}}
    for save, loading in (
        (save_adapter, 'PeftModel.from_pretrained(model, "out")'),
        (save_merged, 'AutoModelForCausalLM.from_pretrained("out")'),
    ):
        save(policy, tmp_path / "out")
        write_model_card(tmp_path / "out", policy, "maze", settings, results)
        card = (tmp_path / "out" / "README.md").read_text()
        for part in (
            "task `maze`", f"`{base}`", "| lora_rank | 4 |", "| beta | 0.04 |",
            "| after grpo / accuracy | 0.9123 |", f"torch {torch.__version__}", loading,
        ):  # fmt: skip
            assert part in card, part
        assert card.startswith("---\nlibrary_name: ") and "base_model:" not in card
        assert not list((tmp_path / "out").glob("*.partial"))


def test_the_cards_loading_code_runs(saved_model, tmp_path, monkeypatch):
    base = saved_model("qwen3")
    policy, expected = moved(model=base, lora_rank=4, add_tokens=True)
    monkeypatch.chdir(tmp_path)
    for save in (save_adapter, save_merged):
        save(policy, "out")
        write_model_card("out", policy, "maze", {"model": base}, {})
        code = (tmp_path / "out" / "README.md").read_text().split("```")[1].removeprefix("python")
        scope = {}
        exec(code, scope)
        with torch.no_grad():
            assert plain_logits(scope["model"].eval()).allclose(expected, atol=1e-4)


def test_card_names_a_hub_base_where_the_hub_looks_for_it():
    front = grpo.export._front_matter("Qwen/Qwen2.5-0.5B-Instruct", adapter=True)
    assert 'base_model: "Qwen/Qwen2.5-0.5B-Instruct"' in front and "library_name: peft" in front
