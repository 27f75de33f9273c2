"""Text to ids and back: the from-scratch tokenizer, prompts, completions, new tokens.

Every model goes through these functions, so that there is one way in (`render_prompt`,
`encode_target`) and one way out (`completion_text`), and nothing is decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from grpo.errors import UserError
from grpo.scratch import SCRATCH_TEMPLATE

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

# A new embedding is the mean of the old ones plus this share of their spread: near enough to the
# mean that no new token is likely at first, far enough that two of them can be told apart.
NEW_TOKEN_SPREAD = 0.1


def scratch_tokenizer(tokens: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is <pad>, <eos>, <unk> and then exactly `tokens`.

    Of the strings that fit at a place the longest wins, and a stretch of text that none fits
    becomes one <unk>. Decoding joins without spaces, so text made of the tokens comes back as it
    was:

        scratch_tokenizer(["<|0-0|>", "<|0-0|><|up|>", "\\n"])("<|0-0|><|up|>\\n").input_ids
        == [4, 5]

    Its chat template ends each message with a newline and opens no turn. Saved with
    `save_pretrained`, it loads in plain transformers. Raises ValueError for an empty or repeated
    string, or one that is a special token.
    """
    names = [PAD, EOS, UNK, *tokens]
    if "" in names or len(set(names)) < len(names):
        repeated = sorted({t for t in names if not t or names.count(t) > 1})
        raise ValueError(f"a scratch tokenizer's tokens must be distinct and not empty: {repeated}")
    vocabulary = {name: index for index, name in enumerate(names)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    # Added tokens are found by one Aho-Corasick pass, leftmost and longest first: thousands of
    # cell strings cost no more than ten, which an alternation in a regular expression does not do.
    backend.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        chat_template=SCRATCH_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], prompt_format: str
) -> list[int]:
    """The prompt's token ids.

    "chat": the tokenizer's chat template, ending with the opening of the assistant's turn. The
    template writes every special token itself, so encoding adds none: never a second BOS.
    "plain": the contents joined by blank lines, behind a BOS if the tokenizer puts one there.
    Raises UserError if "chat" is asked of a tokenizer without a template, or if the template
    refuses the messages.
    """
    if prompt_format == "plain":
        return _plain_prompt(tokenizer, "\n\n".join(m["content"] for m in messages))
    if not tokenizer.chat_template:
        raise UserError(
            f"--model {tokenizer.name_or_path}: its tokenizer has no chat template; "
            "use --prompt-format plain, or a model tuned for chat"
        )
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except (TemplateError, ValueError) as error:
        raise UserError(
            f"--model {tokenizer.name_or_path}: its chat template refuses the messages "
            f"({' '.join(str(error).split())}); use --prompt-format plain"
        ) from error
    return tokenizer(text, add_special_tokens=False).input_ids


def _plain_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    bos = tokenizer.bos_token_id
    # Not simply "with special tokens": some tokenizers would also close the prompt with an EOS.
    adds_bos = bos is not None and tokenizer(text).input_ids[:1] == [bos]
    return [bos, *ids] if adds_bos and ids[:1] != [bos] else ids


def encode_reply(
    tokenizer: PreTrainedTokenizerBase, reply: str, prompt_format: str
) -> list[int]:
    """What stands between an assistant's turn, its stop token included, and its next one.

    The reply as a user's turn, and the opening of the assistant's, as the chat template writes
    them. "plain": the reply between blank lines.
    """
    if prompt_format == "plain":
        return tokenizer(f"\n\n{reply}\n\n", add_special_tokens=False).input_ids
    said = "assistant-content"
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": reply},
    ]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    rest, stop = text.partition(said)[2], end_of_turn(tokenizer)
    if stop is not None:
        rest = rest.partition(tokenizer.convert_ids_to_tokens(stop))[2]
    return tokenizer(rest, add_special_tokens=False).input_ids


def encode_target(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a completion that supervised fine-tuning imitates; no special token is added."""
    return tokenizer(text, add_special_tokens=False).input_ids


def completion_text(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], stop_token_ids: Iterable[int]
) -> str:
    """What the rewards see: everything before the first stop token, white space untouched.

    Special tokens that do not stop are kept, since a task's answer may be made of them
    (<|up|><|left|> or <think> in some tokenizers).
    """
    stops = set(stop_token_ids)
    ids = list(token_ids)
    end = next((i for i, token in enumerate(ids) if token in stops), len(ids))
    return tokenizer.decode(
        ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def find_stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, *configs: PretrainedConfig | object | None
) -> list[int]:
    """Every id that ends a completion, ascending.

    The union of what the configs given (a model's and its generation config) and the tokenizer
    call eos, one id or several, and the special token with which the chat template closes an
    assistant's turn (Qwen's <|im_end|>, where eos may be <|endoftext|>). Raises UserError if there
    is none: generation would always run to the length limit.
    """
    found = {tokenizer.eos_token_id, end_of_turn(tokenizer)}
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [ids])
    found.discard(None)
    if not found:
        raise UserError(
            f"--model {tokenizer.name_or_path}: no end token is known, so no completion would ever "
            "stop; set eos_token_id in its generation_config.json"
        )
    return sorted(found)


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token right behind an assistant's message in the chat template, if any."""
    if not tokenizer.chat_template:
        return None
    content = "assistant-content"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except (TemplateError, ValueError):
        return None  # render_prompt will say what the template has against such messages
    tail = text.rpartition(content)[2].lstrip()
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    special |= {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    closing = max((t for t in special if tail.startswith(t)), key=len, default=None)
    return None if closing is None else special[closing]


def fit_embeddings(model: nn.Module, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> None:
    """Give the model a row for every id of the tokenizer; rows that are there stay as they are."""
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) <= rows:
        return
    with torch.random.fork_rng(devices=[]):
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    _draw_rows(model, list(range(rows, len(tokenizer))), rows, seed)


def add_tokens(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], seed: int = 0
) -> list[int]:
    """Add the strings that the tokenizer does not know; returns their ids, [] if none is new.

    Call it on the bare model, before LoRA. Rows of the embedding, and of an untied head, are the
    mean of the old rows plus NEW_TOKEN_SPREAD of their standard deviation as noise. They mean
    nothing until trained: under LoRA, which freezes the embedding, hand the ids to peft's
    trainable_token_indices (grpo.lora.new_lora does).
    """
    known = tokenizer.get_vocab()
    missing = [token for token in dict.fromkeys(tokens) if token not in known]
    if not missing:
        return []
    old_rows = min(len(tokenizer), model.get_input_embeddings().weight.shape[0])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in missing])
    fit_embeddings(model, tokenizer, seed)
    ids = tokenizer.convert_tokens_to_ids(missing)
    _draw_rows(model, ids, old_rows, seed)  # also where the model had spare rows already
    return ids


@torch.no_grad()
def _draw_rows(model: nn.Module, ids: list[int], old_rows: int, seed: int) -> None:
    """Rows `ids` of embedding and head [V, H], near the mean of the first `old_rows`."""
    generator = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight  # the same tensor if tied
    for weight in [embedding] if head is embedding else [embedding, head]:
        old = weight[:old_rows].float()
        noise = torch.randn(len(ids), weight.shape[1], generator=generator).to(weight.device)
        rows = old.mean(dim=0) + NEW_TOKEN_SPREAD * old.std(dim=0) * noise
        weight[ids] = rows.to(weight.dtype)
