"""The policy as it is run: LoRA folded into the weights, few and large products.

A decode step multiplies a handful of rows by every weight of the model, so what counts is to read
the weights once and to call few functions. For the Llama family (Llama, Qwen2, Qwen3) each step of
GRPO therefore begins with a copy of the linear layers in which

    LoRA's B A is added to the weight it adapts (apart, it costs 14 small products a layer),
    query, key and value are one product, gate and up another,
    on a CPU the weights lie in the order that its matrix kernels read them in.

With LoRA, training runs on the same copy, and so does the reference pass, on one without the
adapters: sampler and scorer are then one model to the bit but for the shapes of their products.
Folding rounds W + B A to the weights' dtype, so in bfloat16 a change of less than 1/512 of a weight
may wait for more of its kind; the adapters themselves lose nothing, their gradient is that of
y = x W^T + x A^T B^T, and their float32 masters move at every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

FAMILY = ("llama", "qwen2", "qwen3")


def fold(model: nn.Module, gradient_checkpointing: bool = False) -> FoldedModel | None:
    """A snapshot of a transformers model, of the adapters in it that are active; None if it cannot
    be folded: another family, a quantised base (unpacked, it would not fit), an adapter on other
    layers than the linear ones of the decoder."""
    if model.config.model_type not in FAMILY or model.config.hidden_act != "silu":
        return None
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    linears = [m for m in decoder.modules() if isinstance(m, (nn.Linear, LoraLayer))]
    plain = all(type(_base(module)) is nn.Linear for module in linears)
    if not plain or type(decoder.embed_tokens) is not nn.Embedding or type(head) is not nn.Linear:
        return None
    return FoldedModel(
        embedding=decoder.embed_tokens.weight,
        layers=[_fold_layer(layer) for layer in decoder.layers],
        norm=_norm(decoder.norm),
        rotary=decoder.rotary_emb,
        head=FoldedLinear([head]),
        gradient_checkpointing=gradient_checkpointing,
    )


@dataclass
class FoldedModel:
    """Answers as policy.hidden_states and policy.head do."""

    embedding: Tensor  # [V, hidden]
    layers: list[_Layer]
    norm: _Norm
    rotary: nn.Module
    head: FoldedLinear  # [.., hidden] → logits [.., V]
    gradient_checkpointing: bool

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, layout) -> Tensor:
        """input_ids and position_ids [B, T] → [B, T, hidden]; `layout` says who sees whom."""
        hidden = F.embedding(input_ids, self.embedding)
        cos, sin = self.rotary(hidden, position_ids)  # [B, T, D]
        half = sin.shape[-1] // 2
        # rotate_half(x) * sin without its negation: roll swaps the halves, the sign is in here.
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        cos, sin = cos[:, :, None], sin[:, :, None]
        again = self.gradient_checkpointing and torch.is_grad_enabled()
        for index, layer in enumerate(self.layers):
            if again:  # no dropout in here, so there is no random state to keep
                hidden = checkpoint(
                    layer, index, hidden, cos, sin, layout,
                    use_reentrant=False, preserve_rng_state=False,
                )  # fmt: skip
            else:
                hidden = layer(index, hidden, cos, sin, layout)
        return self.norm(hidden)


@dataclass
class _Layer:
    query_key_value: FoldedLinear  # of the normed hidden state
    heads: int  # H
    shared: int  # K
    head_norm: _Norm | None  # [H + K, D]: Qwen3 norms each query and key head
    scaling: float
    attention_out: FoldedLinear
    gate_up: FoldedLinear  # of the normed hidden state
    down: FoldedLinear  # of silu(gate) * up

    def __call__(self, index, hidden, cos, sin, layout):
        batch, tokens, _ = hidden.shape
        together = self.query_key_value(hidden)
        together = together.view(batch, tokens, self.heads + 2 * self.shared, -1)
        rotated, value = together.split([self.heads + self.shared, self.shared], dim=2)
        if self.head_norm is not None:
            rotated = self.head_norm(rotated)
        swapped = rotated.roll(rotated.shape[-1] // 2, dims=-1)
        rotated = torch.addcmul(rotated * cos, swapped, sin)
        query, key = rotated.split([self.heads, self.shared], dim=2)
        out = layout.attend(
            index, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), self.scaling
        )
        hidden = hidden + self.attention_out(out.reshape(batch, tokens, -1))
        return hidden + self.down(self.gate_up(hidden))


def _fold_layer(layer: nn.Module) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norm = None
    heads = attention.q_proj.out_features // attention.head_dim
    shared = attention.k_proj.out_features // attention.head_dim
    if hasattr(attention, "q_norm"):
        query, key = _norm(attention.q_norm), _norm(attention.k_norm)
        weight = torch.cat([query.weight.expand(heads, -1), key.weight.expand(shared, -1)])
        head_norm = _Norm(weight, query.epsilon)
    return _Layer(
        query_key_value=FoldedLinear(
            [attention.q_proj, attention.k_proj, attention.v_proj], _norm(layer.input_layernorm)
        ),
        heads=heads,
        shared=shared,
        head_norm=head_norm,
        scaling=attention.scaling,
        attention_out=FoldedLinear([attention.o_proj]),
        gate_up=FoldedLinear([mlp.gate_proj, mlp.up_proj], _norm(layer.post_attention_layernorm)),
        down=FoldedLinear([mlp.down_proj], _Gate()),
    )


def _norm(module: nn.Module) -> _Norm:
    return _Norm(module.weight.detach(), module.variance_epsilon)


@dataclass
class _Norm:
    """RMS norm as transformers computes it; torch's own takes twice as many small operations on a
    CPU."""

    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return _NormAlone.apply(x, self) if torch.is_grad_enabled() else self.plain(x)

    def plain(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * self._scale(wide)).to(x.dtype) * self.weight

    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        wide, grad = x.float(), (grad * self.weight).float()
        scale = self._scale(wide)
        normed = wide * scale
        along = (grad * normed).mean(dim=-1, keepdim=True)
        return grad.sub_(normed.mul_(along)).mul_(scale).to(x.dtype)

    def _scale(self, wide: Tensor) -> Tensor:
        return wide.square().mean(dim=-1, keepdim=True).add_(self.epsilon).rsqrt_()


class _NormAlone(torch.autograd.Function):
    """A norm without a product behind it, of which x alone is kept."""

    @staticmethod
    def forward(ctx, x, norm):
        ctx.save_for_backward(x)
        ctx.norm = norm
        return norm.plain(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.norm.backward(*ctx.saved_tensors, grad), None


@dataclass
class _Gate:
    """[.., gate and up] → silu(gate) * up."""

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return torch.cat([grad_gate, F.silu(gate).mul_(grad)], dim=-1)


class FoldedLinear:
    """Linear maps of the same input as one product, LoRA in the weights; what comes `before` is
    done to the input first.

    The base is frozen. The adapters are not: where gradients are wanted, they get theirs.
    """

    def __init__(self, modules: list[nn.Module], before: _Norm | _Gate | None = None):
        self.modules, self.before = modules, before
        self.bases = [_base(module) for module in modules]
        self.out_features = sum(base.out_features for base in self.bases)
        weights = [_with_lora(module) for module in modules]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.bias = _joined_bias(self.bases)
        self.packed = _pack(weight)
        self.folded = weight if self.packed is None else None

    @property
    def weight(self) -> Tensor:
        """[out, in] of a single map without an adapter, such as the output head."""
        (base,) = self.bases
        return base.weight

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # first: a decode step comes here four times a layer
            return self.product(x)
        adapters = _adapters(self.modules)
        parameters = [p for a in adapters for p in a.parameters]
        return _FoldedProduct.apply(x, self, adapters, *parameters)

    def product(self, x: Tensor) -> Tensor:
        if self.before is not None:
            x = self.before(x)
        if self.packed is None:
            return F.linear(x, self.folded, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


@dataclass
class _Adapter:
    """LoRA beside one of the maps: its rows of the product, B [out, r] and A [r, in]."""

    rows: slice
    parameters: tuple[Tensor, Tensor]  # A, B
    scale: float


def _adapters(modules: list[nn.Module]) -> list[_Adapter]:
    """Those that are trained now."""
    found, start = [], 0
    for module in modules:
        stop = start + _base(module).out_features
        if isinstance(module, LoraLayer) and not module.disable_adapters:
            for name in module.active_adapters:
                pair = module.lora_A[name].weight, module.lora_B[name].weight
                if pair[0].requires_grad:
                    found.append(_Adapter(slice(start, stop), pair, module.scaling[name]))
        start = stop
    return found


class _FoldedProduct(torch.autograd.Function):
    """y = f(x) (W + scale B A)^T, f being what comes before. Backward needs no folded weights in
    their plain order: df = dy W + scale (dy B) A, with W as the base holds it. Of x and f(x) only x
    is kept: f again costs a few percent, both together nearly half of the activations' memory."""

    @staticmethod
    def forward(ctx, x, linear, adapters, *parameters):
        ctx.save_for_backward(x, *parameters)
        ctx.linear, ctx.adapters = linear, adapters
        return linear.product(x)

    @staticmethod
    def backward(ctx, grad):
        x, *parameters = ctx.saved_tensors
        wanted = ctx.needs_input_grad[0]
        before, grad = ctx.linear.before, grad.flatten(0, -2)
        if ctx.adapters:
            flat = (before(x) if before else x).flatten(0, -2)
        grad_x, start = None, 0
        if wanted:
            grad_x = grad.new_zeros(len(grad), ctx.linear.bases[0].in_features)
            for base in ctx.linear.bases:
                stop = start + base.out_features
                grad_x.addmm_(grad[:, start:stop], base.weight)
                start = stop
        gradients = []
        for adapter, a, b in zip(ctx.adapters, parameters[::2], parameters[1::2], strict=True):
            told = grad[:, adapter.rows]  # [T, out]
            through_b = (told @ b) * adapter.scale  # [T, r]
            gradients.append(through_b.mT @ flat)
            gradients.append(told.mT @ (flat @ a.mT) * adapter.scale)
            if wanted:
                grad_x.addmm_(through_b, a)
        if wanted:
            grad_x = grad_x.view(*x.shape[:-1], -1)
            grad_x = before.backward(x, grad_x) if before else grad_x
        return grad_x, None, None, *gradients


def _base(module: nn.Module) -> nn.Linear:
    return module.get_base_layer() if isinstance(module, LoraLayer) else module


def _joined_bias(bases: list[nn.Linear]) -> Tensor | None:
    if all(base.bias is None for base in bases):
        return None
    return torch.cat(
        [
            base.weight.new_zeros(base.out_features) if base.bias is None else base.bias.detach()
            for base in bases
        ]
    )


def _with_lora(module: nn.Module) -> Tensor:
    weight = _base(module).weight.detach()
    if not isinstance(module, LoraLayer) or module.disable_adapters:
        return weight
    for adapter in module.active_adapters:
        a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
        a, b = (x.detach().to(weight.dtype) for x in (a, b))
        # One product that adds to the weight, summed in float32 and rounded once.
        weight = torch.addmm(weight, b, a, alpha=module.scaling[adapter])
    return weight


def _pack(weight: Tensor) -> Tensor | None:
    """The weight in the order that oneDNN's kernels read: 1.2 to 2 times as fast, since an ordinary
    tensor is put into that order at every call. torch.compile packs with the same function, which
    has no public name; None where it would not help or is not there."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return None
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)


ROWS = 32  # rows of a product that the order is chosen for; right for any number
