"""Who sees whom: our attention against plain causal attention, one row at a time."""

import random

import pytest
import torch
from conftest import KINDS
from tiny import ragged_prompts, tiny_policy

from grpo.attention import PackedLayout, attention, length_mask, pad_index
from grpo.cache import Blocks, KeyValueCache, PrefillLayout
from grpo.decode_layout import DecodeLayout

H, K, D = 4, 2, 6  # heads, key-value heads, numbers a head
CPU = torch.device("cpu")


class Layer:
    layer_idx = 0


def heads(count, seed=0, dtype=torch.float64):
    """query [1, H, T, D], key and value [1, K, T, D] of `count` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, h, count, D, generator=generator, dtype=dtype) for h in (H, K, K)]


def plain(query, key, value, scaling=D**-0.5):
    """Causal attention of one row, written out: [1, H, T, D] → [T, H, D]."""
    key, value = (x.repeat_interleave(H // K, dim=1) for x in (key, value))
    score = (query * scaling) @ key.transpose(-1, -2)
    hidden = torch.ones(score.shape[-2:], dtype=torch.bool).triu(1)
    return (score.masked_fill(hidden, -torch.inf).softmax(-1) @ value)[0].transpose(0, 1)


def rows_of(layout):
    """The places of each prompt, and of each completion with its prompt before it, both behind the
    opening if there is one."""
    starts, at, opening = [], layout.common, list(range(layout.common))
    for length in layout.prompt_lengths + layout.completion_lengths:
        starts.append(list(range(at, at + length)))
        at += length
    count = len(layout.prompt_lengths)
    prompts, completions = [opening + p for p in starts[:count]], starts[count:]
    return prompts, [prompts[p] + c for p, c in zip(layout.of_prompt, completions, strict=True)]


LAYOUTS = {
    "ragged": ([3, 1, 5], [2, 4, 0, 1, 3], [0, 0, 1, 2, 2]),
    "prompts of one length": ([4, 4], [2, 3, 1], [0, 1, 1]),
    "one row": ([2], [3], [0]),
    "no completion has an input": ([2, 3], [0, 0], [0, 1]),
    "an empty row at the end": ([2, 3], [2, 0], [0, 1]),
    "a prompt without completions": ([2, 3], [2], [1]),
    "members of two groups in turn": ([2, 5], [3, 3, 1, 2], [0, 1, 0, 1]),
    "an opening": ([3, 1, 5], [2, 4, 0, 1, 3], [0, 0, 1, 2, 2], 3),
    "single rows among groups, with an opening": ([3, 2, 4, 1], [2, 4, 3, 1], [0, 1, 1, 3], 2),
}


def layout_of(prompts, completions, of_prompt, common=0):
    return PackedLayout(prompts, completions, of_prompt, CPU, common)


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_is_plain_attention_of_every_row(name):
    layout = layout_of(*LAYOUTS[name])
    query, key, value = heads(layout.total)
    out = attention(Layer, query, key, value, None, layout=layout)[0]
    assert out.shape == (1, layout.total, H, D)
    prompts, completions = rows_of(layout)
    for places in prompts + completions:
        wanted = plain(*(x[:, :, places] for x in (query, key, value)))
        assert torch.allclose(out[0, places], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_gradients_are_the_plain_ones(name):
    """A prompt's keys collect the gradient of all its completions."""
    layout = layout_of(*LAYOUTS[name])
    inputs = [x.requires_grad_() for x in heads(layout.total)]
    weight = torch.randn(layout.total, H, D, dtype=torch.float64)
    out = attention(Layer, *inputs, None, layout=layout)[0][0]
    ours = torch.autograd.grad((weight * out).sum(), inputs)
    loss, done = 0.0, set()
    for places in sum(rows_of(layout), []):
        row = plain(*(x[:, :, places] for x in inputs))
        new = [i for i, place in enumerate(places) if place not in done]
        done.update(places)
        loss = loss + (weight[[places[i] for i in new]] * row[new]).sum()
    for mine, theirs in zip(ours, torch.autograd.grad(loss, inputs), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


def test_no_row_is_fully_masked():
    """SDPA answers NaN for a query that sees nothing: padding must never be such a query."""
    layout = PackedLayout([1, 7, 1], [0, 9, 1, 0], [0, 1, 2, 2], device=CPU)
    inputs = [x.requires_grad_() for x in heads(layout.total, dtype=torch.float32)]
    out = attention(Layer, *inputs, None, layout=layout)[0]
    out.sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_a_completion_never_sees_its_neighbour():
    """The packed neighbours are other answers to the same question: a leak would be cheating."""
    layout = PackedLayout([3], [4, 4], [0, 0], device=CPU)
    query, key, value = heads(layout.total)
    before = attention(Layer, query, key, value, None, layout=layout)[0]
    for x in (key, value):
        x[:, :, 3:7] = 100.0  # the first completion
    after = attention(Layer, query, key, value, None, layout=layout)[0]
    assert torch.equal(before[:, :3], after[:, :3]), "nor does a prompt see its completions"
    assert torch.equal(before[:, 7:], after[:, 7:])
    assert not torch.allclose(before[:, 3:7], after[:, 3:7])


def test_the_models_own_scale_is_used():
    layout = PackedLayout([3], [2], [0], device=CPU)
    inputs = heads(layout.total)
    out = attention(Layer, *inputs, None, scaling=0.3, layout=layout)[0]
    assert torch.allclose(out[0], plain(*inputs, scaling=0.3), rtol=0, atol=1e-12)


def test_without_a_layout_it_is_causal_attention():
    inputs = heads(5)
    out = attention(Layer, *inputs, None)[0]
    assert torch.allclose(out[0], plain(*inputs), rtol=0, atol=1e-12)


def test_transformers_own_cache_and_padding_masks_are_refused():
    """They would be computed wrongly without an error: rows of garbage, log-probs of garbage."""
    query, key, value = heads(5)
    with pytest.raises(RuntimeError, match="grpo.generate"):
        attention(Layer, query[:, :, -1:], key, value, None)
    policy = tiny_policy()
    ids = torch.tensor([[0, 5, 6], [7, 8, 9]])
    with pytest.raises(RuntimeError, match="grpo.generate"), torch.no_grad():
        policy.model(ids, attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]))


# ---- decode --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt_lengths, of_prompt, row_lengths",
    [
        ([3, 1, 5], [0, 0, 1, 2, 2, 2], [0, 2, 4, 1, 0, 3]),
        ([4], [0, 0], [1, 1]),
        ([2, 3, 4], [2, 0], [0, 5]),  # a prompt whose rows are still in the queue
        ([1, 6], [1, 0, 1, 0], [3, 2, 1, 0]),  # as retiring leaves them: in no order
    ],
)
@pytest.mark.parametrize("block", [64, 2, 1])
def test_decode_is_the_last_row_of_plain_attention(
    prompt_lengths, of_prompt, row_lengths, block, monkeypatch
):
    """Own keys in one block or several, prompt keys, holes in the grid and rows of different age,
    one token each."""
    monkeypatch.setattr("grpo.cache.BLOCK", block)
    prompts, rows = len(prompt_lengths), len(of_prompt)
    cache = KeyValueCache(1, prompts + 1, rows + 1, max(prompt_lengths) + 2, max(row_lengths) + 2)
    query, key, value = heads(sum(prompt_lengths))
    prefill = PrefillLayout(prompt_lengths, [], [], device=CPU, cache=cache, first_slot=0)
    attention(Layer, query, key, value, None, layout=prefill)
    cache.blocks.add_rows(rows)
    # Blocks of different rows in turn, as rows that grow together get them.
    for length in range(max(row_lengths) + 1):
        cache.make_room([min(n, length) + 1 for n in row_lengths])
    own = [heads(n + 1, seed=10 + row) for row, n in enumerate(row_lengths)]
    for row, (_, *keys_and_values) in enumerate(own):
        for which, numbers in enumerate(keys_and_values):
            for n in range(row_lengths[row]):
                at = cache.blocks.of_row[row][n // cache.block]
                cache.own[0][which, at, :, n % cache.block] = numbers[0, :, n]
    layout = DecodeLayout(cache, prompt_lengths, of_prompt, torch.tensor(row_lengths))
    layout.see(cache.width)
    new = [torch.cat([x[i][:, :, -1:] for x in own]) for i in range(3)]  # [A, H or K, 1, D]
    out = attention(Layer, *new, None, layout=layout)[0]
    assert out.shape == (rows, 1, H, D)
    starts = [sum(prompt_lengths[:p]) for p in range(prompts)]
    for row, prompt in enumerate(of_prompt):
        places = slice(starts[prompt], starts[prompt] + prompt_lengths[prompt])
        whole = [torch.cat([x[:, :, places], own[row][i]], dim=2)
                 for i, x in enumerate((query, key, value))]  # fmt: skip
        # The scores are in float32 here, whatever the model's own type.
        assert torch.allclose(out[row, 0], plain(*whole)[-1], rtol=0, atol=1e-6)
    n = row_lengths[0]
    kept = cache.own[0][0, cache.blocks.of_row[0][-1], :, n % cache.block]
    assert torch.equal(kept, own[0][1][0, :, n]), "the new key is kept"


@pytest.mark.parametrize("seed", range(20))
def test_blocks_in_use_are_the_first_ones_and_a_row_keeps_its_own(seed):
    """Rows come, grow and end in any order; what was written to a row's blocks stays with it."""
    rng, blocks = random.Random(seed), Blocks()
    memory: dict[int, object] = {}  # of each block
    rows: list[list[object]] = []  # what each row has written
    for _ in range(200):
        if rng.random() < 0.2 or not rows:
            rows.append([])
            blocks.add_rows(1)
        elif rng.random() < 0.6:
            row, more = rng.randrange(len(rows)), rng.randint(0, 2)
            assert blocks.extend(row, len(rows[row]) + more) == more
            for block in blocks.of_row[row][len(rows[row]) :]:
                memory[block] = object()
                rows[row].append(memory[block])
        else:
            row = rng.randrange(len(rows))
            for source, target in blocks.release(row):
                memory[target] = memory[source]
            rows[row] = rows[-1]
            rows.pop()
        assert [[memory[b] for b in own] for own in blocks.of_row] == rows
        assert sorted(sum(blocks.of_row, [])) == list(range(len(blocks.row_of)))
        assert all(row == blocks.row_of[b] for row, own in enumerate(blocks.of_row) for b in own)


@pytest.mark.parametrize("growing", [True, False])
def test_freeing_rows_and_moving_prompts_moves_their_keys(growing):
    cache = KeyValueCache(2, 3, 3, prompt_length=4, row_length=5, growing=growing)
    for layer in range(2):
        cache.store_prompts(layer, slice(0, 3), torch.randn(3, 4, K, D), torch.randn(3, 4, K, D))
    cache.blocks.add_rows(3)
    cache.make_room([5, 3, 4])
    for layer in cache.own:
        layer.normal_()
    own, prompt, untouched = torch.stack(cache.own), cache.prompt.clone(), 1
    cache.free_row(0)
    cache.move_prompt(source=2, target=0)
    moved = torch.stack(cache.own)
    assert torch.equal(moved[:, :, 0], own[:, :, 2]), "the last row has taken its place"
    assert torch.equal(cache.prompt[:, :, 0], prompt[:, :, 2])
    assert torch.equal(moved[:, :, untouched], own[:, :, untouched])
    assert torch.equal(cache.prompt[:, :, untouched], prompt[:, :, untouched])


@pytest.mark.parametrize("growing", [True, False])
def test_a_cache_holds_numbers_wherever_it_is_read(growing):
    """0 x NaN is NaN: a place that no mask shows still enters the product."""
    cache = KeyValueCache(1, 2, 2, 4, 4, growing=growing)
    cache.store_prompts(0, slice(0, 1), torch.ones(1, 2, K, D), torch.ones(1, 2, K, D))
    cache.own[0].fill_(torch.nan)  # as fresh memory may be
    cache.blocks.add_rows(2)
    cache.make_room([2, 1])
    cache.own[0][..., :2, :] = 1.0
    cache.make_room([3, 1])
    (own,) = cache.own
    assert own[..., :2, :].eq(1).all() and own[..., 2, :].eq(0).all()
    assert cache.prompt.isfinite().all()


def test_a_growing_cache_has_memory_for_the_tokens_that_there_are(monkeypatch):
    """Rows of 300 tokens beside short ones: what the short ones do not need is not there."""
    monkeypatch.setattr("grpo.cache.BLOCK", 16)
    cache = KeyValueCache(1, 1, 8, 4, row_length=320)
    cache.store_prompts(0, slice(0, 1), torch.ones(1, 2, K, D), torch.ones(1, 2, K, D))
    cache.blocks.add_rows(8)
    for length in range(1, 301):
        cache.make_room([length] + [min(length, 10)] * 7)
    used = -(-300 // 16) + 7
    assert len(cache.blocks.row_of) == used
    assert cache.own[0].shape[1] <= used * 1.25, "and a quarter in reserve"
    cache.make_room([320] * 8)
    assert cache.own[0].shape[1] == 8 * 320 // 16, "never more than all rows can have"


# ---- the pieces ----------------------------------------------------------------------------------


def test_padded_places_stay_inside_their_row():
    assert pad_index([2, 0, 1], [0, 2, 2], CPU).tolist() == [[0, 1], [2, 2], [2, 2]]
    assert length_mask([2, 0, 1], 2, CPU).tolist() == [[True, True], [False, False], [True, False]]
    assert pad_index([], [], CPU).shape == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_position_numbers_are_a_rows_own(kind):
    """One shared position for a batch turns short rows into garbage (learned and rotary alike)."""
    policy = tiny_policy(kind)
    prompts = ragged_prompts(3, seed=4)
    lengths = [len(p) for p in prompts]
    hidden = policy.hidden_states(
        torch.tensor([sum(prompts, [])]),
        torch.tensor([[i for n in lengths for i in range(n)]]),
        PackedLayout(lengths, [], [], device=CPU),
    )[0]
    for prompt, ours in zip(prompts, hidden.split(lengths), strict=True):
        alone = policy.model(torch.tensor([prompt])).logits[0]
        assert torch.allclose(policy.head(ours), alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("prompts", "completions", "pieces"),
    [
        ([40, 41, 47, 52], [9, 3, 12, 5], 1),  # supervised: prompt and target are one row
        ([40, 41, 47, 52], [], 1),  # a prefill
        ([40, 41], [8] * 8, 4),  # two groups: over each prompt, prompts, completions
        ([40, 40], [8] * 8, 3),  # prompts of one length are asked together
        ([10, 100], [], 2),  # too different for one to be padded to the other
    ],
)
def test_ragged_rows_are_few_pieces(prompts, completions, pieces):
    """One for each length took more time in small operations than in products: half of SFT."""
    of_prompt = [i * len(prompts) // len(completions) for i in range(len(completions))]
    layout = PackedLayout(prompts, completions, of_prompt, device=torch.device("cpu"))
    assert len(layout.pieces) == pieces
