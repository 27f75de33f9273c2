"""Several processes, one run: `torchrun --nproc-per-node 2 train.py …`. A process is a rank.

All ranks go through the same program with the same settings, weights and random numbers. They
share out what takes long: the prompts to complete, the rewards of the completions, the forward and
backward passes. They put together what was found: completions with their rewards, the gradient,
sums for the log. The rest each rank computes for itself, with the same result, so the weights stay
the same everywhere without being sent. The first rank alone writes files and prints.

There is no DistributedDataParallel around the model. It would average gradients in the middle of
every backward pass, and wants as many passes on every rank; here a step has several micro-batches,
their number differs between ranks, and one may have none. Each loss is divided by the rows or
tokens of the whole step already, so one plain sum of the gradients before the clip is exact.

Nobody waits for a rank that has failed: whatever ranks tell each other begins with one message from
each, and a rank that fails sends its error in place of its next message.

Without torchrun there is one rank, and every function here gives back what it was given. No torch
at the top: the command line is checked before torch is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from grpo.errors import UserError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# A rank may wait for the slowest rollout, or for the first to save; torchrun sees to dead ones.
TIMEOUT = timedelta(hours=2)
BUCKET = 2**24  # numbers summed in one call: 64 MB in float32


class OtherRankFailed(UserError):
    """Another rank's error, with its message; all ranks know of it."""


class RankLost(UserError):
    """A rank does not answer any more, so that it can be told nothing either."""


# ---- who this is --------------------------------------------------------------------------------


def _launched(name: str, otherwise: int) -> int:
    """One of torchrun's numbers; clusters set such variables for other purposes too."""
    return int(os.environ[name]) if "TORCHELASTIC_RUN_ID" in os.environ else otherwise


def rank() -> int:
    return _launched("RANK", 0)


def world_size() -> int:
    return _launched("WORLD_SIZE", 1)


def local_rank() -> int:
    """Among the ranks of this machine."""
    return _launched("LOCAL_RANK", 0)


def local_world_size() -> int:
    return _launched("LOCAL_WORLD_SIZE", 1)


def is_first() -> bool:
    """Whether this is the rank that writes and prints; True without torchrun."""
    return rank() == 0


@contextmanager
def silent_unless_first() -> Iterator[None]:
    """Inside, what other ranks print or warn of goes nowhere; an uncaught error is shown."""
    if is_first():
        yield
        return
    nowhere = open(os.devnull, "w")  # noqa: SIM115  libraries' loggers keep it
    with redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def let_the_first_tell() -> None:
    """A rank that has failed waits here: torchrun ends all when one ends, and the first, which may
    lag behind, is to say why before it is ended."""
    if not is_first():
        with suppress(KeyboardInterrupt):
            time.sleep(1.0)


# ---- the process group --------------------------------------------------------------------------


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Inside, the ranks can talk. Whatever one of them raises in there ends all of them."""
    if world_size() == 1:
        yield
        return
    import torch

    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield
        gather("done")  # until then another rank may fail
    except RankLost as error:
        if not is_first():
            print(f"error: rank {rank()}: {error}", file=sys.__stderr__)
        raise
    except Exception as error:
        with suppress(RankLost):
            if not isinstance(error, OtherRankFailed):
                _exchange({"error": _in_words(error)})
            # torchrun ends the others when one ends: first let all save what they have.
            _exchange({})
        raise
    torch.distributed.destroy_process_group()


def _in_words(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    return f"rank {rank()} failed with {type(error).__name__}: {error} (its traceback is shown)"


def _exchange(message: dict) -> list[dict]:
    """The messages of all ranks, in their order; as JSON, since a pickle could run code."""
    import torch
    from torch.distributed import all_gather

    own = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    try:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
        all_gather(lengths, torch.tensor([len(own)]))
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        padded[: len(own)] = own
        texts = [torch.empty_like(padded) for _ in lengths]
        all_gather(texts, padded)
    except RuntimeError as error:
        raise RankLost(
            "another process of this run has ended without a word (killed, perhaps for its "
            "memory); go on from the last checkpoint with --resume"
        ) from error
    return [json.loads(t[:n].numpy().tobytes()) for t, n in zip(texts, lengths, strict=True)]


# ---- sharing out and putting together -----------------------------------------------------------


def share(count: int) -> slice:
    """This rank's part of so many things: neighbours, and as many as the others have, or one less.

    Without torchrun all of them.

    >>> share(5)
    slice(0, 5, None)
    """
    return slice(rank() * count // world_size(), (rank() + 1) * count // world_size())


def gather(value: T) -> list[T]:
    """Every rank's value, in the order of the ranks, on every rank; whatever JSON holds.

    Raises OtherRankFailed if a rank has failed instead of coming here.
    """
    if world_size() == 1:
        return [value]
    messages = _exchange({"value": value})
    for message in messages:
        if "error" in message:
            raise OtherRankFailed(message["error"])
    return [message["value"] for message in messages]


def from_first(decide: Callable[[], T]) -> T:
    """What `decide()` returns on the first rank; the others do not call it."""
    return gather(decide() if is_first() else None)[0]


def any_rank(flag: bool) -> bool:
    """Whether it is so on any rank."""
    return any(gather(flag))


def add_up(sums: dict[str, float]) -> dict[str, float]:
    """Sums over all ranks; a name that a rank lacks is 0 there."""
    parts = gather(sums)
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace each gradient by its sum over the ranks, in the gradient's own precision.

    A rank without a gradient adds 0, which it is then given; a parameter without one on any rank
    stays without, since AdamW passes those over.
    """
    if world_size() == 1:
        return
    import torch

    parameters = list(parameters)
    found = zip(*gather([p.grad is not None for p in parameters]), strict=True)
    used = [p for p, anywhere in zip(parameters, map(any, found), strict=True) if anywhere]
    try:
        for p in used:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for gradients in _buckets([p.grad for p in used]):
            flat = torch.cat([g.flatten() for g in gradients])
            torch.distributed.all_reduce(flat)
            for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                g.copy_(part.view_as(g))
    except RuntimeError as error:  # too late for a message: the others are in the sum already
        raise RankLost(f"the gradients could not be summed over the ranks ({error})") from error


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours together, up to BUCKET numbers: a call for each small tensor would cost more."""
    bucket, size = [], 0
    for tensor in tensors:
        if bucket and size + tensor.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
