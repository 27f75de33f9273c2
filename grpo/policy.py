"""The policy: a causal language model, what of it is trained, and the reference beside it.

`load_policy` makes one from a directory, a hub name, or from nothing ("scratch"). What the rest of
the project needs of it is small: hidden states, the output head, the trainable weights, and
`reference_mode`, in which the same calls answer as the reference does.

Every dropout is 0, in training too: with dropout on, the sampler and the scorer would be two
different policies and the first ratio would not be 1.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from grpo.attention import ATTENTION
from grpo.errors import UserError
from grpo.folded import FoldedLinear, FoldedModel, fold
from grpo.lora import REFERENCE, TRAINED, new_lora, trained_lora
from grpo.memory import ModelShape, model_shape
from grpo.pretrained import load_pretrained, pick_device, pick_dtype, pretrained_config
from grpo.scratch import SCRATCH
from grpo.tokenizer import (
    add_tokens,
    end_of_turn,
    find_stop_token_ids,
    fit_embeddings,
    scratch_tokenizer,
)

NO_REFERENCE = "no reference: the policy was loaded with beta 0 or without one"
SCRATCH_POSITIONS = 4096  # at least: longer prompts and completions get more


@dataclass
class Modules:
    """A model by transformers' own modules: the calls of a FoldedModel, for what is not folded."""

    decoder: nn.Module
    head: nn.Module

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, layout) -> Tensor:
        """input_ids and position_ids [B, T] → [B, T, H]; `layout` says who sees whom."""
        return self.decoder(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=None,
            use_cache=False,
            layout=layout,
        ).last_hidden_state


@dataclass
class Policy:
    """What is trained, and how to run it.

    model: a peft model, or the bare transformers one in full fine-tuning; in train() mode.
    stop_token_ids: every id that ends a completion.
    reference: the frozen copy that full fine-tuning with beta > 0 keeps, else None.
    original_config: the model's configuration as loaded, dropouts and cache included, for export.
    from_trained_adapter: training began from an adapter, which is then the reference too.
    gradient_checkpointing: layers are computed again in the backward pass instead of kept.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: list[int]
    device: torch.device
    dtype: torch.dtype
    reference: nn.Module | None = None
    original_config: PretrainedConfig | None = None
    from_trained_adapter: bool = False
    gradient_checkpointing: bool = False
    _use_reference: bool = False
    _fold: tuple[list[Tensor], FoldedModel | None] | None = None  # the adapter it was made from

    @property
    def base(self) -> nn.Module:
        """The transformers model, which holds the adapters' layers where there are any."""
        return self.model.get_base_model() if self.has_adapter else self.model

    @property
    def has_adapter(self) -> bool:
        return isinstance(self.model, PeftModel)

    @property
    def _running(self) -> nn.Module:
        return self.reference if self._use_reference else self.base

    @property
    def decoder(self) -> nn.Module:
        """The inner transformer, token ids to hidden states."""
        return self._running.get_decoder()

    @property
    def head(self) -> nn.Module | FoldedLinear:
        """Hidden states [.., H] to logits [.., V]. Call it: an adapter may stand around it."""
        folded = self.folded() if self.has_adapter else None
        return (folded or self.modules).head

    @property
    def modules(self) -> Modules:
        """The model as transformers runs it, and nothing looked up at every call."""
        return Modules(self.decoder, self._running.get_output_embeddings())

    def folded(self) -> FoldedModel | None:
        """The policy's weights as they are now, made to be run fast; None if they cannot be.

        With an adapter, kept until the adapter's weights change: sampler and scorer share it.
        """
        if not self.has_adapter:
            return fold(self._running)
        adapter = [p.detach() for p in self.trainable_parameters().values()]
        if self._fold is not None:
            # Compared, not counted: bitsandbytes steps past torch's version counters.
            known, folded = self._fold
            if len(known) == len(adapter) and all(map(torch.equal, known, adapter)):
                return folded
        self._fold = None  # the old one goes before the new one comes
        folded = fold(self._running, self.gradient_checkpointing)
        self._fold = [p.clone() for p in adapter], folded
        return folded

    @cached_property
    def end_token_id(self) -> int:
        """The stop token that a supervised target ends with: that of the chat template's turns if
        there is one, else the tokenizer's eos, else any."""
        candidates = (end_of_turn(self.tokenizer), self.tokenizer.eos_token_id)
        return next((i for i in candidates if i is not None), self.stop_token_ids[0])

    @property
    def num_layers(self) -> int:
        return self.base.config.get_text_config().num_hidden_layers

    @property
    def context_length(self) -> int | None:
        """Positions that the model was made for; None if it has no such limit."""
        return getattr(self.base.config.get_text_config(), "max_position_embeddings", None)

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, layout) -> Tensor:
        """input_ids and position_ids [B, T] → [B, T, H]; `layout` says who sees whom."""
        # A folded copy has gradients for adapters only.
        folded = self.folded() if self.has_adapter else None
        return (folded or self.modules).hidden_states(input_ids, position_ids, layout)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """By name, in the model's own dtype; the optimizer keeps float32 masters of them."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @contextmanager
    def reference_mode(self) -> Iterator[None]:
        """Inside, `decoder` and `head` are the reference's; restored on an exception too.

        That is the base with its adapter off, the frozen twin of a trained adapter, or the frozen
        copy of a model that is trained whole. Raises RuntimeError if load_policy was told that no
        reference would be needed.
        """
        if self.has_adapter:
            with self._reference_adapter():
                trained, self._fold = self._fold, None
                try:
                    yield
                finally:
                    self._fold = trained
        elif self.reference is not None:
            before, self._use_reference = self._use_reference, True
            try:
                yield
            finally:
                self._use_reference = before
        else:
            raise RuntimeError(NO_REFERENCE)

    @contextmanager
    def _reference_adapter(self) -> Iterator[None]:
        if not self.from_trained_adapter:
            with self.model.disable_adapter():
                yield
        elif REFERENCE in self.model.peft_config:
            self.model.set_adapter(REFERENCE, inference_mode=True)
            try:
                yield
            finally:
                self.model.set_adapter(TRAINED)
        else:
            raise RuntimeError(NO_REFERENCE)


def load_policy(
    config,
    scratch_tokens: Sequence[str] | None = None,
    new_tokens: Sequence[str] = (),
    with_reference: bool = True,
    attention: str = ATTENTION,
) -> Policy:
    """The policy that the settings describe, ready to train.

    scratch_tokens: the vocabulary of a model made from scratch. new_tokens: added to a pretrained
    tokenizer if config.add_tokens. with_reference: False for a stage without a KL term; where
    config.beta is 0 none is held in any case. attention: transformers' name of the attention
    function. Raises UserError for whatever cannot be loaded or trained as asked.

    With config.adapter that adapter is trained further, whatever config.lora_rank says, else a
    fresh one of that rank; rank 0 trains every weight.
    """
    device = pick_device(config.device)
    if config.model == SCRATCH:
        model, tokenizer = scratch_model(config, scratch_tokens, attention)
        model.to(device)
    else:
        model, tokenizer = load_pretrained(config, device, attention)
        fit_embeddings(model, tokenizer, config.seed)
    new_ids = _add_new_tokens(config, model, tokenizer, new_tokens)
    original_config = copy.deepcopy(model.config)
    stop_token_ids = find_stop_token_ids(tokenizer, model.config, model.generation_config)
    dtype = model.get_input_embeddings().weight.dtype
    model.config.use_cache = False
    _switch_off_noise(model)
    if config.gradient_checkpointing:
        # The non-reentrant kind needs no gradient at its input, so it works with adapters as is.
        # There is no dropout, so no random state to keep, which a CUDA graph could not read.
        options = {"use_reentrant": False, "preserve_rng_state": False}
        model.gradient_checkpointing_enable(options)

    with_reference = with_reference and config.beta > 0
    reference = None
    if config.adapter:
        model = trained_lora(model, config.adapter, with_reference)
    elif config.lora_rank > 0:
        rank, alpha, targets = config.lora_rank, config.lora_alpha, config.lora_targets
        model = new_lora(model, rank, alpha, targets, new_ids, config.seed)
    else:
        model.requires_grad_(True)
        reference = copy.deepcopy(model).requires_grad_(False).eval() if with_reference else None
    return Policy(
        model=model.train(),
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids,
        device=device,
        dtype=dtype,
        original_config=original_config,
        reference=reference,
        from_trained_adapter=bool(config.adapter),
        gradient_checkpointing=config.gradient_checkpointing,
    )


def _add_new_tokens(config, model, tokenizer, new_tokens: Sequence[str]) -> list[int]:
    if not config.add_tokens or config.model == SCRATCH:
        return []
    if config.adapter and any(token not in tokenizer.get_vocab() for token in new_tokens):
        raise UserError(
            f"--add-tokens: the adapter {config.adapter} was trained without the task's tokens; "
            "leave out --add-tokens or --adapter"
        )
    return add_tokens(model, tokenizer, new_tokens, config.seed)


def scratch_model(
    config, tokens: Sequence[str] | None, attention: str
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """A fresh small Llama in float32 and a tokenizer of exactly `tokens`, from config.seed.

    Its sizes are config.scratch_hidden_size, scratch_layers and scratch_heads; the MLP is three
    times as wide, the head is tied to the embedding. Raises UserError if the task has no such
    tokens.
    """
    if tokens is None:
        raise UserError("--model scratch: this task has no vocabulary for it; give a model")
    longest = config.max_prompt_length + config.max_episode_length
    tokenizer = scratch_tokenizer(tokens)
    model_config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.scratch_hidden_size,
        intermediate_size=3 * config.scratch_hidden_size,
        num_hidden_layers=config.scratch_layers,
        num_attention_heads=config.scratch_heads,
        max_position_embeddings=max(SCRATCH_POSITIONS, longest),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation=attention,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return LlamaForCausalLM(model_config), tokenizer


def _switch_off_noise(model: nn.Module) -> None:
    """Set every dropout to 0: in the config, in nn.Dropout, and where layers keep a number."""
    names = ("dropout", "pdrop", "dropout_prob", "layerdrop", "jitter_noise")
    for holder in [model.config, model.config.get_text_config(), *model.modules()]:
        for name, value in list(vars(holder).items()):
            if isinstance(value, float) and name.endswith(names):
                setattr(holder, name, 0.0)
        if isinstance(holder, nn.Dropout):
            holder.p = 0.0


def load_shape(config, scratch_tokens: Sequence[str] | None) -> tuple[ModelShape, torch.dtype]:
    """(the model's shape, the dtype of its weights) without loading it: what --dry-run needs."""
    device = pick_device(config.device)
    if config.model == SCRATCH:
        model, _ = scratch_model(config, scratch_tokens, ATTENTION)
        return model_shape(model.config), model.dtype
    shape = model_shape(pretrained_config(config))
    parameters = shape.linear_parameters + shape.other_parameters
    frozen = config.lora_rank > 0 or config.adapter is not None
    dtype = pick_dtype(config.dtype, device, frozen, config.quantize != "none", parameters)
    return shape, dtype
