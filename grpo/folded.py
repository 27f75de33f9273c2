"""The policy as the rollout runs it: LoRA folded into the weights, few and large products.

A decode step multiplies a handful of rows by every weight of the model, so what counts is to read
the weights once and to call few functions. For the Llama family (Llama, Qwen2, Qwen3) a rollout
therefore begins with a copy of the linear layers in which

    LoRA's B A is added to the weight it adapts (apart, it costs 14 small products a layer),
    query, key and value are one product, gate and up another,
    on a CPU the weights lie in the order that its matrix kernels read them in.

Folding rounds W + B A to the weights' dtype, where training adds the two products: in float32 the
log-probs agree to 1e-5, in bfloat16 to rounding, as `sampler_gap` shows at every step. Training
takes its ratios from its own log-probs, so the first one is 1 all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

FAMILY = ("llama", "qwen2", "qwen3")


def fold(policy) -> FoldedModel | None:
    """A snapshot of the policy's weights; None where the policy has to sample as it is: another
    family, a quantised base (unpacked, it would not fit), an adapter on other layers."""
    model = policy.base
    if model.config.model_type not in FAMILY:
        return None
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    linears = [m for m in decoder.modules() if isinstance(m, (nn.Linear, LoraLayer))]
    foldable = all(_is_plain(m) for m in linears) and type(decoder.embed_tokens) is nn.Embedding
    if not foldable or type(head) is not nn.Linear or model.config.hidden_act != "silu":
        return None
    return FoldedModel(
        embedding=decoder.embed_tokens.weight,
        layers=[_fold_layer(layer) for layer in decoder.layers],
        norm=_norm(decoder.norm),
        rotary=decoder.rotary_emb,
        output=_Linear([head]),
    )


def _is_plain(module: nn.Module) -> bool:
    base = module.get_base_layer() if isinstance(module, LoraLayer) else module
    return type(base) is nn.Linear


@dataclass
class FoldedModel:
    """Answers as policy.hidden_states and policy.head do."""

    embedding: Tensor  # [V, hidden]
    layers: list[_Layer]
    norm: tuple[Tensor, float]  # weight, epsilon
    rotary: nn.Module
    output: _Linear

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, layout) -> Tensor:
        """input_ids and position_ids [B, T] → [B, T, hidden]; `layout` says who sees whom."""
        hidden = F.embedding(input_ids, self.embedding)
        cos, sin = self.rotary(hidden, position_ids)  # [B, T, D]
        half = sin.shape[-1] // 2
        # rotate_half(x) * sin without its negation: roll swaps the halves, the sign is in here.
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        cos, sin = cos[:, :, None], sin[:, :, None]
        for index, layer in enumerate(self.layers):
            hidden = layer(index, hidden, cos, sin, layout)
        return _rms_norm(hidden, self.norm)

    def head(self, hidden: Tensor) -> Tensor:
        """[.., hidden] → logits [.., V]."""
        return self.output(hidden)


@dataclass
class _Layer:
    attention_norm: tuple[Tensor, float]
    query_key_value: _Linear
    heads: int  # H
    shared: int  # K
    head_norm: tuple[Tensor, float] | None  # [H + K, D]: Qwen3 norms each query and key head
    scaling: float
    attention_out: _Linear
    mlp_norm: tuple[Tensor, float]
    gate_up: _Linear
    down: _Linear

    def __call__(self, index, hidden, cos, sin, layout):
        batch, tokens, _ = hidden.shape
        together = self.query_key_value(_rms_norm(hidden, self.attention_norm))
        together = together.view(batch, tokens, self.heads + 2 * self.shared, -1)
        rotated, value = together.split([self.heads + self.shared, self.shared], dim=2)
        if self.head_norm is not None:
            rotated = _rms_norm(rotated, (None, self.head_norm[1])) * self.head_norm[0]
        rotated = rotated * cos + rotated.roll(rotated.shape[-1] // 2, dims=-1) * sin
        query, key = rotated.split([self.heads, self.shared], dim=2)
        out = layout.attend(
            index, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), self.scaling
        )
        hidden = hidden + self.attention_out(out.reshape(batch, tokens, -1))
        gate, up = self.gate_up(_rms_norm(hidden, self.mlp_norm)).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * up)


def _fold_layer(layer: nn.Module) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norm = None
    heads = attention.q_proj.out_features // attention.head_dim
    shared = attention.k_proj.out_features // attention.head_dim
    if hasattr(attention, "q_norm"):
        (query, epsilon), (key, _) = _norm(attention.q_norm), _norm(attention.k_norm)
        head_norm = torch.cat([query.expand(heads, -1), key.expand(shared, -1)]), epsilon
    return _Layer(
        attention_norm=_norm(layer.input_layernorm),
        query_key_value=_Linear([attention.q_proj, attention.k_proj, attention.v_proj]),
        heads=heads,
        shared=shared,
        head_norm=head_norm,
        scaling=attention.scaling,
        attention_out=_Linear([attention.o_proj]),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_Linear([mlp.gate_proj, mlp.up_proj]),
        down=_Linear([mlp.down_proj]),
    )


def _norm(module: nn.Module) -> tuple[Tensor, float]:
    return module.weight.detach(), module.variance_epsilon


def _rms_norm(x: Tensor, norm: tuple[Tensor | None, float]) -> Tensor:
    weight, epsilon = norm
    return F.rms_norm(x, x.shape[-1:], weight, epsilon)


class _Linear:
    """Linear maps of the same input as one product; LoRA in the weights."""

    def __init__(self, modules: list[nn.Module]):
        weights, biases = [], []
        for module in modules:
            base = module.get_base_layer() if isinstance(module, LoraLayer) else module
            weights.append(_with_lora(base.weight.detach(), module))
            biases.append(base.bias)
        self.weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.bias = None
        if any(bias is not None for bias in biases):
            sizes = [weight.shape[0] for weight in weights]
            zeros = [self.weight.new_zeros(size) for size in sizes]
            given = [z if b is None else b.detach() for b, z in zip(biases, zeros, strict=True)]
            self.bias = torch.cat(given)
        self.packed = _pack(self.weight)
        if self.packed is not None:
            self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def _with_lora(weight: Tensor, module: nn.Module) -> Tensor:
    if not isinstance(module, LoraLayer) or module.disable_adapters:
        return weight
    total = weight.float() if weight.dtype != torch.float64 else weight
    for adapter in module.active_adapters:
        total = total + module.get_delta_weight(adapter)
    return total.to(weight.dtype)


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
