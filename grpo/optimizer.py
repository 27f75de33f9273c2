"""AdamW for the policy: fp32 master weights, 8-bit states, exact save and restore, learning rates.

A bfloat16 number has 8 bits of precision: adding 1e-6 to a weight of 0.02 gives 0.02 again, so at
the learning rates of GRPO a bf16 weight would never move. Every bf16 (or fp16) parameter therefore
has a float32 master copy; the optimizer moves the master, and the parameter is the master rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from grpo.errors import UserError

# A constant table of bitsandbytes, shared by all parameters: nothing to save.
NOT_SAVED = ("qmap1", "qmap2")


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    *,
    kind: str = "adamw",
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    eps: float = 1e-8,
) -> Optimizer:
    """AdamW (arXiv 1711.05101) over named parameters; the learning rate is 0 until it is set.

    kind: adamw, or adamw_8bit / paged_adamw_8bit (bitsandbytes): their two states are quantised to
        8 bits in blocks of 256 (arXiv 2110.02861), 2 bytes a parameter instead of 8; paged ones
        also move to CPU memory when the GPU's is full (on a CPU paged is the same as not paged).
        Tensors of fewer than 4,096 elements keep 32-bit states.
    weight_decay: on matrices only; biases and the scales of norms (ndim < 2) are not decayed.
    Raises UserError if bitsandbytes is needed and missing.
    """
    return Optimizer(parameters, kind, betas, weight_decay, eps)


def learning_rate_at(
    step: int, total_steps: int, base: float, scheduler: str, warmup_ratio: float
) -> float:
    """The learning rate of step 0, 1, .., total_steps - 1: linear warmup, then the scheduler.

    base 1.0, 10 steps, warmup_ratio 0.2, linear: 1/3, 2/3, 1, 7/8, 6/8, .. 1/8. The first step
    already learns something, and so does the last.
    """
    warmup_steps = int(warmup_ratio * total_steps)
    if step < warmup_steps:
        return base * (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if scheduler == "constant":
        return base
    if scheduler == "linear":
        return base * (1 - progress)
    if scheduler == "cosine":
        return base * 0.5 * (1 + math.cos(math.pi * progress))
    raise UserError(f"--lr-scheduler: '{scheduler}' is none of cosine, linear, constant")


class Optimizer:
    """What the loop needs of an optimizer. Made by `build_optimizer`.

    One update: zero_grad(), then for each micro-batch backward() and accumulate(), then
    clip_grad_norm(..), set_learning_rate(..), step().
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        kind: str,
        betas: tuple[float, float],
        weight_decay: float,
        eps: float,
    ):
        self.parameters = dict(parameters)
        self.masters = {  # the parameter itself where it has the precision already
            name: p if p.dtype.itemsize >= 4 else nn.Parameter(p.detach().float())
            for name, p in self.parameters.items()
        }
        decayed = [p for p in self.masters.values() if p.ndim >= 2]
        others = [p for p in self.masters.values() if p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self.inner = _adamw(kind, groups, betas, eps)

    @property
    def learning_rate(self) -> float:
        return self.inner.param_groups[0]["lr"]

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.inner.param_groups:
            group["lr"] = learning_rate

    def zero_grad(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = self.masters[name].grad = None

    def accumulate(self) -> None:
        """Add the gradients of the bf16 parameters to those of their masters, in float32.

        To be called after each backward(), so that the micro-batches of a step add up without
        rounding to bf16 in between. Does nothing for float32 parameters, where torch adds up.
        """
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is parameter or parameter.grad is None:
                continue
            gradient, parameter.grad = parameter.grad.float(), None
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale all gradients so that their joint norm is at most max_norm; the norm before that.

        A norm that is not finite is returned and leaves the gradients alone: whether to go on is
        not for the optimizer to decide.
        """
        self.accumulate()
        gradients = [p.grad for p in self.masters.values() if p.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
        if math.isfinite(norm) and norm > max_norm:
            for gradient in gradients:
                gradient.mul_(max_norm / norm)
        return norm

    def step(self) -> None:
        self.accumulate()
        self.inner.step()
        self._round_masters()

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, by name: "<parameter>.exp_avg", ".step", ".master".

        Copies on the CPU, contiguous and none sharing memory with another, so that safetensors can
        write them; later steps do not change them.
        """
        return {name: _snapshot(value) for name, value in self._named_state().items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what state_tensors gave, bit for bit; parameters with a master are set from it.

        Raises UserError, having changed nothing, if a tensor is missing, unknown, or of another
        shape or type: the run was then started with another model, LoRA or optimizer.
        """
        _check_same_state(self._named_state(), tensors)
        with torch.no_grad():
            for name, value in self._named_state().items():
                if isinstance(value, Tensor):
                    value.copy_(tensors[name])
                else:  # the step count of bitsandbytes is an int
                    parameter, _, key = name.rpartition(".")
                    self.inner.state[self.masters[parameter]][key] = int(tensors[name])
            self._round_masters()

    def _named_state(self) -> dict[str, Tensor | int]:
        """The live tensors (and step counts) behind state_tensors."""
        state: dict[str, Tensor | int] = {}
        for name, master in self.masters.items():
            for key, value in self.inner.state[master].items():
                if key not in NOT_SAVED:
                    state[f"{name}.{key}"] = value
            if master is not self.parameters[name]:
                state[f"{name}.master"] = master
        return state

    def _round_masters(self) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter:
                    parameter.copy_(self.masters[name])


def _adamw(
    kind: str, groups: list[dict], betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """The optimizer with the state of every parameter in place, as after `step` at time 0.

    Both libraries make the states at the first step; with them there from the start, saving and
    restoring need no special case for a run that has not stepped yet.
    """
    if kind == "adamw":
        inner = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        for group in inner.param_groups:
            for p in group["params"]:
                inner.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        return inner
    if kind not in ("adamw_8bit", "paged_adamw_8bit"):
        raise UserError(f"--optimizer: '{kind}' is none of adamw, adamw_8bit, paged_adamw_8bit")
    try:
        import bitsandbytes
    except ImportError as error:
        raise UserError(
            f"--optimizer {kind} needs bitsandbytes, which cannot be imported ({error}): "
            "install it or use --optimizer adamw"
        ) from error
    paged = kind == "paged_adamw_8bit"
    inner = bitsandbytes.optim.AdamW8bit(groups, lr=0.0, betas=betas, eps=eps, is_paged=paged)
    for group_index, group in enumerate(inner.param_groups):
        for index, p in enumerate(group["params"]):
            inner.init_state(group, p, group_index, index)
    return inner


def _check_same_state(here: Mapping[str, Tensor | int], saved: Mapping[str, Tensor]) -> None:
    advice = "resume with the model, LoRA and optimizer settings that the run was started with"
    for name in sorted(here.keys() | saved.keys()):
        if name not in saved:
            raise UserError(f"optimizer state '{name}' is missing in the checkpoint: {advice}")
        if name not in here:
            raise UserError(f"optimizer state '{name}' in the checkpoint is unknown: {advice}")
        theirs, ours = _describe(saved[name]), _describe(torch.as_tensor(here[name]))
        if theirs != ours:
            raise UserError(
                f"optimizer state '{name}' is {theirs} in the checkpoint, not {ours}: {advice}"
            )


def _snapshot(value: Tensor | int) -> Tensor:
    """A copy on the CPU; contiguous even where the parameter is not."""
    value = torch.as_tensor(value).detach()
    return value.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
