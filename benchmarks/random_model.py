"""A model of Qwen2's architecture with random weights, as an ordinary transformers directory.

Beside it problems.json: chats of one message each, to train on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

PROBLEMS = 64  # different prompts of the training steps
SHARD_BYTES = 2 * 10**9
INITIAL_STD = 0.02
END, START, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
SPECIAL = (END, START, PAD)  # ids 0, 1, 2
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
AROUND = 3  # tokens that the template writes around a prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where to write")
    parser.add_argument("--config", type=json.loads, required=True, help="of Qwen2Config, as JSON")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of the longest chat")
    parser.add_argument("--device", default="cpu", help="where the weights are drawn")
    args = parser.parse_args()
    write_model(args.config, args.prompt_tokens, Path(args.folder), args.device)


def write_model(shape: dict, prompt_tokens: int, folder: Path, device: str) -> None:
    """A transformers directory: config, weights in bfloat16, tokenizer; and problems.json.

    The weights are drawn one by one on the device and written in shards, so that a large model
    takes little memory. An end in one line where the disk is too small.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ids = {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": SPECIAL.index(PAD)}
    config = Qwen2Config(**shape, **ids, dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = dict(model.named_parameters())
    if config.tie_word_embeddings:
        parameters.pop("lm_head.weight", None)
    total = 2 * sum(p.numel() for p in parameters.values())
    if (free := shutil.disk_usage(folder).free) < total:
        sys.exit(f"{total / 1e9:.0f} GB are needed in {folder}, {free / 1e9:.0f} are free")

    random = torch.Generator(device).manual_seed(0)
    files, shard = {}, {}
    for name, meta in parameters.items():
        shard[name] = initial(name, meta.shape, random).cpu()
        whole = len(files) + len(shard) == len(parameters)
        if whole or sum(weight.nbytes for weight in shard.values()) >= SHARD_BYTES:
            file = f"model-{len(set(files.values())) + 1:05}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            files |= dict.fromkeys(shard, file)
            shard = {}
    index_file = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tokenizer(shape["vocab_size"]).save_pretrained(folder)
    (folder / "problems.json").write_text(json.dumps(problems(prompt_tokens)))


def initial(name: str, shape, random):
    """Scales of norms 1, biases 0, all else normal."""
    weight = torch.empty(shape, dtype=torch.bfloat16, device=random.device)
    if len(shape) > 1:
        return weight.normal_(std=INITIAL_STD, generator=random)
    return weight.zero_() if name.endswith("bias") else weight.fill_(1)


def tokenizer(vocabulary: int):
    """Byte by byte, as Qwen's without its merges: a character is a token. Every other id is a word,
    so that whatever a random model samples has a text to be rewarded."""
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += ["Ġ" + word(i) for i in range(len(names), vocabulary)]  # Ġ is byte level's blank
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=TEMPLATE,
    )


def word(number: int) -> str:
    """Four letters, the last ones differ first: 0 is aaaa, 1 is aaab."""
    letters = ""
    for _ in range(4):
        number, letter = divmod(number, 26)
        letters = chr(ord("a") + letter) + letters
    return letters


def problems(prompt_tokens: int) -> list[list[dict[str, str]]]:
    """Chats of one message each, of prompt_tokens or fewer, down to half of them."""
    chats = []
    for i in range(PROBLEMS):
        length = prompt_tokens - AROUND - i * 37 % (prompt_tokens // 2)
        letters = "".join(word(i * 7919 + j * 104_729) for j in range(length // 4 + 1))
        chats.append([{"role": "user", "content": letters[:length]}])
    return chats


if __name__ == "__main__":
    main()
