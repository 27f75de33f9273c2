"""Tiny models and tokenizers for every test; nothing here or below asks the network."""

import importlib.util
import json
import logging
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

# It warns when it is imported that it lacks an optional package.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: a hub name fails at once

import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo.packing import Group, pack  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)  # the shapes are too small to share out

PROMPT, COMPLETIONS = [3, 4, 5], [[6, 7, 8, 2], [9, 10, 2]]
CASES = Path(__file__).parent / "cases"
KINDS = ("llama", "qwen2", "qwen3", "gpt2")
MARKOV_TOKENS = ["<pad>", "<bos>", "<eos>", "<end>", "a", "b", "c", "d"]


def load_script(path, monkeypatch):
    """A script as a module, with its own folder on the path as when it is run."""
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def load_cases(name):
    """The contents of tests/cases/<name>.json."""
    return json.loads((CASES / f"{name}.json").read_text("utf-8"))


def build_model(kind="llama", attention="sdpa", seed=0, **changes):
    """A random model of 2 layers, vocabulary 32, float32, eval; its head is not tied (GPT-2's is).

    "llama" and "gpt2" are the fixtures random-llama and random-gpt2 of generation_cases.json.
    """
    common = {
        "vocab_size": 32,
        "initializer_range": 0.5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": attention,
    }
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    gpt2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config_class, model_class, own = {
        "llama": (LlamaConfig, LlamaForCausalLM, sizes),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM, sizes),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, sizes | {"head_dim": 8}),
        "gpt2": (GPT2Config, GPT2LMHeadModel, gpt2),
    }[kind]
    torch.manual_seed(seed)
    return model_class(config_class(**{**common, **own, **changes})).eval()


def build_markov(attention="sdpa"):
    """The fixture "markov" of generation_cases.json: logits depend on the last token alone."""
    table = torch.tensor(
        load_cases("generation_cases")["fixtures"]["markov"]["next_logits_by_last_token"]
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            rms_norm_eps=1e-12,
            tie_word_embeddings=False,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=[2, 3],
            attn_implementation=attention,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(8))
        model.lm_head.weight.copy_(table.T / math.sqrt(8))
    return model.eval()


def build_tokenizer(vocabulary=None, *, special=(), adds_bos=False, chat_template=None):
    """A word-level tokenizer over exactly these strings; <pad>, <bos>, <eos> if it has them.

    By default 32 strings, to go with `build_model`; text outside them becomes the first of them.
    special: those to be flagged as special tokens.
    """
    if vocabulary is None:
        # transformers adds <|endoftext|> to whatever tokenizer lies beside a Qwen2 model.
        letters = "abcdefghijklmnopqrstuvwxy? \n"
        vocabulary = ["<pad>", "<bos>", "<eos>", *letters, "<|endoftext|>"]
    ids = {token: index for index, token in enumerate(vocabulary)}
    backend = Tokenizer(models.WordLevel(ids, unk_token=vocabulary[0]))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    ordinary = [t for t in vocabulary if len(t) > 1 and t not in special]
    backend.add_tokens([AddedToken(t, normalized=False) for t in ordinary])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])]
        )
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=chat_template,
        **{role: token for role, token in names.items() if token in ids},
    )


def build_config(**changes):
    """The settings that grpo.policy reads, as few and plain as possible."""
    settings = {
        "model": "scratch",
        "adapter": None,
        "seed": 0,
        "device": "cpu",
        "dtype": "auto",
        "quantize": "none",
        "trust_remote_code": False,
        "add_tokens": False,
        "prompt_format": "chat",
        "scratch_hidden_size": 16,
        "scratch_layers": 2,
        "scratch_heads": 2,
        "lora_rank": 0,
        "lora_alpha": 8,
        "lora_targets": "all-linear",
        "max_prompt_length": 16,
        "max_completion_length": 16,
        "beta": 0.04,
        "gradient_checkpointing": False,
    }
    settings |= changes
    return SimpleNamespace(**settings, max_episode_length=settings["max_completion_length"])


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
def make_model():
    return build_model


@pytest.fixture
def markov_model():
    return build_markov()


@pytest.fixture
def make_tokenizer():
    return build_tokenizer


@pytest.fixture
def make_config():
    return build_config


@pytest.fixture
def saved_model(tmp_path):
    """save(kind, **changes) -> the directory of a tiny model and its tokenizer."""

    def save(kind="llama", tokenizer=None, **changes):
        directory = tmp_path / f"model-{kind}"
        build_model(kind, **changes).save_pretrained(directory)
        (tokenizer or build_tokenizer()).save_pretrained(directory)
        return str(directory)

    return save


@pytest.fixture
def base(saved_model):
    return saved_model("qwen2")
