"""One step of the decode loop, and how a device runs it.

A step keeps its state in tensors on the device (the last tokens, how far each row has grown), so
that the next one needs nothing from the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.cache import KeyValueCache
from grpo.decode_layout import DecodeLayout
from grpo.sampling import Sampling, draw_tokens


@dataclass(frozen=True)
class Pace:
    """How the decode loop runs on a device.

    On a CPU the host reads every token, and shapes follow the rows. A GPU must not wait for the
    host: it runs several steps between two looks (a row that stops in between runs on for nothing,
    and what it writes is dropped), in shapes so few that each can be captured as a CUDA graph.
    """

    steps: int  # between two looks of the host
    bucketed: bool  # rows up to a power of two, room for every prompt that may come, memory fixed
    width_bucket: int  # places of the rows' cache, up to a multiple of this
    cuda_graphs: bool


ON_CPU = Pace(steps=1, bucketed=False, width_bucket=32, cuda_graphs=False)
ON_CUDA = Pace(steps=8, bucketed=True, width_bucket=256, cuda_graphs=True)


def power_of_two(count: int) -> int:
    """The smallest one that is not below the count.

    >>> [power_of_two(n) for n in (1, 2, 3, 32, 33)]
    [1, 2, 4, 32, 64]
    """
    return 1 << (count - 1).bit_length()


class DecodeStep:
    """One token for every row, on the device alone: what it reads and writes stays there."""

    def __init__(
        self,
        *,
        model,  # hidden_states and head, as a Policy has them
        cache: KeyValueCache,
        sampling: Sampling,
        uniforms: Tensor | None,  # [all rows, max_new_tokens]; None: greedy
        rows: list[int],  # [A] which row of the output each is
        tokens: list[int],  # [A] the last token of each row
        lengths: list[int],  # [A] how many of its tokens are in the cache, the last one is not
        of_prompt: list[int],  # slot of its prompt; for fewer than A if the last ones are spare
        prompt_lengths: list[int],  # without the opening
        common: int,  # tokens of the opening
        device: torch.device,
        grid: tuple[int, int] | None,
    ):
        self.model, self.sampling, self.uniforms = model, sampling, uniforms
        self.cache = cache
        self.rows = torch.tensor(rows, device=device)
        self.tokens = torch.tensor(tokens, device=device)
        self.lengths = torch.tensor(lengths, device=device)
        starts = [common + prompt_lengths[slot] for slot in of_prompt]
        starts += [0] * (len(rows) - len(starts))
        self.starts = torch.tensor(starts, device=device)  # [A]
        self.layout = DecodeLayout(cache, prompt_lengths, of_prompt, self.lengths, grid)

    def __call__(self, width: int) -> tuple[Tensor, Tensor]:
        """The next token of each row and its log-prob, [A] and [A]."""
        self.layout.see(width)
        positions = self.starts + self.lengths
        hidden = self.model.hidden_states(self.tokens[:, None], positions[:, None], self.layout)
        uniforms = None
        if self.uniforms is not None:
            at = (self.lengths + 1).clamp(max=self.uniforms.shape[1] - 1)
            uniforms = self.uniforms[self.rows, at]
        tokens, logprobs = draw_tokens(self.model.head(hidden[:, 0]), self.sampling, uniforms)
        self.tokens.copy_(tokens)
        self.lengths.add_(1)
        if not self.cache.growing:
            # A row that has ended before the host looks writes its last place over and over.
            self.lengths.clamp_(max=min(self.cache.row_length, width) - 1)
        return tokens, logprobs

    def _tensors(self) -> list[Tensor]:
        layout = self.layout
        shared = [layout.into_grid, layout.out_of_grid, layout.prompt_bias]
        return [self.rows, self.tokens, self.lengths, self.starts, *shared]

    def load(self, other: DecodeStep):
        """Take over the rows of another step of the same shapes, in place."""
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine.copy_(theirs)


class Graphs:
    """Decode steps as CUDA graphs, one for each (rows, width) that comes up in a rollout.

    A graph replays with the addresses it was captured with: a step of other rows is copied into
    the tensors of the captured one.
    """

    def __init__(self):
        self.captured: dict[tuple[int, int], tuple[DecodeStep, Replay]] = {}
        self.pool = None

    def run(self, step: DecodeStep, width: int) -> tuple[DecodeStep, tuple[Tensor, Tensor]]:
        """(the step that has the state from now on, its tokens and log-probs)."""
        key = len(step.tokens), width
        if key not in self.captured:
            out = step(width)  # for once as it is: the libraries set themselves up at a first call
            replay, self.pool = capture(step, width, self.pool)
            self.captured[key] = step, replay
            return step, out
        kept, replay = self.captured[key]
        if kept is not step:
            kept.load(step)
        return kept, replay()


Replay = Callable[[], tuple[Tensor, Tensor]]


def capture(step: DecodeStep, width: int, pool) -> tuple[Replay, object]:
    """(a function that repeats the step, the memory pool that graphs of one rollout share)."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        tokens, logprobs = step(width)

    def replay():
        graph.replay()
        # The next replay writes the same places, and so may one of another shape from this pool.
        return tokens.clone(), logprobs.clone()

    return replay, graph.pool()
