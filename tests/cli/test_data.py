"""Commands that run the target in real vLLM: data, features."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.processes import run_python
from support.scripts import TARGET, specblock
from transformers import AutoTokenizer

from vllm_specblock.train.data import shards
from vllm_specblock.train.data.packed_dataset import PackedDataset, load_texts
from vllm_specblock.train.target.features import OnlineTeacher, StoredTeacher, load_target

# The first time as `specblock` would; then as if it had been stopped after the first shard.
TWICE = """
import shutil, sys
from pathlib import Path
from vllm_specblock.cli.main import app
whole, kept = map(Path, sys.argv[1:3])
del sys.argv[1:3]
app(standalone_mode=False)
shutil.copytree(whole, kept)
(whole / "data.json").unlink()
next(whole.glob("*-00001.*")).unlink()
app(standalone_mode=False)
"""
NEW = 24
PROMPTS = ["class Reader:\n", "import os\n\ndef main(", "for line in lines:\n", "x = [\n"]


@pytest.fixture
def source(tmp_path) -> Path:
    lines = [
        {"prompt": PROMPTS[0]},
        {"messages": [{"role": "user", "content": PROMPTS[1]}]},
        {"what": "?"},
        {"data": [PROMPTS[2], "an answer of the data"]},
        {"conversations": [{"from": "human", "value": PROMPTS[3]}]},
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def words(source: Path, out: Path, *more: str | int | Path) -> list[str]:
    engine = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    given = ["data", "--target", TARGET, "--input", source, "--out", out, "--max-length", 256]
    given += ["--max-new-tokens", NEW, "--dtype", "float32", "--engine", json.dumps(engine), *more]
    return [*map(str, given)]


def greedy(prompt: list[int]) -> list[int]:
    """transformers' own answer."""
    model = load_target(TARGET, "fp32", torch.device("cpu"))
    text = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    return text[0, len(prompt) :].tolist()


@pytest.mark.engine
def test_answers_are_the_targets_own(source, tmp_path):
    pytest.importorskip("vllm", reason="runs real vLLM")
    options = ("--temperature", 0, "--temperature", 0.8, "--shard-size", 2)
    whole, kept = tmp_path / "whole", tmp_path / "kept"
    # As in a user's shell, where nothing has chosen how vLLM runs its engine.
    hidden = ("VLLM_ENABLE_V1_MULTIPROCESSING", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [sys.executable, "-c", TWICE, str(whole), str(kept), *words(source, whole, *options)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"{source}:3: it has none of the keys" in result.stderr
    assert "1 lines were skipped." in result.stdout
    assert "draft vocabulary: 2,048 of 2,048 tokens cover 100.0 % of" in result.stdout

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    texts = list(shards.read(whole))
    assert len(texts) == 4
    for number, (prompt, text) in enumerate(zip(PROMPTS, texts)):
        chat = [{"role": "user", "content": prompt}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        ids = text.tokens.tolist()
        assert ids[: len(asked)] == asked
        assert text.loss_mask.tolist() == [False] * len(asked) + [True] * (len(ids) - len(asked))
        assert (ids[len(asked) :] == greedy(asked)) == (number % 2 == 0)

    for number in (0, 1):
        path = shards.shard_path(whole, number)
        assert path.read_bytes() == (kept / path.name).read_bytes()

    # All is there: no engine starts, even with impossible arguments.
    impossible = "--engine", '{"tensor_parallel_size": 64}'
    result = specblock(*words(source, whole, *options, *impossible))
    assert result.exit_code == 0 and "4 sequences of" in result.stdout, result.output


@pytest.mark.engine
def test_what_vllm_refuses_is_one_sentence(source, tmp_path):
    pytest.importorskip("vllm", reason="runs real vLLM")
    result = specblock(*words(source, tmp_path / "out", "--engine", '{"no_such_option": 1}'))
    assert result.exit_code == 1
    (said,) = [line for line in result.stderr.splitlines() if "Error: " in line]
    assert "vLLM cannot run the target" in said and "no_such_option" in said


def test_texts_need_no_engine(tmp_path):
    source = tmp_path / "texts.jsonl"
    source.write_text(json.dumps({"text": PROMPTS[1]}) + '\n{"what": 1}')
    where = "--target", TARGET, "--input", source, "--out", tmp_path / "out"
    result = specblock("data", *where, "--draft-vocab-size", 3)
    assert result.exit_code == 0, result.output
    (text,) = shards.read(tmp_path / "out")
    assert text.loss_mask.all()
    assert "1 sequences of" in result.stdout and "1 lines were skipped." in result.stdout
    kept = text.tokens.tolist()
    share = sum(sorted(map(kept.count, set(kept)))[-3:]) / len(kept)
    assert f"3 of 2,048 tokens cover {100 * share:.1f} % of the counted tokens" in result.stdout


LENGTH, LAYERS = 48, (0, 3, 6)
SIZES = [100, 20, 1, 48, 9, 70, 25]


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "tokens.safetensors"
    draw = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, 2048, (sum(SIZES),), generator=draw)
    safetensors.torch.save_file({"tokens": tokens, "lengths": torch.tensor(SIZES)}, path)
    return path


def arguments(data: Path, out: Path) -> list[str]:
    engine = {
        "max_num_batched_tokens": 20,  # fewer than a piece has: it comes in several steps
        "kv_cache_memory_bytes": 50 << 20,
        "enforce_eager": True,
    }
    given = f"--target={TARGET} --data={data} --out={out} --length={LENGTH} --dtype=float32"
    layers = ",".join(map(str, LAYERS))
    more = f"--layer-ids={layers}", "--shard-tokens=100", f"--engine={json.dumps(engine)}"
    return ["features", *given.split(), *more]


@pytest.mark.engine
def test_same_numbers_as_online(data, tmp_path):
    """Extracted by a vLLM engine in a process of its own, vLLM's default."""
    pytest.importorskip("vllm", reason="runs real vLLM")
    out, given = tmp_path / "out", {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    run_python("-m", "vllm_specblock", *arguments(data, out), VLLM_LOGGING_LEVEL="ERROR", **given)

    ids = torch.arange(5, 2048, 9)
    online = OnlineTeacher(load_target(TARGET, "fp32", torch.device("cpu")), LAYERS, ids)
    stored = StoredTeacher(out, TARGET, ids, "cpu", torch.float32, layer_ids=LAYERS, length=LENGTH)
    windows = PackedDataset(load_texts(data, 2048), LENGTH, shortest=3)
    batch = windows.of(range(len(windows)))
    inside = batch.tokens >= 0
    assert max(map(len, batch.segments)) > 1 and not inside.all()
    expected, found = online.teach(batch), stored.teach(batch)
    for name in ("hidden", "last", "target_probs"):
        here, there = getattr(found, name)[inside], getattr(expected, name)[inside]
        torch.testing.assert_close(here, there, atol=1e-4, rtol=0, msg=name)
    assert expected.last[inside].abs().max() > 1  # the tolerance means something
    tokens = batch.tokens[inside]
    assert torch.equal(stored.embed(tokens), online.embed(tokens))

    result = specblock(*arguments(data, out))  # no engine starts
    assert result.exit_code == 0 and "already complete" in result.stdout
