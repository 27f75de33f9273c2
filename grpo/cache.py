"""The generator's keys and values: where they are kept, and the layout that fills in the prompts'.

The rows' own tokens lie in blocks, as in vLLM (PagedAttention, arXiv 2309.06180), so that a decode
step reads no more than the rows have; only here the blocks in use are always the first ones, and
the step reads them with one plain product.

Letters in the shapes: as in grpo/attention.py; A active rows, N blocks in use, B places of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.attention import PackedLayout, pad_index
from grpo.cascade import Piece, cascade_attention

BLOCK = 64  # places; with smaller ones the products, one for each block and head, are too small


class Blocks:
    """Which blocks each active row has, and how it gets and leaves them.

    Rows are always rows 0..A-1, blocks in use always blocks 0..N-1: what comes last fills the hole
    that a finished row leaves.
    """

    def __init__(self):
        self.of_row: list[list[int]] = []  # of each row, in the order of its tokens
        self.row_of: list[int] = []  # of each block

    def add_rows(self, count: int):
        self.of_row += [[] for _ in range(count)]

    def extend(self, row: int, count: int) -> int:
        """Give the row `count` blocks if it has fewer; how many are new."""
        missing = max(count - len(self.of_row[row]), 0)
        self.of_row[row] += range(len(self.row_of), len(self.row_of) + missing)
        self.row_of += [row] * missing
        return missing

    def release(self, row: int) -> list[tuple[int, int]]:
        """Free the row's blocks and give its number to the last row. The blocks that have to be
        copied for it, (source, target), one after the other."""
        moves = []
        for hole in sorted(self.of_row[row], reverse=True):
            last = len(self.row_of) - 1
            if hole != last:
                moves.append((last, hole))
                owner = self.of_row[self.row_of[last]]
                owner[owner.index(last)] = hole
                self.row_of[hole] = self.row_of[last]
            self.row_of.pop()
        last_row = self.of_row.pop()
        if row < len(self.of_row):
            self.of_row[row] = last_row
            for block in last_row:
                self.row_of[block] = row
        return moves


class KeyValueCache:
    """Keys and values: the common opening [.., K, S, D], prompts without it
    [.., prompt slot, K, L, D], the rows' own tokens [.., block, K, B, D].

    Active rows are always rows 0..A-1 and live prompts always slots 0..P-1; `free_row` and
    `move_prompt` fill the hole that a finished one leaves. Memory is asked for at the first
    prefill, when the heads' shape is known. It must hold numbers wherever a step reads, also behind
    the mask, since 0 x NaN is NaN.

    growing: rows get blocks as they need them, memory for a quarter more each time, a layer at a
    time; as long as no row fills one, all blocks are as short as the longest row allows. A CPU's
    batched product wants them side by side: it copies a view of longer ones, all keys of all rows,
    at every layer and step. Otherwise block i is all of row i, and all is allocated at once, where
    it stays, as a CUDA graph must have it, and zeroed only as far as rows have grown; few come near
    the longest.
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
        self.rows, self.row_length = rows, row_length
        self.growing = growing
        self.common_length = common
        self.common = self.prompt = None  # [layers, 2 (key, value), ..]
        self.own: list[Tensor] = []  # of each layer, [2, blocks, K, B, D]
        self.width = 0  # places of every block that hold numbers
        # Places of a block. A row of two costs more small operations than reading less saves.
        self.block = BLOCK if growing and row_length > 2 * BLOCK else row_length
        self.blocks = Blocks()
        self.revision = 0  # counts the changes of `blocks` and of the memory

    def allocate(self, like: Tensor):
        """like: any [.., K, D] of the keys' dtype and device."""
        if self.prompt is not None:
            return
        self.heads, dim = like.shape[-2:]
        slots, length = self.prompt_shape
        self.common = like.new_empty(self.layers, 2, self.heads, self.common_length, dim)
        self.prompt = like.new_zeros(self.layers, 2, slots, self.heads, length, dim)
        shape = (2, self.rows, self.heads, 0 if self.growing else self.row_length, dim)
        self.own = [like.new_empty(shape) for _ in range(self.layers)]

    def store_common(self, layer: int, key: Tensor, value: Tensor):
        """key and value [S, K, D] of the opening, for one layer."""
        self.common[layer, 0] = key.transpose(0, 1)
        self.common[layer, 1] = value.transpose(0, 1)

    def store_prompts(self, layer: int, slots: slice, key: Tensor, value: Tensor):
        """key and value [P, L, K, D] into the prompt slots of one layer."""
        self.allocate(key)
        self.prompt[layer, 0, slots, :, : key.shape[1]] = key.transpose(1, 2)
        self.prompt[layer, 1, slots, :, : key.shape[1]] = value.transpose(1, 2)

    def make_room(self, tokens: list[int], bucket: int = 1):
        """For so many tokens of each active row. bucket: widths are multiples of it."""
        for row, count in enumerate(tokens):
            self.revision += self.blocks.extend(row, -(-count // self.block))
        width = min(-(-max(tokens) // bucket) * bucket, self.block)
        if self.growing:
            self._grow(len(self.blocks.row_of), width)
        elif width > self.width:
            for own in self.own:
                own[..., self.width : width, :] = 0
            self.width = width

    def _grow(self, count: int, width: int):
        """Memory for so many blocks and places in each, where there is not enough yet."""
        old_count, old_width = self.own[0].shape[1], self.width
        if count > old_count:
            most = self.rows * -(-self.row_length // self.block)
            count = min(max(count, old_count + old_count // 4), most)
        if width > old_width:
            width = min(max(width, old_width + old_width // 4), self.block)
        count, width = max(count, old_count), max(width, old_width)
        if (count, width) == (old_count, old_width):
            return
        for layer, old in enumerate(self.own):
            self.own[layer] = old.new_zeros(2, count, self.heads, width, old.shape[-1])
            self.own[layer][:, :old_count, :, :old_width] = old
        self.width = width
        self.revision += 1

    def free_row(self, row: int):
        """Its places are free; the last row takes its number."""
        for source, target in self.blocks.release(row):
            for own in self.own:
                own[:, target, :, : self.width] = own[:, source, :, : self.width]
        self.revision += 1

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
