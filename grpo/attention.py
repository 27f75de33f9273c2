"""One attention function for the three ways in which this project runs a model.

transformers lets a model call an attention function of ours by name. Every call of the decoder
carries a `layout`, a plain value that says which token may see which:

    PackedLayout   training and scoring: groups of (prompt, G completions), each prompt once
    PrefillLayout  the generator's prompts: a PackedLayout without completions that also stores
                   the keys and values it computes (grpo/cache.py)
    DecodeLayout   one new token a row, over its group's prompt and its own earlier tokens
                   (grpo/decode_layout.py)

In all three, the prompt's keys and values are computed and kept once a group, and an opening that
all prompts have in common, such as a long system prompt, once for all of them.

Letters in the shapes: T packed tokens, S tokens of the common opening, P prompts, N rows
(completions), L prompt tokens after the opening, C completion tokens; H query heads, K key-value
heads, D numbers a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from grpo.cascade import Piece, cascade_attention

ATTENTION = "grpo"

# A shorter common opening costs a piece of its own and saves next to nothing.
SHORTEST_COMMON = 64
SIMILAR = 1.5  # times the shortest of the rows that are padded to one length


def attention(module, query, key, value, attention_mask, scaling=None, layout=None, **_):
    """The function that transformers calls: query [1, H, T, D], key and value [1, K, T, D].

    Returns ([1, T, H, D], None). Without a layout it is ordinary causal attention over rows
    without padding, so that `model(input_ids)` still answers; with a cache of transformers' own
    it raises, because it could not be right.
    """
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if layout is not None:
        return layout.attend(module.layer_idx, query, key, value, scaling), None
    if query.shape[2] != key.shape[2] or attention_mask is not None:
        raise RuntimeError("this model decodes with grpo.generate; transformers' cache is not used")
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, attention)
# The layout is the mask; a mask of transformers' own would be built for nothing at every call.
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: kwargs.get("attention_mask"))


def pad_index(lengths: list[int], starts: list[int], device) -> torch.Tensor:
    """[rows, longest]: row i counts up from starts[i]; places past its length repeat its start.

    >>> pad_index([2, 1], [0, 2], "cpu").tolist()
    [[0, 1], [2, 2]]
    """
    steps = torch.arange(max(lengths, default=0), device=device)
    length = torch.tensor(lengths, device=device)[:, None]
    start = torch.tensor(starts, device=device)[:, None]
    return start + torch.where(steps < length, steps, 0)


def length_mask(lengths: list[int], width: int, device) -> torch.Tensor:
    """[rows, width] bool: True where a place is inside its row."""
    return torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]


def common_length(prompts: Sequence[list[int]]) -> int:
    """Tokens with which all prompts begin, the last of the shortest left out so that each has one
    of its own; 0 if they are too few to be worth a piece, or there is just one prompt."""
    if len(prompts) < 2:
        return 0
    shared = min(len(commonprefix(list(prompts))), min(map(len, prompts)) - 1)
    return shared if shared >= SHORTEST_COMMON else 0


@dataclass
class PackedLayout:
    """The common opening (S tokens, or none), P prompts without it, then N completions.

    A prompt sees the opening and itself, causally. A completion sees the opening, the prompt of
    its group and itself, never another completion. `of_prompt` [N] is the prompt of each
    completion. A prompt with one completion, as in supervised training, is one row with it. Rows
    are padded for attention alone; every other layer of the model runs on the T real tokens.
    """

    prompt_lengths: list[int]
    completion_lengths: list[int]
    of_prompt: list[int]
    device: torch.device
    common: int = 0

    def __post_init__(self):
        runs, end = [], self.common  # the places of each prompt, then of each completion
        for length in self.prompt_lengths + self.completion_lengths:
            runs.append(range(end, end + length))
            end += length
        self.total = end
        prompts, completions = runs[: len(self.prompt_lengths)], runs[len(self.prompt_lengths) :]
        self.prompt_starts = [prompt.start for prompt in prompts]
        followers: list[list[range]] = [[] for _ in prompts]
        for prompt, completion in zip(self.of_prompt, completions, strict=True):
            followers[prompt] += [completion] * bool(completion)
        rows, asked = [], []
        for prompt, its in zip(prompts, followers, strict=True):
            if len(its) == 1:  # nothing is shared: the two are one ordinary row
                rows.append([*prompt, *its[0]])
                continue
            rows += [list(run) for run in (prompt, *its)]
            if its:
                asked.append((prompt, [place for completion in its for place in completion]))
        self.pieces = [*self._opening(), *self._prompts(asked), *self._causal(rows)]

    def _opening(self) -> list[Piece]:
        if not self.common:
            return []
        opening, rest = slice(0, self.common), slice(self.common, self.total)
        return [Piece(opening, opening, True), Piece(rest, opening, False)]

    def _prompts(self, asked: list[tuple[range, list[int]]]) -> list[Piece]:
        """The completions of each prompt over it; prompts of one length together."""
        pieces = []
        for length in sorted({len(prompt) for prompt, _ in asked}):
            same = [pair for pair in asked if len(pair[0]) == length]
            keys, _ = self._padded([list(prompt) for prompt, _ in same])
            queries, real = self._padded([places for _, places in same])
            pieces.append(Piece(queries, keys, False, real))
        return pieces

    def _causal(self, rows: list[list[int]]) -> list[Piece]:
        """Rows that see themselves. Those of similar length are padded to one: whatever its size, a
        piece costs some dozens of small operations a layer."""
        pieces, rows = [], sorted(rows, key=len)
        while rows:
            count = sum(len(row) <= SIMILAR * len(rows[0]) for row in rows)
            places, real = self._padded(rows[:count])
            pieces.append(Piece(places, places, True, real))
            rows = rows[count:]
        return pieces

    def _padded(self, rows: list[list[int]]) -> tuple[slice | torch.Tensor, torch.Tensor | None]:
        """(places [rows, longest], which of them are real; None: all). One run is a slice."""
        if len(rows) == 1 and rows[0][-1] - rows[0][0] + 1 == len(rows[0]):
            return slice(rows[0][0], rows[0][-1] + 1), None
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        places = [row + row[:1] * (longest - len(row)) for row in rows]
        real = None if min(lengths) == longest else length_mask(lengths, longest, self.device)
        return torch.tensor(places, device=self.device), real

    def attend(self, layer, query, key, value, scaling):
        """query [1, H, T, D], key and value [1, K, T, D] → [1, T, H, D]."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H or K, D]
        return cascade_attention(query, key, value, self.pieces, scaling)[None]
