"""One attention function for the three ways in which this project runs a model.

transformers lets a model call an attention function of ours by name. Every call of the decoder
carries a `layout`, a plain value that says which token may see which:

    PackedLayout   training and scoring: groups of (prompt, G completions), each prompt once
    PrefillLayout  the generator's prompts: a PackedLayout without completions that also stores
                   the keys and values it computes
    DecodeLayout   one new token a row, over its group's prompt and its own earlier tokens

The prompt's keys and values are computed and kept once a group in all three.

Letters in the shapes: T packed tokens, P prompts, N rows (completions), L prompt tokens, C
completion tokens, A active rows; H query heads, K key-value heads, D numbers a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

ATTENTION = "grpo"


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


@dataclass
class PackedLayout:
    """P prompts, then N completions, in one sequence of T tokens.

    A prompt sees itself, causally. A completion sees the prompt of its group and itself, never
    another completion. `of_prompt` [N] is the prompt of each completion. Rows are padded for the
    attention product alone; every other layer of the model runs on the T real tokens.
    """

    prompt_lengths: list[int]
    completion_lengths: list[int]
    of_prompt: list[int]
    device: torch.device

    def __post_init__(self):
        prompts, completions = self.prompt_lengths, self.completion_lengths
        starts = [0]
        for length in prompts + completions:
            starts.append(starts[-1] + length)
        self.total = starts.pop()
        device = self.device
        self.prompt_places = pad_index(prompts, starts[: len(prompts)], device)  # [P, L]
        self.prompt_mask = length_mask(prompts, max(prompts), device)  # [P, L]
        self.width = max(completions, default=0)
        if not self.width:
            return
        last = max(self.total - 1, 0)  # an empty last row would start one past the end
        self.places = pad_index(completions, starts[len(prompts) :], device).clamp(max=last)
        self.completion_mask = length_mask(completions, self.width, device)  # [N, C]
        self.row_prompt = torch.tensor(self.of_prompt, device=device)  # [N]
        own = torch.ones(self.width, self.width, dtype=torch.bool, device=device).tril()
        if min(prompts) == max(prompts):
            visible = torch.ones(1, 1, max(prompts), dtype=torch.bool, device=device)
        else:
            visible = self.prompt_mask[self.row_prompt][:, None]  # [N, 1, L]
        rows = visible.shape[0]
        # One mask for all rows where the prompts are of one length, else one a row. Padding on
        # the right needs no mask of its own: causality hides it from every real token.
        self.mask = torch.cat(
            [visible.expand(rows, self.width, -1), own.expand(rows, -1, -1)], dim=-1
        )[:, None]  # [1 or N, 1, C, L + C]

    def attend(self, layer, query, key, value, scaling):
        """query [1, H, T, D], key and value [1, K, T, D] → [1, T, H, D]."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H or K, D]
        prompt_key = key[self.prompt_places]  # [P, L, K, D]
        prompt_value = value[self.prompt_places]
        self.store(layer, prompt_key, prompt_value)
        out = F.scaled_dot_product_attention(
            query[self.prompt_places].transpose(1, 2),
            prompt_key.transpose(1, 2),
            prompt_value.transpose(1, 2),
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        ).transpose(1, 2)  # [P, L, H, D]
        out = out[self.prompt_mask]  # [prompt tokens, H, D]
        if not self.width:
            return out[None]
        row_key = torch.cat([prompt_key[self.row_prompt], key[self.places]], dim=1)
        row_value = torch.cat([prompt_value[self.row_prompt], value[self.places]], dim=1)
        # CUDA's fused kernels take a mask or shared key heads, not both: with both, torch falls
        # back to the kernel that writes all scores out. So there each query head gets its own.
        if query.is_cuda:
            times = query.shape[1] // key.shape[1]
            row_key, row_value = (x.repeat_interleave(times, dim=2) for x in (row_key, row_value))
        completion = F.scaled_dot_product_attention(
            query[self.places].transpose(1, 2),  # [N, H, C, D]
            row_key.transpose(1, 2),  # [N, K or H, L + C, D]
            row_value.transpose(1, 2),
            attn_mask=self.mask,
            scale=scaling,
            enable_gqa=not query.is_cuda,
        ).transpose(1, 2)  # [N, C, H, D]
        return torch.cat([out, completion[self.completion_mask]])[None]

    def store(self, layer, prompt_key, prompt_value):
        """Training keeps nothing; the generator's prefill overrides this."""


class KeyValueCache:
    """Preallocated keys and values: prompts [.., prompt slot, K, L, D], rows [.., row, K, C, D].

    Active rows are always rows 0..A-1 and live prompts always slots 0..P-1, so that the decode
    step reads plain views; `move_row` and `move_prompt` fill the hole that a finished one leaves.
    Memory is asked for at the first prefill, when the heads' shape is known. It must hold numbers
    wherever a step reads, also behind the mask, since 0 x NaN is NaN; rows are zeroed only as far
    as they have grown, for they seldom come near the longest completion that is allowed.
    """

    def __init__(self, layers: int, prompts: int, rows: int, prompt_length: int, row_length: int):
        self.layers = layers
        self.prompt_shape = (prompts, prompt_length)
        self.row_shape = (rows, row_length)
        self.prompt = self.row = None  # [layers, 2 (key, value), slots, K, length, D]
        self.row_width = 0  # places of every row that hold numbers

    def store_prompts(self, layer, slots: slice, key, value):
        """key and value [P, L, K, D] into the prompt slots of one layer."""
        if self.prompt is None:
            heads, dim = key.shape[2:]
            slots_, length = self.prompt_shape
            self.prompt = key.new_zeros(self.layers, 2, slots_, heads, length, dim)
            rows, length = self.row_shape
            shape = (self.layers, 2, rows, heads, length, dim)
            self.row = torch.empty(shape, dtype=key.dtype, device=key.device)
        self.prompt[layer, 0, slots, :, : key.shape[1]] = key.transpose(1, 2)
        self.prompt[layer, 1, slots, :, : key.shape[1]] = value.transpose(1, 2)

    def widen_rows(self, width: int):
        """Make the first `width` places of all rows readable; twice as many, to do it seldom."""
        if width > self.row_width:
            wider = min(2 * width, self.row_shape[1])
            self.row[..., self.row_width : wider, :] = 0
            self.row_width = wider

    def move_row(self, source: int, target: int, length: int):
        self.row[:, :, target, :, :length] = self.row[:, :, source, :, :length]

    def move_prompt(self, source: int, target: int):
        self.prompt[:, :, target] = self.prompt[:, :, source]


@dataclass
class PrefillLayout(PackedLayout):
    """Prompts only; their keys and values go to slots of the cache from `first_slot` on."""

    cache: KeyValueCache = None
    first_slot: int = 0

    def store(self, layer, prompt_key, prompt_value):
        slots = slice(self.first_slot, self.first_slot + len(self.prompt_lengths))
        self.cache.store_prompts(layer, slots, prompt_key, prompt_value)


@dataclass
class DecodeLayout:
    """One new token for each of A active rows.

    prompt_lengths: of the P live prompts. of_prompt: the prompt slot of each active row.
    row_lengths: the tokens that each row's own cache holds before this step.
    """

    cache: KeyValueCache
    prompt_lengths: list[int]
    of_prompt: list[int]
    row_lengths: list[int]
    device: torch.device

    def __post_init__(self):
        device = self.device
        self.active = torch.arange(len(self.of_prompt), device=device)
        self.write_at = torch.tensor(self.row_lengths, device=device)
        self.own_width = max(self.row_lengths) + 1
        self.cache.widen_rows(self.own_width)
        self.prompt_width = max(self.prompt_lengths)
        # The rows of one prompt stand together in a [P, rows of the fullest prompt] grid, so that
        # each prompt's keys are read once for all its rows.
        members: list[list[int]] = [[] for _ in self.prompt_lengths]
        column = []
        for row, prompt in enumerate(self.of_prompt):
            column.append(len(members[prompt]))
            members[prompt].append(row)
        fullest = max(len(m) for m in members)
        grid = [m + [0] * (fullest - len(m)) for m in members]
        self.grid = torch.tensor(grid, device=device)  # [P, F] row at each place; holes repeat 0
        self.cell = torch.tensor(self.of_prompt, device=device), torch.tensor(column, device=device)
        visible = torch.cat(
            [
                length_mask(self.prompt_lengths, self.prompt_width, device)[self.cell[0]],
                length_mask([n + 1 for n in self.row_lengths], self.own_width, device),
            ],
            dim=1,
        )
        hidden = torch.full(visible.shape, float("-inf"), device=device)
        self.bias = hidden.masked_fill(visible, 0.0)[:, None, None]  # [A, 1, 1, L + C]

    def attend(self, layer, query, key, value, scaling):
        """query [A, H, 1, D], key and value [A, K, 1, D] → [A, 1, H, D]."""
        rows, heads, _, dim = query.shape
        shared = key.shape[1]  # K
        own = self.cache.row[layer, :, :rows]  # [2, A, K, C, D]
        own[0][self.active, :, self.write_at] = key[:, :, 0]
        own[1][self.active, :, self.write_at] = value[:, :, 0]
        own_key, own_value = own[:, :, :, : self.own_width]
        prompts, fullest = self.grid.shape
        prompt_key, prompt_value = self.cache.prompt[layer, :, :prompts, :, : self.prompt_width]

        query = (query * scaling).view(rows, shared, heads // shared, dim)  # [A, K, H/K, D]
        own_score = query @ own_key.transpose(-1, -2)  # [A, K, H/K, C]
        together = query[self.grid].transpose(1, 2).reshape(prompts, shared, -1, dim)
        prompt_score = (together @ prompt_key.transpose(-1, -2)).view(
            prompts, shared, fullest, heads // shared, -1
        )  # [P, K, F, H/K, L]
        prompt_score = prompt_score.transpose(1, 2)[self.cell]  # [A, K, H/K, L]

        score = torch.cat([prompt_score, own_score], dim=-1).float() + self.bias
        weight = score.softmax(dim=-1).to(value.dtype)
        out = weight[..., self.prompt_width :] @ own_value  # [A, K, H/K, D]
        prompt_weight = weight[..., : self.prompt_width][self.grid]  # [P, F, K, H/K, L]
        together = prompt_weight.transpose(1, 2).reshape(prompts, shared, -1, self.prompt_width)
        prompt_out = (together @ prompt_value).view(prompts, shared, fullest, heads // shared, dim)
        out = out + prompt_out.transpose(1, 2)[self.cell]
        return out.reshape(rows, 1, heads, dim)
