"""How much memory a run will need, by part, before anything is loaded (--dry-run).

Counted from the model's shape and the settings; nothing is measured. The weights, the optimizer
and the cache are exact to a few percent; activations are counted from the tensors that autograd
keeps in one layer of the Llama family (see the test). benchmarks/scaling.py holds the total
against the peak of real steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo.config import Config

LOGITS_COPIES = 3  # the chunk's logits, their log-softmax, and the gradient of one of them
PROGRAM = 475_000_000  # Python, torch and transformers; on a GPU, its context
# Of the activations, on a CPU: what passing tensors leave between those that are kept. With rows of
# 128 to 4,096 tokens it is 0 to a third (benchmarks/scaling.py).
HEAP_GAPS = 1 / 4
# 4 bits a weight, a byte for the scale of each block of 64, a float32 for each 256 of those.
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
FP32 = 4


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder-only transformer that decide its memory."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the linear maps of one layer: q, k, v, o, gate, up, down."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(self.hidden, q), (self.hidden, kv), (self.hidden, kv), (q, self.hidden)]
        wide = (self.hidden, self.intermediate)
        return [*attention, wide, wide, (self.intermediate, self.hidden)]

    @property
    def linear_parameters(self) -> int:
        return self.layers * sum(i * o for i, o in self.linears)

    @property
    def other_parameters(self) -> int:
        """Embedding, output head and norms: what quantisation leaves alone."""
        tables = 1 if self.tied_embeddings else 2
        return tables * self.vocab * self.hidden + (2 * self.layers + 1) * self.hidden


def model_shape(hf_config: Any) -> ModelShape:
    """From a transformers config, which can be read without loading the model."""
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    heads = text.num_attention_heads
    return ModelShape(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab=text.vocab_size,
        tied_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
    )


def tokens_per_step(config: Config) -> dict[str, int]:
    """The most tokens that one GRPO step samples and trains on.

    A prompt is computed once a group, in the rollout and in training alike.
    """
    rows = config.prompts_per_step * config.num_generations
    prompt = config.prompts_per_step * config.max_prompt_length
    completion = rows * config.max_episode_length
    return {
        "prompts": config.prompts_per_step,
        "completions": rows,
        "prompt tokens": prompt,
        "completion tokens": completion,
        "tokens in training": (prompt + completion) * config.num_iterations,
        "micro-batches": -(-(prompt + completion) // config.tokens_per_micro_batch),
    }


def estimate(shape: ModelShape, config: Config, compute_bytes: int) -> dict[str, int]:
    """Bytes by part, and "total" at the worst moment.

    compute_bytes: of one number of the weights and activations, 2 for bfloat16, 4 for float32.
    The rollout's cache, the reference's copy of the weights and the training's activations never
    live at once, so the total has the largest of the three; but on a CPU the gap that the copy
    leaves in memory is hardly filled by the activations, so there it counts in full.
    """
    always = _weights(shape, config, compute_bytes) | _training_state(shape, config, compute_bytes)
    folded = _folded_copy(shape, config, compute_bytes)
    if config.lora_rank > 0:
        always["folded copy"] = folded
    reference = {"reference: folded copy": folded if config.lora_rank > 0 and config.beta else 0}
    rollout = {
        "rollout: key-value cache": _cache(shape, config) * compute_bytes,
        # Sampling holds a row of float32 logits for each sequence, and sorts a copy.
        "rollout: logits": 2 * config.rollout_rows * shape.vocab * FP32,
        "rollout: folded copy": folded if config.lora_rank == 0 else 0,
    }
    activations = _activations(shape, config, compute_bytes)
    training = {
        "training: activations": activations,
        "training: gradients of a layer": _layer_gradients(shape, config, compute_bytes),
        "training: logits": _logits_chunk(shape, config, compute_bytes),
        "training: gaps in the heap": activations * HEAP_GAPS if config.device == "cpu" else 0,
    }
    beside = sum(reference.values()) if config.device == "cpu" else 0
    phases = (sum(rollout.values()), sum(reference.values()), sum(training.values()) + beside)
    total = sum(always.values()) + max(phases)
    named = {**always, **rollout, **reference, **training}
    parts = {name: round(size) for name, size in named.items() if size}
    return {**parts, "total": round(total)}


def trainable_parameters(shape: ModelShape, config: Config) -> int:
    """All of them, or LoRA's A [r, in] and B [out, r] beside every targeted linear map."""
    if config.lora_rank == 0:
        return shape.linear_parameters + shape.other_parameters
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    targets = {t.strip() for t in config.lora_targets.split(",")}
    # A name that is not of the Llama family is unknown here; then count all, rather too much.
    everything = not targets <= set(names)
    widths = [
        i + o for n, (i, o) in zip(names, shape.linears, strict=True) if everything or n in targets
    ]
    return shape.layers * config.lora_rank * sum(widths)


def _weights(shape: ModelShape, config: Config, compute_bytes: int) -> dict[str, float]:
    linear_bytes = NF4_BYTES if config.quantize == "nf4" else compute_bytes
    base = shape.linear_parameters * linear_bytes + shape.other_parameters * compute_bytes
    lora = config.lora_rank > 0
    adapter = trainable_parameters(shape, config) * compute_bytes if lora else 0
    # The reference is the model with its adapter off: free, unless the run starts from a trained
    # adapter, which has a frozen twin, or trains all weights, which needs a frozen copy.
    reference = 0
    if config.beta > 0:
        reference = base if not lora else adapter if config.adapter else 0
    return {
        "program": PROGRAM, "weights": base, "adapter": adapter, "reference copy": reference
    }  # fmt: skip


def _folded_copy(shape: ModelShape, config: Config, compute_bytes: int) -> int:
    """The linear maps and the output head once more (see grpo/folded.py); not of a 4-bit base."""
    if config.quantize == "nf4":
        return 0
    return (shape.linear_parameters + shape.vocab * shape.hidden) * compute_bytes


def _training_state(shape: ModelShape, config: Config, compute_bytes: int) -> dict[str, float]:
    """Gradients, AdamW's two states, and float32 masters of weights that are held in fewer bits."""
    count = trainable_parameters(shape, config)
    states = 2 * FP32 if config.optimizer == "adamw" else 2  # 8-bit: a byte each
    needs_masters = compute_bytes < FP32
    return {
        # With masters, gradients arrive in bfloat16 and are added up in float32.
        "gradients": count * (FP32 + (compute_bytes if needs_masters else 0)),
        "optimizer states": count * states,
        "float32 master weights": count * FP32 if needs_masters else 0,
    }


def _cache(shape: ModelShape, config: Config) -> int:
    """Numbers in the cache: a key and a value for each layer, key-value head and token.

    In a rollout the prompt is held once a group. An evaluation is the worst case: every row has a
    prompt of its own, and there is room for twice as many prompts as rows (see grpo/generate.py).
    A row's own tokens fill whole blocks on a CPU, whole buckets of a captured width on a GPU.
    """
    from grpo.cache import BLOCK  # imports torch, which --help can do without
    from grpo.decode import ON_CUDA

    unit = BLOCK if config.device == "cpu" else ON_CUDA.width_bucket
    own = -(-config.max_episode_length // unit) * unit
    tokens = config.rollout_rows * (2 * config.max_prompt_length + own)
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * tokens


def _activations(shape: ModelShape, config: Config, compute_bytes: int) -> float:
    """Bytes that autograd keeps for one micro-batch; nothing for the attention scores, which are
    computed again.

    With gradient checkpointing: each layer's input, and all of one layer while it is computed
    again. Where a 4-bit base keeps LoRA beside it, each adapter's input and output come on top.
    """
    hidden, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    folded = config.lora_rank > 0 and config.quantize != "nf4"
    if folded:
        # The two norms' inputs, rotated q and k, the product they came from with v, attention's
        # output and log-sum-exp, gate and up.
        layer = (2 * hidden + 3 * q + 3 * kv + 2 * shape.intermediate) * compute_bytes
        layer += shape.heads * FP32
    else:  # transformers' modules keep the norms' inputs in float32, and all that comes after
        kept = 5 * hidden + 3 * q + 3 * kv + 4 * shape.intermediate
        if config.lora_rank > 0:
            kept += sum(inputs for inputs, _ in shape.linears)
        layer = kept * compute_bytes + 2 * hidden * FP32
    if config.gradient_checkpointing:
        a_token = shape.layers * hidden * compute_bytes + layer
    else:
        a_token = shape.layers * layer
    return a_token * _micro_batch(config)


def _layer_gradients(shape: ModelShape, config: Config, compute_bytes: int) -> int:
    """Bytes that pass through the MLP's backward pass at its fullest, most of them six tensors of
    the intermediate width; a layer's are gone before the next one's come."""
    numbers = 6 * shape.intermediate + 2 * shape.hidden
    return numbers * compute_bytes * _micro_batch(config)


def _micro_batch(config: Config) -> int:
    """Tokens of the largest one: a row that is over the budget is a micro-batch by itself."""
    row = config.max_prompt_length + config.max_episode_length
    rows = config.num_generations * config.max_episode_length
    whole_step = config.prompts_per_step * (config.max_prompt_length + rows)
    return min(max(config.tokens_per_micro_batch, row), whole_step)


def _logits_chunk(shape: ModelShape, config: Config, compute_bytes: int) -> int:
    from grpo.logprobs import LOGITS_BUDGET  # imports torch, which --help can do without

    device = "cpu" if config.device == "cpu" else "cuda"
    numbers = min(LOGITS_BUDGET[device], _micro_batch(config) * shape.vocab)
    if config.lora_rank > 0:  # a frozen head: the logits become the probabilities in place
        return numbers * compute_bytes
    return LOGITS_COPIES * FP32 * numbers


def describe_memory(parts: dict[str, int]) -> str:
    """The estimate as a table in GB (10^9 bytes)."""
    width = max(len(name) for name in parts)
    return "\n".join(f"{name:<{width}}  {size / 1e9:8.3f} GB" for name, size in parts.items())
