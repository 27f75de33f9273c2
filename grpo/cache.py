"""The generator's keys and values, and the two layouts that write and read them.

Letters in the shapes: as in grpo/attention.py; A active rows, G = H / K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.attention import PackedLayout, length_mask, pad_index
from grpo.cascade import Piece, cascade_attention


class KeyValueCache:
    """Keys and values: the common opening [.., K, S, D], prompts without it
    [.., prompt slot, K, L, D], rows [.., row, K, C, D].

    Active rows are always rows 0..A-1 and live prompts always slots 0..P-1, so that the decode
    step reads plain views; `move_row` and `move_prompt` fill the hole that a finished one leaves.
    Memory is asked for at the first prefill, when the heads' shape is known. It must hold numbers
    wherever a step reads, also behind the mask, since 0 x NaN is NaN.

    growing: rows get the places that they need, a quarter more each time, a layer at a time. A
    CPU's batched product wants them side by side: it copies a view of longer rows, all keys of all
    rows, at every layer and step. Otherwise all is allocated at once, where it stays, as a CUDA
    graph must have it, and zeroed only as far as rows have grown; few come near the longest.
    """

    def __init__(
        self,
        layers: int,
        prompts: int,
        rows: int,
        prompt_length: int,
        row_length: int,
        common: int = 0,
        growing: bool = True,
    ):
        self.layers = layers
        self.prompt_shape = (prompts, prompt_length)
        self.row_shape = (rows, row_length)
        self.growing = growing
        self.common_length = common
        self.common = self.prompt = None  # [layers, 2 (key, value), ..]
        self.row: list[Tensor] = []  # of each layer, [2, rows, K, C, D]
        self.row_width = 0  # places of every row that hold numbers

    def allocate(self, like: Tensor):
        """like: any [.., K, D] of the keys' dtype and device."""
        if self.prompt is not None:
            return
        heads, dim = like.shape[-2:]
        slots, length = self.prompt_shape
        self.common = like.new_empty(self.layers, 2, heads, self.common_length, dim)
        self.prompt = like.new_zeros(self.layers, 2, slots, heads, length, dim)
        rows, length = self.row_shape
        length = 0 if self.growing else length
        self.row = [like.new_empty(2, rows, heads, length, dim) for _ in range(self.layers)]

    def store_common(self, layer: int, key: Tensor, value: Tensor):
        """key and value [S, K, D] of the opening, for one layer."""
        self.common[layer, 0] = key.transpose(0, 1)
        self.common[layer, 1] = value.transpose(0, 1)

    def store_prompts(self, layer: int, slots: slice, key: Tensor, value: Tensor):
        """key and value [P, L, K, D] into the prompt slots of one layer."""
        self.allocate(key)
        self.prompt[layer, 0, slots, :, : key.shape[1]] = key.transpose(1, 2)
        self.prompt[layer, 1, slots, :, : key.shape[1]] = value.transpose(1, 2)

    def widen_rows(self, width: int):
        """Make the first `width` places of all rows readable."""
        if width <= self.row_width:
            return
        if self.growing:
            width = min(max(width, self.row_width + self.row_width // 4), self.row_shape[1])
        for layer, old in enumerate(self.row):
            if self.growing:
                shape = (*old.shape[:3], width, old.shape[4])
                self.row[layer] = old.new_zeros(shape)
                self.row[layer][..., : self.row_width, :] = old
            else:
                old[..., self.row_width : width, :] = 0
        self.row_width = width

    def move_row(self, source: int, target: int, length: int):
        for row in self.row:
            row[:, target, :, :length] = row[:, source, :, :length]

    def move_prompt(self, source: int, target: int):
        self.prompt[:, :, target] = self.prompt[:, :, source]


@dataclass
class PrefillLayout(PackedLayout):
    """Prompts only; their keys and values go to slots of the cache from `first_slot` on.

    common: S if the sequence begins with the opening; then that is stored too. Otherwise, if the
    cache has one already, the prompts continue it.
    """

    cache: KeyValueCache = None
    first_slot: int = 0

    def __post_init__(self):
        super().__post_init__()
        starts = self.prompt_starts
        self.prompt_places = pad_index(self.prompt_lengths, starts, self.device)  # [P, L]
        self.opening_of_cache = 0 if self.common else self.cache.common_length
        if self.opening_of_cache:  # its keys are put before those of the sequence
            moved = self.opening_of_cache
            everything = Piece(slice(0, self.total), slice(0, moved), False)
            self.pieces = [
                everything,
                *(Piece(p.queries, _shifted(p.keys, moved), p.causal, p.real) for p in self.pieces),
            ]

    def attend(self, layer, query, key, value, scaling):
        """As in PackedLayout, and the keys and values are stored."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H or K, D]
        slots = slice(self.first_slot, self.first_slot + len(self.prompt_lengths))
        self.cache.store_prompts(layer, slots, key[self.prompt_places], value[self.prompt_places])
        if self.common:
            self.cache.store_common(layer, key[: self.common], value[: self.common])
        elif self.opening_of_cache:
            opening = self.cache.common[layer].transpose(1, 2)  # [2, S, K, D]
            key, value = torch.cat([opening[0], key]), torch.cat([opening[1], value])
        return cascade_attention(query, key, value, self.pieces, scaling)[None]


def _shifted(places: slice | Tensor, by: int) -> slice | Tensor:
    if isinstance(places, slice):
        return slice(places.start + by, places.stop + by)
    return places + by


class DecodeLayout:
    """One new token for each of A active rows, again and again until the rows change.

    lengths: [A] on the device, the tokens that each row's own cache holds before a step; whoever
    runs the step counts them up, then calls `see(width)`, width being more than any of them.
    Nothing here waits for the device, and all shapes stay as they are from step to step as long as
    the width does: a step can be captured in a CUDA graph.

    prompt_lengths: of the P live prompts, without the opening. of_prompt: the prompt slot of each
    active row; rows after those are spare, and what they give is never read. grid: (P, F) to make
    room for, at least as large as needed.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        prompt_lengths: list[int],
        of_prompt: list[int],
        lengths: Tensor,
        grid: tuple[int, int] | None = None,
    ):
        self.cache, self.lengths = cache, lengths
        device = lengths.device
        self.active = torch.arange(len(lengths), device=device)
        # The rows of one prompt stand together in a [P, rows of the fullest prompt] grid, so that
        # each prompt's keys are read once for all its rows.
        members: list[list[int]] = [[] for _ in prompt_lengths]
        column = []
        for row, prompt in enumerate(of_prompt):
            column.append(len(members[prompt]))
            members[prompt].append(row)
        prompts, fullest = grid or (len(members), max(map(len, members)))
        rows = [m + [0] * (fullest - len(m)) for m in members]  # holes repeat row 0
        rows += [[0] * fullest] * (prompts - len(rows))
        self.grid = torch.tensor(rows, device=device)  # [P, F] row at each place
        spare = [0] * (len(lengths) - len(of_prompt))
        of_prompt, column = of_prompt + spare, column + spare
        self.prompt_of = torch.tensor(of_prompt, device=device)  # [A]
        self.column = torch.tensor(column, device=device)  # [A]
        self.prompt_width = cache.prompt_shape[1]
        visible = length_mask(prompt_lengths, self.prompt_width, device)[self.prompt_of]
        opening = torch.zeros(len(lengths), cache.common_length, device=device)
        prompt = torch.zeros(visible.shape, device=device).masked_fill_(~visible, -torch.inf)
        self.shared_bias = torch.cat([opening, prompt], dim=1)[:, None, None]  # [A, 1, 1, S + L]

    def see(self, width: int):
        """Look at the first `width` places of the rows' own cache; those not written are hidden."""
        self.width = width
        places = torch.arange(width, device=self.lengths.device)
        hidden = places > self.lengths[:, None]
        own = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
        self.bias = torch.cat([self.shared_bias, own[:, None, None]], dim=-1)

    def attend(self, layer, query, key, value, scaling):
        """query [A, H, 1, D], key and value [A, K, 1, D] → [A, 1, H, D]."""
        rows, heads, _, dim = query.shape
        shared = key.shape[1]  # K
        group = heads // shared  # G
        own = self.cache.row[layer][:, :rows]  # [2, A, K, C, D]
        own[0][self.active, :, self.lengths] = key[:, :, 0]
        own[1][self.active, :, self.lengths] = value[:, :, 0]
        own_key, own_value = own[:, :, :, : self.width].flatten(1, 2)  # [A K, C, D]
        prompts, fullest = self.grid.shape
        prompt_key, prompt_value = self.cache.prompt[layer, :, :prompts].flatten(
            1, 2
        )  # [P K, L, D]
        opening_key, opening_value = self.cache.common[layer]  # [K, S, D]
        opening, own_at = self.cache.common_length, self.cache.common_length + self.prompt_width

        query = (query * scaling).view(rows, shared, group, dim)
        score = self.bias.new_empty(rows, shared, group, own_at + self.width)  # float32
        if opening:
            everyone = query.transpose(0, 1).reshape(shared, -1, dim)  # [K, A G, D]
            scored = torch.bmm(everyone, opening_key.mT).view(shared, rows, group, -1)
            score[..., :opening] = scored.transpose(0, 1)
        together = (
            query[self.grid].transpose(1, 2).reshape(-1, fullest * group, dim)
        )  # [P K, F G, D]
        scored = torch.bmm(together, prompt_key.mT).view(prompts, shared, fullest, group, -1)
        score[..., opening:own_at] = scored.transpose(1, 2)[self.prompt_of, self.column]
        # Keys times queries, not the other way round: on a CPU the faster of the two products.
        scored = torch.bmm(own_key, query.view(-1, group, dim).mT)  # [A K, C, G]
        score[..., own_at:] = scored.mT.view(rows, shared, group, -1)
        weight = score.add_(self.bias).softmax(dim=-1).to(value.dtype)

        out = torch.bmm(weight[..., own_at:].flatten(0, 1), own_value)  # [A K, G, D]
        out = out.view(rows, shared, group, dim)
        together = weight[..., opening:own_at][self.grid].transpose(1, 2)  # [P, K, F, G, L]
        together = together.reshape(prompts * shared, fullest * group, -1)
        summed = torch.bmm(together, prompt_value).view(prompts, shared, fullest, group, dim)
        out += summed.transpose(1, 2)[self.prompt_of, self.column]
        if opening:
            everyone = weight[..., :opening].transpose(0, 1).reshape(shared, rows * group, -1)
            summed = torch.bmm(everyone, opening_value).view(shared, rows, group, dim)
            out += summed.transpose(0, 1)
        return out.view(rows, 1, heads, dim)
