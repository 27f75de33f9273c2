import random
import time

import pytest
import torch
from conftest import MARKOV_TOKENS, build_model, build_tokenizer, load_cases
from transformers import AutoTokenizer, GenerationConfig

from grpo.errors import UserError
from grpo.tokenizer import (
    add_tokens,
    completion_text,
    encode_target,
    end_of_turn,
    find_stop_token_ids,
    fit_embeddings,
    render_prompt,
    scratch_tokenizer,
)

CASES = {case["id"]: case for case in load_cases("generation_cases")["cases"]}
MARKS = ("up", "down", "left", "right", "blank", "origin", "target")
CELLS = [
    f"<|{row}-{column}|><|{wall}_wall|><|{mark}|>"
    for row in range(5)
    for column in range(5)
    for wall in ("no", "up", "left", "up_left", "down_right", "all", *"abcdefghij")
    for mark in MARKS
]
MAZE_TOKENS = [*CELLS, *(f"<|{mark}|>" for mark in MARKS), "\n", "<think>", "</think>", "Go "]


# ---- the tokenizer made from scratch -----------------------------------------------------------


def test_scratch_takes_the_longest_token_and_comes_back_exactly():
    tokenizer = scratch_tokenizer(["a", "ab", "abc", " ", "\n", "<|up|>", "<|up|><|left|>"])
    ids = encode_target(tokenizer, "abcab a\n\n<|up|><|left|><|up|>")
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "abc", "ab", " ", "a", "\n", "\n", "<|up|><|left|>", "<|up|>",
    ]  # fmt: skip
    assert completion_text(tokenizer, ids, [1]) == "abcab a\n\n<|up|><|left|><|up|>"


def test_scratch_unknown_text_is_unk_and_nothing_around_it_is_lost():
    tokenizer = scratch_tokenizer(["<|up|>", "\n"])
    ids = encode_target(tokenizer, "<|up|>what is this\n<|up|>")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|up|>", "<unk>", "\n", "<|up|>"]


def test_scratch_with_thousands_of_cells_encodes_fast():
    """A regular expression of 3,000 alternatives would make the tokenizer the slowest part."""
    tokenizer = scratch_tokenizer(MAZE_TOKENS)
    assert len(tokenizer) == len(MAZE_TOKENS) + 3 > 2800
    rng = random.Random(0)
    text = "\n".join("".join(rng.choices(CELLS, k=5)) for _ in range(200))
    seconds = []
    for _ in range(3):  # the best of three, since the machine may be busy
        start = time.perf_counter()
        ids = encode_target(tokenizer, text)
        seconds.append(time.perf_counter() - start)
    assert len(ids) == 1000 + 199
    assert completion_text(tokenizer, ids, [1]) == text
    assert 1000 / min(seconds) > 20_000


def test_scratch_survives_save_and_load(tmp_path):
    tokenizer = scratch_tokenizer(MAZE_TOKENS)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = CELLS[3] + "\n" + CELLS[77] + "x<|up|>"
    messages = [{"role": "user", "content": text}]
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert encode_target(loaded, text) == encode_target(tokenizer, text)
    assert render_prompt(loaded, messages, "chat") == render_prompt(tokenizer, messages, "chat")
    assert completion_text(loaded, encode_target(loaded, CELLS[3] * 2), [1]) == CELLS[3] * 2
    assert (loaded.pad_token, loaded.eos_token, loaded.unk_token) == ("<pad>", "<eos>", "<unk>")


def test_scratch_chat_prompt_is_the_contents_each_with_a_newline():
    tokenizer = scratch_tokenizer(["a", "b", "\n"])
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": "b\n"}]
    ids = render_prompt(tokenizer, messages, "chat")
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "b", "\n", "b", "\n", "\n"]


@pytest.mark.parametrize("tokens", [["a", "a"], ["a", ""], ["<eos>"]])
def test_scratch_refuses_tokens_that_would_share_an_id(tokens):
    with pytest.raises(ValueError, match="distinct"):
        scratch_tokenizer(tokens)


# ---- prompts -----------------------------------------------------------------------------------


def test_no_chat_template_is_refused_with_the_way_out():
    case = CASES["template/missing"]
    tokenizer = build_tokenizer()
    tokenizer.name_or_path = "my/base-model"
    with pytest.raises(UserError) as caught:
        render_prompt(tokenizer, case["input"]["messages"], "chat")
    for wanted in (*case["expected"]["message_mentions"], "my/base-model", "--prompt-format plain"):
        assert wanted in str(caught.value)
    assert render_prompt(tokenizer, [{"role": "user", "content": "a?"}], "plain") == [3, 28]


@pytest.mark.parametrize("name", ["template/double-bos", "template/generation-prompt"])
def test_template_is_tokenised_once(name):
    case = CASES[name]
    spec, expected = case["input"]["tokenizer"], case["expected"]
    vocabulary = ["<pad>", "<bos>", "<eos>", "[system]", "[user]", "[assistant]", "a", "s"]
    tokenizer = build_tokenizer(
        vocabulary, adds_bos=spec["adds_bos"], chat_template=spec["chat_template"]
    )
    ids = render_prompt(tokenizer, case["input"]["messages"], "chat")
    assert tokenizer.decode(ids) == expected["rendered"]
    if "leading_bos_count" in expected:
        assert ids.count(tokenizer.bos_token_id) == expected["leading_bos_count"]
        assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id  # it would have added one


def test_plain_prompt_has_exactly_the_tokenizers_own_bos():
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]
    assert render_prompt(build_tokenizer(), messages, "plain") == [3, 4, 30, 30, 5]
    with_bos = build_tokenizer(adds_bos=True)
    assert render_prompt(with_bos, messages, "plain") == [1, 3, 4, 30, 30, 5]
    written = [{"role": "user", "content": "<bos>a"}]
    assert render_prompt(with_bos, written, "plain") == [1, 3]


def test_a_template_that_refuses_the_messages_is_one_line():
    template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(UserError, match="System role not supported.*--prompt-format plain"):
        messages = [{"role": "system", "content": "a"}]
        render_prompt(build_tokenizer(chat_template=template), messages, "chat")


# ---- completions -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decode/move-tokens-survive", "decode/end-token-not-in-text"])
def test_reward_text(name):
    case = CASES[name]
    spec, expected = case["input"], case["expected"]
    vocabulary = list(dict.fromkeys(["<pad>", *spec["completion_tokens"]]))
    tokenizer = build_tokenizer(vocabulary, special=spec["added_special_tokens"] + [spec["eos"]])
    ids = tokenizer.convert_tokens_to_ids(spec["completion_tokens"])
    text = completion_text(tokenizer, ids, [tokenizer.convert_tokens_to_ids(spec["eos"])])
    assert text == expected.get("reward_text", text)
    assert all(part in text for part in expected.get("reward_text_contains", []))
    assert not any(part in text for part in expected.get("reward_text_lacks", []))


def test_reward_text_ends_at_the_first_stop_token():
    case = CASES["eos/text-ends-there"]
    tokenizer = build_tokenizer(case["input"]["vocabulary"])
    ids, stops = case["input"]["completion_ids"], case["input"]["eos_token_ids"]
    assert completion_text(tokenizer, ids, stops) == case["expected"]["reward_text"]


def test_reward_text_keeps_white_space_before_punctuation():
    """Clean-up of spaces would turn "a ?" into "a?" and a right answer into a wrong one."""
    tokenizer = build_tokenizer()
    assert completion_text(tokenizer, encode_target(tokenizer, "a ? \n b"), [2]) == "a ? \n b"


# ---- stop tokens -------------------------------------------------------------------------------


def test_stop_ids_are_the_union_of_what_all_sources_say():
    tokenizer = build_tokenizer(MARKOV_TOKENS)
    model_config, generation = build_model().config, GenerationConfig(eos_token_id=[3, 5])
    assert find_stop_token_ids(tokenizer, model_config, generation) == [2, 3, 5]
    model_config.eos_token_id = 7
    assert find_stop_token_ids(tokenizer, model_config, None) == [2, 7]


def test_the_end_of_an_assistants_turn_stops():
    """Qwen's base models: eos is <|endoftext|>, but a turn is closed with <|im_end|>."""
    template = (
        "{% for m in messages %}<bos>{{ m['role'][0] }}\n{{ m['content'] }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<bos>a\n{% endif %}"
    )
    vocabulary = [*MARKOV_TOKENS, "\n"]
    tokenizer = build_tokenizer(vocabulary, special=["<end>"], chat_template=template)
    assert end_of_turn(tokenizer) == 3
    assert find_stop_token_ids(tokenizer, GenerationConfig(eos_token_id=2)) == [2, 3]


def test_no_stop_token_at_all_is_refused():
    tokenizer = build_tokenizer(["<pad>", "a"])
    with pytest.raises(UserError, match="no end token.*eos_token_id"):
        find_stop_token_ids(tokenizer, GenerationConfig())


# ---- new tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_new_tokens_stand_near_the_mean_and_leave_the_old_ones_alone(tied):
    model, tokenizer = build_model("qwen2", tie_word_embeddings=tied), build_tokenizer()
    old_embedding = model.get_input_embeddings().weight.detach().clone()
    old_head = model.get_output_embeddings().weight.detach().clone()
    ids = add_tokens(model, tokenizer, ["<|up|>", "a", "<|left|>", "<|up|>"])
    assert ids == [32, 33]  # "a" is known, the second <|up|> is the first
    assert encode_target(tokenizer, "a<|up|><|left|>") == [3, 32, 33]
    for weight, old in (
        (model.get_input_embeddings().weight, old_embedding),
        (model.get_output_embeddings().weight, old_head),
    ):
        assert weight.shape == (34, 16)
        assert weight[:32].equal(old)
        distance = (weight[32:] - old.mean(dim=0)).norm(dim=1)
        assert (distance > 0).all() and (distance < 0.5 * old.std(dim=0).norm()).all()
        assert not weight[32].equal(weight[33])
    same = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert same == tied
    assert model.get_output_embeddings().out_features == model.config.vocab_size == 34


def test_known_tokens_change_nothing():
    model, tokenizer = build_model(), build_tokenizer()
    assert add_tokens(model, tokenizer, ["a", "<eos>"]) == []
    assert model.config.vocab_size == len(tokenizer) == 32


def test_rows_that_a_tokenizer_needs_and_a_model_lacks_are_made_from_the_seed():
    """A tokenizer may know more tokens than its model has rows; no row may be left to chance."""
    tokenizer = build_tokenizer()
    models = [build_model(vocab_size=30) for _ in range(2)]
    before = torch.random.get_rng_state()
    for model in models:
        fit_embeddings(model, tokenizer)
    first, second = (model.get_output_embeddings().weight for model in models)
    assert first.shape == (32, 16) and first.equal(second)
    assert torch.random.get_rng_state().equal(before)
    fit_embeddings(models[0], build_tokenizer(["<pad>", "a"]))  # never takes rows away
    assert models[0].get_output_embeddings().weight.shape == (32, 16)
