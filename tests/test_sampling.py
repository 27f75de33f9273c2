"""Sampling: the cases of tests/cases/generation_cases.json, the edges of u, frequencies, seeds."""

import json
from pathlib import Path

import pytest
import torch

from grpo.logprobs import tempered_log_softmax
from grpo.sampling import BLOCK, _first_above, draw, filter_logits, sample

FILE = json.loads((Path(__file__).parent / "cases/generation_cases.json").read_text())
CASES = {case["id"]: case for case in FILE["cases"]}
MARKOV = torch.tensor(FILE["fixtures"]["markov"]["next_logits_by_last_token"])  # [V, V]
TEMPERED = ["sampling/temperature-0.5", "sampling/temperature-2.0"]
TRUNCATED = [n for n in CASES if n.startswith("sampling/") and "allowed" in CASES[n]["expected"]]
ALMOST_ONE = 1 - 2**-24


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", TEMPERED)
def test_temperature_case(name):
    case = CASES[name]
    logits = torch.tensor([case["input"]["logits"]] * 2000)
    tokens, logprobs = sample(logits, case["input"]["temperature"], generator=seeded())
    wanted = torch.tensor(case["expected"]["logprobs"])
    assert len(tokens.unique()) >= 3
    assert torch.allclose(logprobs, wanted[tokens], rtol=0, atol=case["tolerance"]["abs"])
    for mistake, wrong in case["wrong_values"].items():
        assert not torch.allclose(logprobs, torch.tensor(wrong)[tokens], atol=1e-3), mistake


@pytest.mark.parametrize("name", TRUNCATED)
def test_truncation_case(name):
    """The allowed tokens, their renormalised probabilities, and full-vocabulary log-probs."""
    case = CASES[name]
    given, expected, atol = case["input"], case["expected"], case["tolerance"]["abs"]
    full = tempered_log_softmax(torch.tensor([given["logits"]]), given["temperature"])
    kept = filter_logits(full, given["top_k"], given["top_p"])
    assert kept[0].isfinite().nonzero().flatten().tolist() == expected["allowed"]
    assert kept.exp().sum().item() == pytest.approx(expected["kept_mass"], abs=atol)
    for token, probability in expected["probabilities"].items():
        assert kept.softmax(-1)[0, int(token)].item() == pytest.approx(probability, abs=atol)

    draws = 4000
    tokens, logprobs = sample(
        torch.tensor([given["logits"]] * draws), given["temperature"], given["top_k"],
        given["top_p"], generator=seeded(),
    )
    same = torch.allclose(logprobs, full[0][tokens], rtol=0, atol=1e-6)
    assert same, "log-probs are of the full distribution"
    for token, probability in expected["probabilities"].items():
        share = (tokens == int(token)).float().mean().item()
        assert share == pytest.approx(probability, abs=0.04)


def test_truncation_leaves_the_first_ratio_at_one():
    """Sampler truncated, scorer not: each ratio of the first step would be the kept mass, 0.91."""
    case = CASES["sampling/truncation-and-ratio"]
    logits = torch.tensor([case["input"]["logits"]])
    tokens, sampled = sample(
        logits, 1.0, top_p=case["input"]["top_p"], uniforms=torch.zeros(1)
    )
    # u = 0 takes the first kept token in the order of the vocabulary, which need not be token 5.
    kept = filter_logits(tempered_log_softmax(logits, 1.0), top_p=case["input"]["top_p"])
    assert kept.exp().sum().item() == pytest.approx(case["expected"]["kept_mass"], abs=1e-6)
    scored = tempered_log_softmax(logits, 1.0)[0, tokens]
    assert torch.equal((scored - sampled).exp(), torch.ones(1))
    five = case["input"]["sampled"]
    scored = tempered_log_softmax(logits, 1.0)[0, five].item()
    assert scored == pytest.approx(case["expected"]["logprob_full"], abs=1e-6)


def test_temperature_zero_is_greedy_with_untempered_logprobs():
    case = CASES["sampling/temperature-0"]
    last, completion, logprobs = case["input"]["prompts"][0][-1], [], []
    while last not in case["input"]["eos_token_ids"]:
        token, logprob = sample(MARKOV[last][None], 0.0)
        last = int(token)
        completion.append(last)
        logprobs.append(float(logprob))
    assert [completion] == case["expected"]["completions"]
    assert logprobs == pytest.approx(case["expected"]["logprobs"][0], abs=1e-4)


def test_frequencies_case():
    case = CASES["sampling/frequencies"]
    draws = case["input"]["draws"]
    tokens, _ = sample(MARKOV[1].expand(draws, -1), 1.0, generator=seeded())
    for token, probability in case["expected"]["probabilities"].items():
        share = (tokens == int(token)).float().mean().item()
        assert share == pytest.approx(probability, abs=case["tolerance"]["abs"])


@pytest.mark.parametrize("vocabulary", [2, 40, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 5 * BLOCK])
def test_frequencies_over_blocks(vocabulary):
    """Chi-square over evenly spaced u: each token's share of [0, 1) is its probability."""
    draws = 20000
    weights = torch.rand(vocabulary, generator=seeded()) + 0.05
    uniforms = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    tokens = draw(weights.expand(draws, -1), uniforms)
    counts = torch.bincount(tokens, minlength=vocabulary)
    assert (tokens.diff() >= 0).all(), "tokens follow u in the order of the vocabulary"
    assert ((counts - draws * weights / weights.sum()).abs() <= 1).all()


def test_random_frequencies_chi_square():
    """A generator's draws, 600 tokens in three blocks: chi-square near its degrees of freedom."""
    vocabulary, draws = 600, 60000
    logits = torch.randn(vocabulary, generator=seeded(3)) * 0.5
    tokens, _ = sample(logits.expand(draws, -1), 1.0, generator=seeded(4))
    expected = draws * logits.softmax(-1)
    chi_square = ((torch.bincount(tokens, minlength=vocabulary) - expected) ** 2 / expected).sum()
    degrees = vocabulary - 1
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5


def test_same_seed_same_tokens():
    seeds = CASES["sampling/seed"]["input"]["seeds"]
    runs = [sample(MARKOV[4].expand(64, -1), 1.0, generator=seeded(s))[0] for s in seeds]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_a_restored_generator_goes_on_where_it_was():
    generator = seeded(5)
    sample(MARKOV[4].expand(8, -1), 1.0, generator=generator)
    state = generator.get_state()
    then = sample(MARKOV[4].expand(64, -1), 1.0, generator=generator)[0]
    restored = torch.Generator()
    restored.set_state(state)
    assert torch.equal(sample(MARKOV[4].expand(64, -1), 1.0, generator=restored)[0], then)


def test_members_of_a_group_differ():
    """The first token of row 0 broadcast to the group makes sixteen copies of one completion."""
    case = CASES["group/members-differ"]["input"]
    logits = MARKOV[4].expand(case["group_size"], -1)
    tokens, _ = sample(logits, case["temperature"], generator=seeded(case["seed"]))
    assert len(tokens.unique()) >= 2


def test_rows_with_their_own_uniforms_do_not_depend_on_the_batch():
    logits = torch.randn(6, 700, generator=seeded())
    uniforms = torch.rand(6, generator=seeded(1))
    together = sample(logits, 0.7, uniforms=uniforms)
    for row in range(6):
        alone = sample(logits[row : row + 1], 0.7, uniforms=uniforms[row : row + 1])
        assert alone[0] == together[0][row] and alone[1] == together[1][row]


@pytest.mark.parametrize("u", [0.0, 2**-149, 0.5, ALMOST_ONE, 1.0])
@pytest.mark.parametrize("vocabulary", [3, BLOCK, 2 * BLOCK + 5])
def test_a_token_of_probability_zero_is_never_drawn(u, vocabulary):
    """u = 0 must skip leading zeros, u -> 1 must not run past the last token that has any mass."""
    for positions in ([0], [1], [vocabulary - 1], [1, vocabulary - 2], [vocabulary // 2]):
        weights = torch.zeros(1, vocabulary)
        weights[0, positions] = 0.3
        token = draw(weights, torch.tensor([u], dtype=torch.float64)).item()
        assert token in positions
        if u in (0.0, ALMOST_ONE, 1.0):
            assert token == (positions[0] if u == 0 else positions[-1])


def test_a_running_sum_that_wobbles_picks_no_impossible_token():
    """A GPU's parallel cumulative sum may rise in its last bit over a token of weight 0."""
    weights = torch.tensor([[0.5, 0.0, 0.5]])
    running = torch.tensor([[0.5, 0.5 + 2**-24, 1.0]])
    assert _first_above(running, torch.tensor([[0.5]]), weights).item() == 2


@pytest.mark.parametrize("u", [0.0, ALMOST_ONE, 1.0])
def test_rounding_at_the_edges_of_a_large_vocabulary(u):
    """Sums of 151,936 float32 numbers do not add up to 1; the token must still be a kept one."""
    logits = torch.randn(4, 151_936, generator=seeded()) * 3
    kept = filter_logits(tempered_log_softmax(logits, 1.0), top_k=50)
    for weights in (tempered_log_softmax(logits, 1.0).exp(), kept.exp()):
        tokens = draw(weights, torch.full((4,), u))
        assert (weights.gather(1, tokens[:, None]) > 0).all()


def test_a_spike_in_a_huge_vocabulary():
    """All the mass on one token, at any place in its block: always that one."""
    for place in (0, BLOCK - 1, BLOCK, 100_003, 151_935):
        logits = torch.full((3, 151_936), -40.0)
        logits[:, place] = 40.0
        tokens, logprobs = sample(logits, 1.0, uniforms=torch.tensor([0.0, 0.5, ALMOST_ONE]))
        assert tokens.tolist() == [place] * 3
        assert logprobs.tolist() == [0.0] * 3


def test_u_of_zero_is_not_a_licence_for_the_impossible():
    """torch.rand gives exactly 0 once in 2**24 draws; token 0 at e^-80 must not come up then."""
    logits = torch.zeros(3, 4)
    logits[:, 0], logits[:, -1] = -80.0, -80.0
    tokens, _ = sample(logits, 1.0, uniforms=torch.tensor([0.0, ALMOST_ONE, 1 - 2**-53]))
    assert tokens.tolist() == [1, 2, 2]


def test_rounding_inside_a_block_does_not_pick_its_last_token():
    """The sum of a block in float32 exceeds that of its tokens: the gap is no token's share."""
    weights = torch.full((1, 4 * BLOCK), 0.1)
    weights[0, BLOCK - 1] = 1e-30
    edge = weights[0, :BLOCK].double().sum() / weights[0].double().sum()
    uniforms = edge + torch.linspace(-1e-6, 1e-6, 2001, dtype=torch.float64)
    tokens = draw(weights.expand(2001, -1), uniforms)
    assert set(tokens.tolist()) == {BLOCK - 2, BLOCK}


def test_bfloat16_logits_give_float32_logprobs():
    case = CASES["numerics/half-precision-logits-4"]
    logits = torch.tensor([case["input"]["logits_bfloat16"]] * 50, dtype=torch.bfloat16)
    tokens, logprobs = sample(logits, 1.0, generator=seeded())
    assert logprobs.dtype == torch.float32
    wanted = torch.tensor(case["expected"]["logprobs"])[tokens]
    assert torch.allclose(logprobs, wanted, rtol=0, atol=case["tolerance"]["abs"])


def kept_tokens(logits, **settings):
    kept = filter_logits(torch.tensor([logits]), **settings)[0]
    return kept.isfinite().nonzero().flatten().tolist()


def test_top_p_with_ties_keeps_no_more_than_needed():
    """Four equal tokens, p = 0.5: two reach it; a threshold on the value would keep four."""
    assert kept_tokens([1.0, 1.0, 1.0, 1.0], top_p=0.5) == [0, 1]
    assert kept_tokens([1.0, 1.0, 1.0, 1.0], top_p=0.51) == [0, 1, 2]


def test_top_p_keeps_the_crossing_token_and_at_least_one():
    logits = torch.tensor([0.5, 0.3, 0.2]).log().tolist()
    assert kept_tokens(logits, top_p=0.6) == [0, 1]
    assert kept_tokens(logits, top_p=0.45) == [0]
    assert kept_tokens(logits, top_p=0.0) == [0]
    assert kept_tokens(logits, top_p=1.0) == [0, 1, 2]


def test_top_k():
    logits = [0.0, 3.0, 1.0, 2.0]
    assert kept_tokens(logits, top_k=2) == [1, 3]
    for off in (None, 0, 4, 100):
        assert kept_tokens(logits, top_k=off) == [0, 1, 2, 3]


def test_min_p_is_relative_to_the_most_probable():
    logits = torch.tensor([0.2, 0.5, 0.3]).log().tolist()
    assert kept_tokens(logits, min_p=0.5) == [1, 2]
    assert kept_tokens(logits, min_p=1.0) == [1]
    for off in (None, 0.0):
        assert kept_tokens(logits, min_p=off) == [0, 1, 2]


def test_order_of_the_truncations():
    """top-p counts the mass of what top-k left: .4 of .7 is more than p = .5, of 1 it is less."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert kept_tokens(logits, top_k=2, top_p=0.5) == [0]
    assert kept_tokens(logits, top_p=0.5) == [0, 1]
    assert kept_tokens(logits, top_k=3, top_p=0.9, min_p=0.6) == [0, 1]


def test_greedy_takes_the_first_of_equals_and_ignores_the_generator():
    generator = seeded()
    before = generator.get_state()
    tokens, _ = sample(torch.tensor([[0.0, 2.0, 2.0]]), 0, generator=generator)
    assert tokens.tolist() == [1]
    assert torch.equal(generator.get_state(), before)


def test_nan_logits_do_not_crash_and_show_up():
    """A broken model must end in a message about NaN, not in an index error of the sampler."""
    tokens, logprobs = sample(torch.full((2, 300), float("nan")), 1.0, generator=seeded())
    assert ((tokens >= 0) & (tokens < 300)).all() and logprobs.isnan().all()
