"""A GGUF file as an ordinary transformers directory:  python -m grpo.gguf FILE.gguf DIR

GGUF is the one-file format of llama.cpp, its weights mostly in blocks of a few bits. transformers
can read it, slowly, and will not save what it has read. Converted once, the model is like any
other: config.json, model.safetensors, generation_config.json, the tokenizer and its chat template.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from tokenizers import pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from grpo.aside import written_aside
from grpo.errors import UserError, exit_status
from grpo.flags import FlagParser
from grpo.tokenizer import find_stop_token_ids

MAGIC = b"GGUF"
# Vocabularies, by llama.cpp's names, in which each digit stands alone, so that the spaces before a
# number are a piece of text of their own. transformers splits their text as GPT-2 does.
DIGITS_ALONE = {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 when done, 2 for a mistake of the user's, 130 when stopped by a signal."""
    parser = FlagParser(
        prog="python -m grpo.gguf",
        description="Convert a GGUF file into a directory for --model, about half a minute.",
    )
    parser.add_argument("file", metavar="FILE.gguf", type=Path)
    parser.add_argument("directory", metavar="DIR", type=Path, help="new, or empty")
    # The slow part has a bar of its own; what else they say is for other uses of the file.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    def work(argv: Sequence[str]) -> int:
        given = parser.parse_args(argv)
        print(convert(given.file, given.directory))
        return 0

    return exit_status(work, argv, "stopped; nothing was written")


def convert(file: Path, directory: Path) -> str:
    """Write the model of `file` into `directory`, whole or not at all; returns a line about it.

    Raises UserError if the file is no GGUF of a causal language model that transformers knows, if
    the directory holds something already, or if the package gguf is missing.
    """
    _check(file, directory)
    with _explained(file):
        dtype, splitting = _look_into(file)
        model, report = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=dtype, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    if missing := sorted(report["missing_keys"]):  # they were filled with random numbers
        raise UserError(f"{file}: {len(missing)} weights are missing from it, first {missing[0]}")
    _name_special_tokens(tokenizer, model.config)
    if splitting in DIGITS_ALONE:
        _split_digits(tokenizer)
    _forget_gguf(model)
    model.generation_config = _generation_config(model, tokenizer)
    with written_aside(directory.resolve()) as partial:  # "." has no name of its own
        model.save_pretrained(str(partial))
        tokenizer.save_pretrained(str(partial))
    said = f"{type(model).__name__}, {model.num_parameters():,} parameters"
    chat = "" if tokenizer.chat_template else "; no chat template: use --prompt-format plain"
    return f"{directory}: {said}, {str(dtype).removeprefix('torch.')}{chat}"


def _check(file: Path, directory: Path) -> None:
    """What can be known without reading the file."""
    if not file.is_file():
        what = "is a directory" if file.is_dir() else "no such file"
        raise UserError(f"{file}: {what}; give a GGUF file")
    try:
        with open(file, "rb") as opened:
            magic = opened.read(len(MAGIC))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error
    if magic != MAGIC:
        raise UserError(f"{file}: not a GGUF file (it does not begin with the letters GGUF)")
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise UserError(f"{directory}: exists and is not an empty directory; give another name")
    if importlib.util.find_spec("gguf") is None:
        raise UserError("reading GGUF needs the package gguf: pip install gguf")


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """What three libraries raise over a damaged or unknown file, as one line."""
    damaged = (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError)
    try:
        yield
    except (*damaged, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{file}: cannot be read ({type(error).__name__}: {reason}); it may be damaged, or of "
            "an architecture that transformers does not read from GGUF"
        ) from error


def _look_into(file: Path) -> tuple[torch.dtype, str]:
    """(dtype to save in, llama.cpp's name of the way its vocabulary splits text).

    bfloat16 where it loses nothing that counts, else float32. A block of n <= 8 bits has rounded
    its numbers to steps of at least 1/127 of its largest, and is off by up to half of one;
    bfloat16, with 8 significant bits, is off by up to 1/512 of a number: at most half of that
    error, and in 4 bits a thirtieth. Matrices stored as numbers must come through unchanged, as
    those of a model that was trained in bfloat16 do.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)
    field = reader.get_field("tokenizer.ggml.pre")
    matrices = (t.data for t in reader.tensors if len(t.shape) > 1 and t.data.dtype.kind == "f")
    exact = all(_is_bfloat16(torch.tensor(numbers)) for numbers in matrices)
    return torch.bfloat16 if exact else torch.float32, field.contents() if field else ""


def _is_bfloat16(numbers: torch.Tensor) -> bool:
    return numbers.to(torch.bfloat16).to(numbers.dtype).equal(numbers)


def _name_special_tokens(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """The tokenizer as the file says: transformers 5.17 takes SmolLM's first token for its eos."""
    for role in ("bos", "eos", "pad"):
        number = getattr(config, f"{role}_token_id", None)
        if isinstance(number, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(number))


def _split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])


def _forget_gguf(model: nn.Module) -> None:
    """The weights are plain by now, but while it is marked as quantised it cannot be saved."""
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _generation_config(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """A file names one end token; the chat template may close a turn with another one."""
    stops = find_stop_token_ids(tokenizer, model.config)
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=stops[0] if len(stops) == 1 else stops,
        pad_token_id=tokenizer.pad_token_id,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
