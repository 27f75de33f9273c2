"""LoRA by peft: a fresh adapter, or a trained one together with its frozen twin.

The trainable adapter is always called "default", the frozen copy of a trained start "reference".
Adapter weights have the dtype that the model computes in: beside a bfloat16 base, float32 ones cost
a sixth of the training time in casts and slow products. AdamW's small steps do not round to nothing
for all that, since the optimizer moves float32 masters of them (grpo/optimizer.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from grpo.errors import UserError

TRAINED = "default"
REFERENCE = "reference"
WEIGHTS = "adapter_model.safetensors"
ADAPTER_WEIGHTS = ("lora_", "trainable_tokens_delta")  # in peft's names of parameters

# Initialisations that rewrite the base weights: the frozen twin would rewrite them again.
REWRITES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def new_lora(
    model: nn.Module,
    rank: int,
    alpha: float | None,
    targets: str | Sequence[str],
    new_token_ids: Sequence[int] = (),
    seed: int = 0,
) -> PeftModel:
    """The model with a fresh adapter: its outputs are exactly the base's until the first step.

    alpha: the change is scaled by alpha / rank; None for a scale of 1.
    targets: "all-linear" (every linear layer but the output head), or names such as
    "q_proj,v_proj"; UserError for a name that no linear layer has. new_token_ids: rows of the
    embedding, and of an untied head, that are trained whole besides (new tokens have no meaning
    that a low-rank change could start from). The matrices A are drawn from `seed`.
    """
    if isinstance(targets, str):
        targets = [t.strip() for t in targets.split(",") if t.strip()]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=rank if alpha is None else alpha,
        lora_dropout=0.0,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2
        target_modules=_check_targets(model, list(targets)),
        trainable_token_indices=_token_rows(model, list(new_token_ids)),
    )
    dtype = model.get_input_embeddings().weight.dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return _finished(get_peft_model(model, config, adapter_name=TRAINED), dtype)
        except ValueError as error:  # an architecture whose layers peft cannot adapt
            reason = " ".join(str(error).split())
            raise UserError(f"--lora-targets: {reason}; name other layers, or train all") from error


def trained_lora(model: nn.Module, directory: str | Path, with_reference: bool) -> PeftModel:
    """The model with the adapter in `directory`, trainable, its dropout set to 0.

    with_reference: the same adapter a second time, frozen, under the name "reference". The policy
    that training starts from is the adapter's, so the KL must be measured from there; from the
    bare base it would not be 0 at the first step. Raises UserError for files that are missing or
    damaged, for an adapter of another model, and for the few kinds that cannot be merged.
    """
    config = _adapter_config(Path(directory))
    tensors = _adapter_tensors(Path(directory))
    config.inference_mode = False
    config.lora_dropout = 0.0
    config.init_lora_weights = True
    config.base_model_name_or_path = None  # the shapes are compared instead of the name
    dtype = model.get_input_embeddings().weight.dtype
    try:
        model = get_peft_model(model, config, adapter_name=TRAINED)
    except ValueError as error:  # names of layers that this model does not have
        reason = " ".join(str(error).split())
        raise UserError(f"--adapter {directory}: not made for this model ({reason})") from error
    hf = model.get_base_model()
    if isinstance(hf.get_output_embeddings(), LoraLayer) and _tied(hf):
        raise UserError(
            f"--adapter {directory}: it adapts an output head that shares the embedding's weights, "
            "which cannot be merged; train one without lm_head"
        )
    expected = get_peft_model_state_dict(model, adapter_name=TRAINED, save_embedding_layers=False)
    _check_tensors(directory, tensors, expected)
    set_peft_model_state_dict(model, tensors, adapter_name=TRAINED)
    if with_reference:
        model.add_adapter(REFERENCE, LoraConfig(**{**config.to_dict(), "inference_mode": True}))
        set_peft_model_state_dict(model, tensors, adapter_name=REFERENCE)
        model.set_adapter(TRAINED)
    return _finished(model, dtype)


def _check_targets(model: nn.Module, targets: list[str]) -> str | list[str]:
    if targets == ["all-linear"]:
        return "all-linear"
    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    ]
    for target in targets:
        if not any(name == target or name.endswith("." + target) for name in linear):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise UserError(f"--lora-targets: no linear layer is called '{target}'; use {known}")
    if not targets:
        raise UserError("--lora-targets: give all-linear or names of layers, as q_proj,v_proj")
    return targets


def _tied(model: nn.Module) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def _token_rows(model: nn.Module, ids: list[int]) -> dict[str, list[int]] | None:
    """peft's trainable_token_indices: {name of the module: rows}; a tied head follows by itself."""
    if not ids:
        return None
    modules = [model.get_input_embeddings()]
    if not _tied(model):
        modules.append(model.get_output_embeddings())
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(module)].rpartition(".")[2]: ids for module in modules}


def _finished(model: PeftModel, dtype: torch.dtype) -> PeftModel:
    """The adapter's weights in this dtype, and the head's width known: peft's wrapper around a head
    with trained rows hides out_features, which log-probs need."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in ADAPTER_WEIGHTS):
            parameter.data = parameter.data.to(dtype)
    head = model.get_base_model().get_output_embeddings()
    if not hasattr(head, "out_features"):
        head.out_features = head.weight.shape[0]
    return model


def _adapter_config(directory: Path) -> LoraConfig:
    path = directory / "adapter_config.json"
    if not path.is_file():
        what = "it has no adapter_config.json" if directory.is_dir() else "no such directory"
        raise UserError(f"--adapter {directory}: {what}; give a directory that peft has saved")
    try:
        json.loads(path.read_text("utf-8"))
        config = PeftConfig.from_pretrained(str(directory))
    except (ValueError, TypeError, KeyError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not the settings of an adapter ({reason})") from error
    if not isinstance(config, LoraConfig):
        raise UserError(f"{path}: a {config.peft_type} adapter; only LoRA is supported")
    init = config.init_lora_weights
    unsupported = {
        "use_dora": config.use_dora,
        f"init_lora_weights={init}": str(init).lower().startswith(REWRITES_BASE),
    }
    for name, used in unsupported.items():
        if used:
            raise UserError(f"{path}: {name} is not supported; merge it, or use plain LoRA")
    return config


def _adapter_tensors(directory: Path) -> dict[str, Tensor]:
    path = directory / WEIGHTS
    if not path.is_file():
        raise UserError(f"{path}: no such file (an adapter_model.bin, a pickle, is never read)")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged, cannot be read ({error}); use another copy") from error


def _check_tensors(
    directory: str | Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    """Never load half an adapter, or one with NaN, as if it were whole."""
    path = Path(directory) / WEIGHTS
    for name in sorted(expected.keys() & tensors.keys()):
        given, here = list(tensors[name].shape), list(expected[name].shape)
        if given != here:
            raise UserError(
                f"{path}: made for another model: {name} is {given}, this model needs {here}"
            )
    if missing := sorted(expected.keys() - tensors.keys()):
        raise UserError(
            f"{path}: {len(missing)} of {len(expected)} tensors are missing, first {missing[0]}"
        )
    if extra := sorted(tensors.keys() - expected.keys()):
        raise UserError(f"{path}: {len(extra)} tensors do not belong here, first {extra[0]}")
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{path}: {name} holds NaN or infinity; use an earlier copy")
