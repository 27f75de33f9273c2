"""What others load: the adapter for peft, the merged model for transformers, a card for people."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.utils.integrations import dequantize_bnb_weight
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn

from grpo.aside import written_aside
from grpo.errors import UserError
from grpo.lora import TRAINED
from grpo.policy import Policy

LIBRARIES = ("torch", "transformers", "peft", "tokenizers")


def save_adapter(policy: Policy, directory: str | Path) -> None:
    """The trainable adapter and the tokenizer; `PeftModel.from_pretrained` loads it.

    Raises UserError if there is no adapter, or if the directory cannot be written.
    """
    if not policy.has_adapter:
        raise UserError(f"{directory}: there is no adapter, all weights were trained; save merged")
    with written_aside(directory) as partial:
        policy.model.save_pretrained(
            str(partial), selected_adapters=[TRAINED], save_embedding_layers=False
        )
        (partial / "README.md").unlink(missing_ok=True)  # peft's form, not filled in
        policy.tokenizer.save_pretrained(str(partial))


def save_merged(policy: Policy, directory: str | Path) -> None:
    """One ordinary model, the adapter added into its weights; the policy itself is left as it is.

    A sum is formed in float32 and stored in the policy's dtype. A 4-bit base is merged as the
    numbers that its 4 bits stand for, which are what the adapter was trained on: the result
    answers as the policy did (over the unquantised base it would not), and is not quantised.
    Raises UserError if the directory cannot be written.
    """
    base, config = policy.base, _plain_config(policy)
    with torch.device("meta"):  # the bare architecture: no memory, no peft, no quantiser
        plain = type(base)(config)
    plain.load_state_dict(merged_weights(base, policy.dtype), assign=True)
    plain.tie_weights()
    plain.generation_config = _plain_generation_config(base)
    with written_aside(directory) as partial:
        plain.save_pretrained(str(partial))
        policy.tokenizer.save_pretrained(str(partial))


@torch.no_grad()
def merged_weights(base: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state dict that `base` would have without adapters and 4 bits, on the CPU in `dtype`."""
    state: dict[str, Tensor] = {}
    inside = None  # the wrapper whose inner modules are being passed over
    for name, module in base.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        wrapped = isinstance(module, (LoraLayer, ModulesToSaveWrapper, TrainableTokensWrapper))
        inside = f"{name}." if wrapped else None
        for key, tensor in _plain_tensors(module).items():
            stored = tensor.to("cpu", dtype) if tensor.is_floating_point() else tensor.cpu()
            state[f"{name}.{key}" if name else key] = stored.clone()
    return state


def _plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own tensors, with what its adapter adds; those of its children only if wrapped."""
    if isinstance(module, ModulesToSaveWrapper):
        return module.modules_to_save[TRAINED].state_dict()
    if isinstance(module, TrainableTokensWrapper):
        return {"weight": module.token_adapter.get_merged_weights([TRAINED])}
    if isinstance(module, LoraLayer):
        # The experts of a mixture are parameters of one module: a wrapper for each, nested.
        key = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
        tensors = _plain_tensors(module.base_layer)
        delta = module.get_delta_weight(TRAINED).float()
        return {**tensors, key: tensors[key].float() + delta}
    tensors = {key: _dequantized(p) for key, p in module.named_parameters(recurse=False)}
    for key, buffer in module.named_buffers(recurse=False):
        if key not in module._non_persistent_buffers_set:
            tensors[key] = buffer
    return tensors


def _dequantized(parameter: nn.Parameter) -> Tensor:
    quantized = getattr(parameter, "quant_state", None) is not None
    return dequantize_bnb_weight(parameter) if quantized else parameter.detach()


def _plain_config(policy: Policy):
    """The configuration as the model came with it: our attention and 4 bits are not part of it."""
    config = copy.deepcopy(policy.original_config or policy.base.config)
    config._attn_implementation = None
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    rows = policy.base.get_input_embeddings().weight.shape[0]
    config.get_text_config().vocab_size = rows
    return config


def _plain_generation_config(base: nn.Module):
    generation = copy.deepcopy(base.generation_config)
    try:
        generation.validate(strict=True)
    except ValueError:
        # Published models set a temperature and forget do_sample; transformers would not save that.
        generation.do_sample = True
    return generation


# ---------------------------------------------------------------------------------------------
# The model card


def write_model_card(
    directory: str | Path,
    policy: Policy,
    task: str,
    settings: Mapping[str, Any],
    results: Mapping[str, Any],
    method: str = "GRPO",
) -> None:
    """README.md beside exported weights: task, base model, settings, results, versions, loading.

    results may be nested, {"after grpo": {"accuracy": 0.93}}: it becomes a table. settings["model"]
    is the model that an adapter has to be loaded on.
    """
    directory = Path(directory)
    adapter = (directory / "adapter_config.json").is_file()
    base = str(settings.get("model", "scratch"))
    kind = "A LoRA adapter" if adapter else "A causal language model"
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    card = f"""{_front_matter(base, adapter)}
# {directory.name}

{kind} trained with {method} on the task `{task}`.

- Base model: {_base_line(base, settings)}
- Weights: {_weights_line(policy, adapter, settings)}
- Libraries: {versions}

## Results

{_table(("measure", "value"), _flat(results))}

## Loading

```python
{_loading(directory, base, adapter)}
```

## Settings

{_table(("setting", "value"), _flat(settings))}
"""
    partial = directory / ".README.md.partial"
    partial.write_text(card, encoding="utf-8")
    partial.replace(directory / "README.md")


def _front_matter(base: str, adapter: bool) -> str:
    lines = ["---", f"library_name: {'peft' if adapter else 'transformers'}", "tags: [grpo]"]
    if base.count("/") == 1 and not Path(base).exists() and not base.startswith((".", "~", "/")):
        lines.append(f"base_model: {json.dumps(base)}")  # only a hub name means something there
    return "\n".join([*lines, "---"])


def _base_line(base: str, settings: Mapping[str, Any]) -> str:
    text = "none, the weights began at random" if base == "scratch" else f"`{base}`"
    start = settings.get("adapter")
    return f"{text}, from the adapter `{start}`" if start else text


def _weights_line(policy: Policy, adapter: bool, settings: Mapping[str, Any]) -> str:
    quantized = settings.get("quantize") == "nf4"
    if adapter:
        how = "float32, trained on the base in NF4" if quantized else "float32"
        return f"{how}; {sum(p.numel() for p in policy.trainable_parameters().values()):,} numbers"
    dtype = str(policy.dtype).removeprefix("torch.")
    if not policy.has_adapter:
        return f"{dtype}, all trained"
    what = "the base's NF4 values, dequantised" if quantized else "the base"
    return f"{dtype}, the adapter merged into {what}"


def _loading(directory: Path, base: str, adapter: bool) -> str:
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{directory.name}")'
    if not adapter:
        model = f'model = AutoModelForCausalLM.from_pretrained("{directory.name}")'
        return "\n".join([*lines, tokenizer, model])
    return "\n".join(
        [
            "from peft import PeftModel",
            *lines,
            tokenizer,
            f'model = AutoModelForCausalLM.from_pretrained("{base}")',
            "if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:",
            "    model.resize_token_embeddings(len(tokenizer))  # training added tokens",
            f'model = PeftModel.from_pretrained(model, "{directory.name}")',
        ]
    )


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{before} / {key}" if before else str(key)
        rows.extend(_flat(value, name) if isinstance(value, Mapping) else [(name, value)])
    return rows


def _table(head: tuple[str, str], rows: list[tuple[str, Any]]) -> str:
    if not rows:
        return "None given."
    lines = [f"| {head[0]} | {head[1]} |", "| --- | --- |"]
    for name, value in rows:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        lines.append(f"| {name} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)
