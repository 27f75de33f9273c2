"""Attention of a decode step: one new token a row, over its group's prompt and its own tokens.

Letters in the shapes: as in grpo/cache.py; G = H / K, F rows of the fullest prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.attention import length_mask
from grpo.cache import KeyValueCache


@dataclass(frozen=True)
class _Views:
    """One layer of the cache as the products want it; keys are transposed."""

    new_key: Tensor  # [.., D] every place of every block
    new_value: Tensor
    own_key: Tensor  # [N K, D, B]
    own_value: Tensor  # [N K, B, D]
    prompt_key: Tensor  # [P K, D, L]
    prompt_value: Tensor
    opening_key: Tensor  # [K, D, S]
    opening_value: Tensor


class DecodeLayout:
    """One new token for each of A active rows, again and again until the rows change.

    lengths: [A] on the device, the tokens that each row's own cache holds before a step; whoever
    runs the step counts them up, having made room in the cache, then calls `see(width)`.
    Nothing here waits for the device, and all shapes stay as they are from step to step as long as
    the width and the blocks do: a step can be captured in a CUDA graph.

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
        # The rows of one prompt stand together in a [P, F] grid, so that each prompt's keys are
        # read once for all its rows.
        members: list[list[int]] = [[] for _ in prompt_lengths]
        column = []
        for row, prompt in enumerate(of_prompt):
            column.append(len(members[prompt]))
            members[prompt].append(row)
        self.grid = prompts, fullest = grid or (len(members), max(map(len, members)))
        rows = [m + [0] * (fullest - len(m)) for m in members]  # holes repeat row 0
        rows += [[0] * fullest] * (prompts - len(rows))
        spare = [0] * (len(lengths) - len(of_prompt))
        rows, of_prompt, column = (
            torch.tensor(x, device=device) for x in (rows, of_prompt + spare, column + spare)
        )
        # The row at each place of the grid, and the place of each row, a head at a time.
        self.heads = torch.arange(cache.heads, device=device)  # [K]
        self.into_grid = (rows[:, None] * cache.heads + self.heads[:, None]).flatten()  # [P K F]
        place = of_prompt[:, None] * cache.heads + self.heads  # [A, K]
        self.out_of_grid = (place * fullest + column[:, None]).flatten()  # [A K]

        self.prompt_width = cache.prompt_shape[1]
        visible = length_mask(prompt_lengths, self.prompt_width, device)[of_prompt]
        bias = torch.zeros(visible.shape, device=device).masked_fill_(~visible, -torch.inf)
        self.prompt_bias = bias[:, None, None]  # [A, 1, 1, L]
        self.seen = None  # the cache's revision and the width that blocks and views are for

    def see(self, width: int):
        """Find where the new tokens go. Of every block the first `width` places are looked at, so
        many as a row may have by now; those not written are hidden."""
        if self.seen != (self.cache.revision, width):
            self.width, self.seen = width, (self.cache.revision, width)
            self._find_blocks()
            self.views = [self._views_of(layer) for layer in range(self.cache.layers)]
        nth = self.lengths // self.cache.block  # [A] which of its blocks each row writes to
        written = self.blocks_of_row.gather(1, nth[:, None]) * self.cache.heads + self.heads
        places_in_memory = self.cache.own[0].shape[3]
        place = self.lengths - nth * self.cache.block
        self.write_at = (written * places_in_memory + place[:, None]).flatten()  # [A K]
        places = torch.arange(self.most * width, device=self.lengths.device)
        hidden = places > self.lengths[:, None]  # [A, C]
        bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
        self.own_bias = bias.view(len(hidden), 1, 1, self.most, width)

    def _find_blocks(self):
        """Which blocks each row has and, unless block i is all of row i, where each block finds its
        row and each row its blocks, a head at a time."""
        blocks, heads, device = self.cache.blocks, self.cache.heads, self.lengths.device
        self.most, self.count = 1, len(self.lengths)  # blocks of a row, blocks in use
        self.blocks_of_row = torch.arange(self.count, device=device)[:, None]  # [A, most]
        self.of_blocks = self.of_rows = self.of_weights = None
        if not self.cache.growing or blocks.row_of == list(range(self.count)):
            return
        self.most, self.count = max(map(len, blocks.of_row)), len(blocks.row_of)
        # Rows with fewer blocks than others repeat one; what they see of it is hidden.
        padded = [own + [0] * (self.most - len(own)) for own in blocks.of_row]
        nth = [0] * self.count
        for own in blocks.of_row:
            for count, block in enumerate(own):
                nth[block] = count
        self.blocks_of_row, nth, row_of = (
            torch.tensor(x, device=device) for x in (padded, nth, blocks.row_of)
        )
        of_rows = self.blocks_of_row[:, None] * heads + self.heads[:, None]  # [A, K, most]
        self.of_rows = of_rows.flatten()  # [A K most]: in N K
        of_blocks = row_of[:, None] * heads + self.heads  # [N, K]
        self.of_blocks = of_blocks.flatten()  # [N K]: in A K
        self.of_weights = (of_blocks * self.most + nth[:, None]).flatten()  # [N K]: in A K most

    def _views_of(self, layer: int) -> _Views:
        """Made once and not at every step: slicing costs as much as a small operation."""
        own, dim = self.cache.own[layer], self.cache.own[layer].shape[-1]
        own_key, own_value = own[:, : self.count, :, : self.width].flatten(1, 2)
        prompt_key, prompt_value = self.cache.prompt[layer, :, : self.grid[0]].flatten(1, 2)
        opening_key, opening_value = self.cache.common[layer]
        return _Views(
            new_key=own[0].view(-1, dim),
            new_value=own[1].view(-1, dim),
            own_key=own_key.mT,
            own_value=own_value,
            prompt_key=prompt_key.mT,
            prompt_value=prompt_value,
            opening_key=opening_key.mT,
            opening_value=opening_value,
        )

    def attend(self, layer, query, key, value, scaling):
        """query [A, H, 1, D], key and value [A, K, 1, D] → [A, 1, H, D]."""
        rows, heads, _, dim = query.shape
        shared = key.shape[1]  # K
        group = heads // shared  # G
        views = self.views[layer]
        views.new_key.index_copy_(0, self.write_at, key.reshape(-1, dim))
        views.new_value.index_copy_(0, self.write_at, value.reshape(-1, dim))
        opening, own_at = self.cache.common_length, self.cache.common_length + self.prompt_width

        query = query.reshape(rows * shared, group * dim)
        shape = (rows, shared, group, own_at + self.most * self.width)
        score = torch.empty(shape, device=query.device)  # float32
        if opening:
            everyone = query.view(rows, shared, group, dim).transpose(0, 1)
            scored = torch.bmm(everyone.reshape(shared, -1, dim), views.opening_key)
            scored = scored.view(shared, rows, group, -1).transpose(0, 1)
            torch.mul(scored, scaling, out=score[..., :opening])
        scored = torch.bmm(self._to_grid(query, group), views.prompt_key)  # [P K, F G, L]
        scored = self._from_grid(scored).view(rows, shared, group, -1)
        torch.add(self.prompt_bias, scored, alpha=scaling, out=score[..., opening:own_at])
        scored = torch.bmm(self._to_blocks(query, group), views.own_key)  # [N K, G, B]
        if self.of_rows is not None:
            scored = scored.view(len(scored), -1).index_select(0, self.of_rows)
        scored = scored.view(rows, shared, -1, group, self.width).transpose(2, 3)
        own_score = score[..., own_at:].unflatten(-1, (-1, self.width))
        torch.add(self.own_bias, scored, alpha=scaling, out=own_score)
        weight = score.softmax(dim=-1).to(value.dtype)

        own_weight = weight[..., own_at:].unflatten(-1, (-1, self.width)).transpose(2, 3)
        own_weight = own_weight.reshape(-1, group * self.width)  # [A K most, G B]
        if self.of_weights is not None:
            own_weight = own_weight.index_select(0, self.of_weights)
        parts = torch.bmm(own_weight.view(-1, group, self.width), views.own_value)
        out = self._sum_of_blocks(parts)
        together = weight[..., opening:own_at].reshape(rows * shared, -1)
        out += self._from_grid(torch.bmm(self._to_grid(together, group), views.prompt_value))
        out = out.view(rows, shared, group, dim)
        if opening:
            everyone = weight[..., :opening].transpose(0, 1).reshape(shared, rows * group, -1)
            summed = torch.bmm(everyone, views.opening_value).view(shared, rows, group, dim)
            out += summed.transpose(0, 1)
        return out.view(rows, 1, heads, dim)

    def _to_grid(self, x: Tensor, group: int) -> Tensor:
        """[A K, G n] of the rows → [P K, F G, n]."""
        prompts, fullest = self.grid
        x = x.index_select(0, self.into_grid)
        return x.view(prompts * self.cache.heads, fullest * group, -1)

    def _from_grid(self, x: Tensor) -> Tensor:
        """[P K, F G, n] → [A K, G n]."""
        return x.view(len(self.into_grid), -1).index_select(0, self.out_of_grid)

    def _to_blocks(self, x: Tensor, group: int) -> Tensor:
        """[A K, G n] of the rows → [N K, G, n]."""
        x = x if self.of_blocks is None else x.index_select(0, self.of_blocks)
        return x.view(len(x), group, -1)

    def _sum_of_blocks(self, x: Tensor) -> Tensor:
        """[N K, G, n] → [A K, G n], a row's blocks added up."""
        x = x.view(len(x), -1)
        if self.of_blocks is None:
            return x
        sums = torch.zeros(len(self.lengths) * self.cache.heads, x.shape[1], device=x.device)
        return sums.index_add_(0, self.of_blocks, x.float()).to(x.dtype)
