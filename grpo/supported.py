"""Refuse at start a model that this project would run wrongly.

Our attention is plain causal attention over everything before a token, and the log-probs are those
of the head's output. A model that attends in another way (sliding windows shorter than the texts,
linear or chunked layers, attention sinks) or changes its logits behind the head (soft capping,
scaling) would train without an error and on the wrong numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo.errors import UserError
from grpo.packing import Group, pack
from grpo.policy import Policy

# Largest difference of two logits, as a share of the largest logit: rounding, and no more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06}

# Logits are changed behind the head, or scores within the attention, unless it has this value.
NEUTRAL = {
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
}
PROMPT, COMPLETION = 8, 6


def check_supported(policy: Policy, context: int) -> None:
    """Raises UserError, with the reason, for a model that would be run wrongly.

    context: the longest prompt and completion together, in tokens. First what the configuration
    says, then a trial: the logits of a random prompt and two random completions, packed as in
    training, against transformers' own forward pass of each.
    """
    name = policy.base.name_or_path or type(policy.base).__name__
    _check_config(name, policy.base.config.get_text_config(), context)
    try:
        ours, theirs = _logits_both_ways(policy)
    except (TypeError, ValueError, AttributeError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--model {name}: {type(policy.base).__name__} does not take this project's attention "
            f"({reason}); use a Llama, Qwen or similar decoder"
        ) from error
    off = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    if not off <= TOLERANCE.get(policy.dtype, TOLERANCE[torch.bfloat16]):
        raise UserError(
            f"--model {name}: {type(policy.base).__name__} computes its logits in a way that this "
            f"project does not reproduce (off by {off:.1%} in a trial); use another model"
        )


def _check_config(name: str, config, context: int) -> None:
    for setting, neutral in NEUTRAL.items():
        value = getattr(config, setting, neutral)
        if value not in (neutral, None):
            raise UserError(
                f"--model {name}: {setting} {value} is not supported; use another model"
            )
    window = getattr(config, "sliding_window", None)
    # A list of kinds, or, in older configurations, only the window, which then is every layer's.
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full"]
    widths = {
        "sliding_attention": window,
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    for kind in sorted(set(kinds) - {"full_attention", "full"}):
        width = widths.get(kind)
        if width is None:
            raise UserError(
                f"--model {name}: its {kind} layers are not supported; use a model with full "
                "attention in every layer"
            )
        if context > width:
            raise UserError(
                f"--model {name}: its {kind} layers see {width} tokens, but prompt and completion "
                f"take up to {context}; lower --max-prompt-length or --max-completion-length"
            )


@torch.no_grad()
def _logits_both_ways(policy: Policy) -> tuple[Tensor, Tensor]:
    """Logits [completion tokens, V] in float32: ours, packed, and transformers', row by row."""
    base = policy.base
    generator = torch.Generator().manual_seed(0)
    vocabulary = len(policy.tokenizer)
    ids = torch.randint(vocabulary, (PROMPT + 2 * COMPLETION,), generator=generator).tolist()
    prompt, rest = ids[:PROMPT], ids[PROMPT:]
    completions = [rest[:COMPLETION], rest[COMPLETION:]]
    batch = pack([Group(prompt, completions, [0, 1])], policy.device)
    attention = base.config._attn_implementation
    try:
        base.set_attn_implementation("eager")
        rows = [
            base(torch.tensor([prompt + c], device=policy.device), use_cache=False).logits[0]
            for c in completions
        ]
    finally:
        base.set_attn_implementation(attention)
    theirs = torch.cat([row[PROMPT - 1 : -1] for row in rows])
    hidden = policy.hidden_states(batch.input_ids, batch.position_ids, batch.layout)[0]
    return policy.head(hidden[batch.source]).float(), theirs.float()
