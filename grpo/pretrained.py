"""A model and its tokenizer from a directory or the hub: which device, which dtype, 4 bits or not.

Everything that can be wrong with what was named is found here, before any work, and said in one
line: a path that is not there, an adapter in place of a model, a damaged or incomplete weight
file, a hub that does not answer, code that the model would run.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from grpo.distributed import local_rank, local_world_size
from grpo.errors import UserError

# Below this, a model is bound by overhead and not by memory: bfloat16 on a CPU would win nothing.
SMALL_MODEL = 50_000_000


def pick_device(name: str) -> torch.device:
    """ "auto" is cuda where there is one, under torchrun one for each process.

    UserError if cuda is asked for and absent, or if there are more processes than devices.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is visible; use --device cpu")
    if name == "cuda" and local_world_size() > 1:
        if local_world_size() > torch.cuda.device_count():
            raise UserError(
                f"--nproc-per-node {local_world_size()}: every process needs a GPU of its own, and "
                f"{torch.cuda.device_count()} can be seen; start fewer, or use --device cpu"
            )
        return torch.device("cuda", local_rank())
    return torch.device(name)


def pick_dtype(
    name: str, device: torch.device, frozen_base: bool, quantized: bool, parameters: int
) -> torch.dtype:
    """The dtype of the weights, from --dtype.

    "auto" is bfloat16 on a GPU that has it, else float32 (float16 overflows in training). On a CPU
    it is bfloat16 for a frozen base of SMALL_MODEL parameters or more if the CPU multiplies
    bfloat16 in hardware (AVX512-BF16 or AMX), else float32.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32
    worth_it = frozen_base and not quantized and parameters >= SMALL_MODEL
    return torch.bfloat16 if worth_it and cpu_multiplies_bfloat16() else torch.float32


def cpu_multiplies_bfloat16() -> bool:
    """torch has no public name for this question; where it has none at all the answer is no."""
    questions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, question, bool)() for question in questions)


def pretrained_config(config) -> PretrainedConfig:
    """The configuration of config.model; UserError if there is none or it is quantised already."""
    source = _local_path(config.model) or config.model
    with _explained(config.model):
        found = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    if getattr(found, "quantization_config", None) is not None:
        raise UserError(
            f"--model {config.model}: its weights are already quantised; give the model that it "
            "was made from, with --quantize nf4 if memory is short"
        )
    return found


def load_pretrained(
    config, device: torch.device, attention: str
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """(model, tokenizer) as config.model, .adapter, .dtype, .quantize and .trust_remote_code say.

    An adapter that was saved with its own tokenizer (it may have added tokens) brings that one.
    Raises UserError.
    """
    source = _local_path(config.model) or config.model
    options = {"trust_remote_code": config.trust_remote_code}
    model_config = pretrained_config(config)
    own = Path(config.adapter) if config.adapter else None
    tokenizer_source = own if own and (own / "tokenizer_config.json").is_file() else source
    with _explained(str(tokenizer_source)):
        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_source), **options)

    quantized = config.quantize == "nf4"
    frozen_base = bool(config.adapter) or config.lora_rank > 0
    parameters = 0
    if config.dtype == "auto" and device.type == "cpu" and frozen_base and not quantized:
        with _explained(config.model), torch.device("meta"):  # shapes only, no memory
            parameters = AutoModelForCausalLM.from_config(model_config, **options).num_parameters()
    dtype = pick_dtype(config.dtype, device, frozen_base, quantized, parameters)
    if quantized:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
        options["device_map"] = {"": device}
    with _explained(config.model):
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=model_config,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            **options,
        )
    _check_weights(config.model, model, report)
    return (model if quantized else model.to(device)), tokenizer


def _local_path(name: str) -> str | None:
    """The absolute path if `name` is meant as one, checked; None for a hub name (owner/name)."""
    path = Path(name).expanduser()
    meant = name.startswith((".", "/", "~")) or name.count("/") > 1
    if not meant and not path.exists():
        return None
    if not path.is_dir():
        what = "is a file, not a directory" if path.exists() else "no such directory"
        way_out = "give a model's directory or a hub name"
        if path.is_file() and path.suffix == ".gguf":
            new = shlex.quote(str(path.with_suffix("")))
            way_out = f"python -m grpo.gguf {shlex.quote(str(path))} {new} makes one: --model {new}"
        raise UserError(f"--model {name}: {what}; {way_out}")
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise UserError(
                f"--model {name}: this is a LoRA adapter; give it as --adapter {name}, and the "
                "model that it was trained on as --model"
            )
        raise UserError(f"--model {name}: it has no config.json; give a transformers model")
    for weights in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(weights, framework="pt"):  # reads the header and checks the length
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"{weights}: damaged, cannot be read ({error})") from error
    return str(path.resolve())


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """transformers' many exceptions about a model as one line with the ways out."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, KeyError):
            reason = f"its code knows no {reason}"
        if "trust_remote_code" in reason:
            raise UserError(
                f"--model {name}: it comes with Python code of its own; read that code, then allow "
                "it with --trust-remote-code"
            ) from error
        if Path(name).expanduser().is_dir():
            raise UserError(f"--model {name}: cannot be loaded ({reason[:300]})") from error
        raise UserError(
            f"--model {name}: cannot be loaded from the hub ({reason[:300]}); check the name and "
            "the network, or download it elsewhere and give its directory, as --model ./my-model; "
            "make models/SmolLM2-135M-Instruct makes a small one without the hub"
        ) from error


def _check_weights(name: str, model: nn.Module, report: dict) -> None:
    """transformers fills missing weights with random ones and goes on; nobody wants that here."""
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"--model {name}: {len(missing)} weights are missing from its files, first {missing[0]}"
        )
    for parameter_name, parameter in model.named_parameters():
        # A sum is finite only if every term is, and needs no second tensor of the weight's size.
        if parameter.is_floating_point() and not torch.isfinite(parameter.detach().sum()):
            raise UserError(f"--model {name}: {parameter_name} holds NaN or infinity")
