"""GGUF files of tiny models, written here from models whose answers are known."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import build_config, build_model, plain_logits
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import grpo.gguf
from grpo.errors import UserError
from grpo.policy import load_policy
from grpo.tokenizer import encode_target, render_prompt

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.3}
HEADS = {"q_proj": 2, "k_proj": 1}
NAMES = {  # llama.cpp's
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.layers": "blk", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
# In a byte-level vocabulary Ġ is a space and Ċ a line break.
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*CONTROL, *"Ċabcdeimnrstu012345678?", "Ġ", "ĠĠ", "ĊĊ"]
TOKENS += [f"unused{i}" for i in range(32 - len(TOKENS))]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_gguf(path, model, store="F32", eos=2, template=TEMPLATE, leave_out=(), kind="llama"):
    """The file that llama.cpp's converter would write; store: how the matrices are held."""
    config, writer = model.config, gguf.GGUFWriter(path, kind)
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in CONTROL else 1 for token in TOKENS])
    writer.add_token_merges(["Ġ Ġ", "Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    if template:
        writer.add_chat_template(template)
    for name, tensor in model.state_dict().items():
        own = name.removesuffix(".weight")
        for theirs, ours in NAMES.items():
            own = own.replace(theirs, ours)
        if own not in leave_out:
            kept = gguf.GGMLQuantizationType[store if tensor.dim() > 1 else "F32"]
            numbers = gguf.quantize(half_rotations(name, tensor).numpy(), kept)
            writer.add_tensor(f"{own}.weight", numbers, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def half_rotations(name, weight):
    """llama.cpp rotates neighbouring numbers, transformers those half a head apart: queries and
    keys are stored in another order."""
    heads = next((n for part, n in HEADS.items() if part in name), None)
    if heads is None:
        return weight.contiguous()
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return rows.swapaxes(1, 2).reshape(weight.shape).contiguous()


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf", build_model(**SIZES))


def convert(capsys, *words) -> tuple[int, str]:
    status = grpo.gguf.main([str(word) for word in words])
    written = capsys.readouterr()
    return status, written.out + written.err.split("\r")[-1]


def dtype_in(directory) -> str:
    return json.loads((directory / "config.json").read_text())["dtype"]


# ---- the model ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "store, numbers, saved",
    [
        ("F32", torch.float32, "float32"),
        ("F16", torch.float16, "float32"),  # three bits more than bfloat16 has
        ("F16", torch.bfloat16, "bfloat16"),  # a model trained in bfloat16 comes back as it was
        ("BF16", torch.bfloat16, "bfloat16"),
    ],
)
def test_a_converted_model_is_the_one_that_the_file_was_made_from(tmp_path, store, numbers, saved):
    model = build_model(**SIZES)
    model.load_state_dict({n: w.to(numbers).float() for n, w in model.state_dict().items()})
    grpo.gguf.convert(write_gguf(tmp_path / "tiny.gguf", model, store), tmp_path / "model")
    assert dtype_in(tmp_path / "model") == saved
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert plain_logits(converted).equal(plain_logits(model))


@pytest.mark.parametrize("store", ["Q4_1", "Q8_0"])
def test_a_model_in_blocks_answers_as_through_transformers_own_reading(tmp_path, store):
    file = write_gguf(tmp_path / "tiny.gguf", build_model(**SIZES), store)
    grpo.gguf.convert(file, tmp_path / "model")
    assert dtype_in(tmp_path / "model") == "bfloat16"
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.bfloat16
    )
    assert plain_logits(converted).equal(plain_logits(theirs))
    blocks = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name)
    off = (plain_logits(theirs) - plain_logits(blocks)).norm()
    rounded = (plain_logits(build_model(**SIZES)) - plain_logits(blocks)).norm()
    assert 0 < off < rounded  # bfloat16 takes away less than the blocks did


def test_the_converted_directory_trains_with_its_chat_template_and_stops_where_turns_end(tmp_path):
    """The file knows one end token, the base model's; the template closes a turn with another."""
    file = write_gguf(tmp_path / "tiny.gguf", build_model(**SIZES), eos=0)
    grpo.gguf.convert(file, tmp_path / "model")
    policy = load_policy(build_config(model=str(tmp_path / "model"), lora_rank=2))
    assert policy.stop_token_ids == [0, 2] and policy.end_token_id == 2
    saved = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [0, 2]
    prompt = render_prompt(policy.tokenizer, [{"role": "user", "content": "a?"}], "chat")
    assert policy.tokenizer.decode(prompt) == (
        "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt[0] == 1 and prompt.count(1) == 2


def test_the_spaces_before_a_number_are_one_token_as_the_model_learned_them(file, tmp_path):
    """transformers split them as GPT-2 does, one space with the number: "a", "Ġ", "Ġ", "1", "2"."""
    grpo.gguf.convert(file, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = encode_target(tokenizer, "a  12")
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "ĠĠ", "1", "2"]


def test_an_empty_directory_is_filled_even_the_one_that_we_are_in(file, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    grpo.gguf.convert(file, Path("."))
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_a_file_without_a_chat_template_is_converted_and_says_so(tmp_path, capsys):
    file = write_gguf(tmp_path / "tiny.gguf", build_model(**SIZES), template=None)
    status, said = convert(capsys, file, tmp_path / "model")
    assert status == 0 and "--prompt-format plain" in said


# ---- what can be wrong -------------------------------------------------------------------------


def test_each_mistake_is_one_line_that_names_the_file(file, tmp_path, capsys, monkeypatch):
    (tmp_path / "text.gguf").write_text("GPT")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("the only copy")
    new = tmp_path / "new"
    for source, target, parts in (
        (tmp_path / "nowhere.gguf", new, ("nowhere.gguf", "no such file")),
        (tmp_path / "full", new, ("full", "is a directory")),
        (tmp_path / "text.gguf", new, ("text.gguf", "not a GGUF file")),
        (file, tmp_path / "full", ("full", "not an empty directory")),
        (file, tmp_path / "text.gguf", ("text.gguf", "not an empty directory")),
    ):
        status, said = convert(capsys, source, target)
        assert status == 2 and said.startswith("error: ") and said.count("\n") == 1
        assert all(part in said for part in parts), said
    monkeypatch.setattr(grpo.gguf.importlib.util, "find_spec", lambda name: None)
    status, said = convert(capsys, file, new)
    assert status == 2 and "pip install gguf" in said
    assert not new.exists()
    assert (tmp_path / "full" / "thesis.txt").read_text() == "the only copy"


def test_a_file_cut_off_anywhere_is_refused_in_one_line(file, tmp_path, capsys):
    whole = file.read_bytes()
    for length in (4, 20, 100, 1_000, len(whole) // 2, len(whole) - 200):
        file.write_bytes(whole[:length])
        status, said = convert(capsys, file, tmp_path / "model")
        assert status == 2 and "may be damaged" in said and str(file) in said, length
        assert said.count("\n") == 1
        assert [p.name for p in tmp_path.iterdir()] == [file.name]


def test_an_architecture_that_nobody_reads_is_refused(tmp_path, capsys):
    file = write_gguf(tmp_path / "tiny.gguf", build_model(**SIZES), kind="nobodys")
    status, said = convert(capsys, file, tmp_path / "model")
    assert status == 2 and "nobodys" in said and said.count("\n") == 1


def test_a_weight_that_is_not_in_the_file_is_not_made_up(tmp_path):
    """transformers fills it with random numbers and only warns."""
    model = build_model(**SIZES)
    file = write_gguf(tmp_path / "tiny.gguf", model, leave_out=["blk.1.ffn_up"])
    with pytest.raises(UserError, match="1 weights are missing from it, first .*1.mlp.up_proj"):
        grpo.gguf.convert(file, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_an_interrupted_conversion_leaves_nothing_and_can_be_done_again(
    file, tmp_path, capsys, monkeypatch
):
    def interrupted(*args, **keywords):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "save_pretrained", interrupted)  # the weights are
        assert convert(capsys, file, tmp_path / "model")[0] == 130
    assert [p.name for p in tmp_path.iterdir()] == [file.name]
    # A kill that nothing can catch leaves the folder beside; it is never taken for the model.
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "save_pretrained", interrupted)
        patch.setattr(shutil, "rmtree", lambda *args, **keywords: None)
        convert(capsys, file, tmp_path / "model")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".model.partial", file.name]
    assert convert(capsys, file, tmp_path / "model")[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", file.name]


def test_a_gguf_file_given_as_the_model_says_how_to_convert_it(file):
    with pytest.raises(UserError) as caught:
        load_policy(build_config(model=str(file)))
    directory = Path(file).with_suffix("")
    assert f"python -m grpo.gguf {file} {directory} makes one: --model {directory}" in str(
        caught.value
    )
