"""Wrong options and broken checkpoints: one sentence each, before a weight is read."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_specblock.adapt.options import parse_adapt
from vllm_specblock.config import (
    OptionError,
    check_num_nodes,
    parse_combine,
    parse_drafter,
    split_keys,
)
from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.drafters.registry import drafter_kind

ROOT = Path(__file__).resolve().parents[1]
FIXTURE, OURS = ROOT / "tests/fixtures/llama", ROOT / "examples/tiny_pair/drafter"
EAGLE3 = ROOT / "examples/two_heads/eagle3"
WHOLE = ["1", 1.5, True, [1], {}]
"""What is given for a whole number."""

OPTIONS: dict[str, dict[str, list[Any]]] = {
    "specblock": {
        "num_blocks": [0, -1, 9, *WHOLE],
        "num_starts": [0, -1, 33, *WHOLE],
        "branching": [[4, 8, 16], [4] * 5, [4, 8, 16, -1], [4, 8, 16, "16"], "4,8,16,16", 4],
        "calibrate_drafts": ["yes", 1, [], 0.5],
        "quantization": ["fp4", 8, True, ["fp8"]],
        "num_block": [2],
        "depth": [4],
    },
    "eagle3": {"depth": [0, 33, *WHOLE], "top_k": [0, 33, *WHOLE], "num_blocks": [1]},
    "ngram": {
        "min_match": [0, 33, 9, *WHOLE],
        "max_match": [0, 33, *WHOLE],
        "depth": [0, 65, *WHOLE],
        "branches": [0, 33, *WHOLE],
        "quantization": ["fp8"],
    },
}
COMBINE: dict[str, list[Any]] = {
    "draft_policy": ["vote", 1, ["route"], None],
    "confidence": ["max", 0, None],
    "merge": ["both", True, None],
    "budget": ["all", 60, None],
    "skip_drafter": ["no", 1, 0.5],
}
ADAPT: dict[str, list[Any]] = {
    "policy": ["never", 1, None],
    "rule": ["ours", 1, None],
    "trainer": ["", "cuda", "cuda:x", 3, None],
    "actions": ["heads,all", 1, True],
    "lr": [0, -1e-3, "fast", math.inf, math.nan],
    "every": [0, -8, 1.5, "8"],
    "requests": ["some", 1, None],
    "memory": [0, -1, "512", math.nan],
    "out": [3, True, ["versions"]],
    "folder": ["versions"],
}
STRUCTURE: list[dict[str, Any]] = [
    {"second_drafter": "ngram"},
    {"second_drafter": ["ngram"]},
    {"second_drafter": 2},
    {"second_drafter": {"kind": "hydra"}},
    {"second_drafter": {"kind": 3}},
    {"kind": "hydra"},
    {"kind": ["specblock"]},
    {"draft_policy": "merge"},
    {"confidence": "sum"},
]


Call = Callable[[Any], Any]


def parsed() -> dict[str, tuple[str, Call, list[Any]]]:
    """Case → a word that its sentences must have, what is called, and with what."""
    cases: dict[str, tuple[str, Call, list[Any]]] = {
        "adapt": (
            "adapt",
            lambda given: parse_adapt(given, "specblock"),
            ["yes", 1, None, [], 0.5],
        ),
        "nodes": ("num_speculative_tokens", check_num_nodes, [0, -1, 257, "12", 2.5, True, None]),
    }
    for kind, keys in OPTIONS.items():
        for key, values in keys.items():
            given = [{key: value} for value in values]
            cases[f"{kind}, {key}"] = key, partial(parse_drafter, kind=kind), given
    for key, values in COMBINE.items():
        cases[f"two drafters, {key}"] = key, parse_combine, [{key: value} for value in values]
    for key, values in ADAPT.items():
        given = [{key: value} for value in values]
        cases[f"adapt, {key}"] = key, partial(parse_adapt, kind="specblock"), given
    for kind in ("eagle3", "ngram", "dflash"):
        cases[f"adapt of {kind}"] = kind, partial(parse_adapt, kind=kind), [True]
    for given in STRUCTURE:
        cases[f"{given}"] = next(iter(given)), split_keys, [given]
    return cases


def one_sentence(message: str) -> None:
    assert message.endswith(".") and "\n" not in message, message
    assert "Traceback" not in message and len(message) < 700, message


@pytest.mark.parametrize(("word", "call", "wrong"), parsed().values(), ids=parsed())
def test_a_wrong_option_is_one_sentence(word, call, wrong):
    for given in wrong:
        with pytest.raises(OptionError) as error:
            call(given)
        one_sentence(str(error.value))
        assert word in str(error.value), given


# ---- Checkpoints ----
def configs() -> list[Any]:
    """(folder, key of its config.json, wrong values; `...` leaves the key out)."""
    numbers = [..., "many", -1, 0, [1], {}]
    published = ["hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers"]
    counts = ["four", -1, 0, 4.5]
    wrong: list[tuple[Path, dict[str, list[Any]]]] = [
        (
            FIXTURE,
            dict.fromkeys([*published, "vocab_size"], numbers)
            | dict.fromkeys(["diffspec_draft_token_num", "rank_classes"], counts)
            | {
                "architectures": [..., [], ["LlamaForCausalLM"], "text"],
                "draft_vocab_size": ["all", -1, 10**9],
                "num_key_value_heads": ["two", -1, 3],
                "rms_norm_eps": ["small", -1],
                "rope_scaling": [{"rope_type": "unknown"}, {"rope_type": "llama3"}],
                "eagle_config": [{"eagle_aux_hidden_state_layer_ids": ids} for ids in ("a", [1])],
            },
        ),
        (
            OURS,
            dict.fromkeys(["hidden_size", "num_hidden_layers", "block_size"], numbers)
            | {
                "head_dim": ["wide", -2, 3],
                "block_rope": ["else", 1],
                "rank_topk": ["some", -1],
                "target": [..., "a target", {}, {"hidden_size": -1, "vocab_size": 2}],
                "a_key_of_nobody": [1],
            },
        ),
        (
            EAGLE3,
            dict.fromkeys(["hidden_size", "num_attention_heads", "vocab_size"], numbers)
            | {
                "num_hidden_layers": ["one", -1, 0],
                "hidden_act": ["gelu"],
                "draft_vocab_size": ["all", -1],
                "quantization_config": [{"quant_method": "awq"}],
            },
        ),
    ]
    return [
        pytest.param(folder, key, values, id=f"{folder.name}, {key}")
        for folder, keys in wrong
        for key, values in keys.items()
    ]


def refused(folder: Path) -> None:
    """As an engine looks at a drafter: its kind, its config, then names and shapes."""
    with pytest.raises(CheckpointError) as error:
        files = drafter_kind(kind_of(folder)).load_checkpoint_module()
        files.check_tensors(folder, files.read_config(folder))
    one_sentence(str(error.value))


@pytest.mark.parametrize(("folder", "key", "wrong"), configs())
def test_a_wrong_config_is_one_sentence(folder, key, wrong, tmp_path):
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    for value in wrong:
        raw = json.loads((folder / "config.json").read_text()) | {key: value}
        raw = {name: each for name, each in raw.items() if each is not ...}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        refused(tmp_path)


ANYTHING = [None, True, -1, 0, 3, 1e300, "text", [], [1], ["a"], {}, {"a": 1}]


@pytest.mark.parametrize("folder", [FIXTURE, OURS, EAGLE3], ids=lambda folder: folder.name)
def test_whatever_stands_in_a_config_it_is_taken_or_refused(folder, tmp_path):
    """Nothing but a `CheckpointError` comes of any value of any key."""
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    beside = ["rope_scaling", "rope_parameters", "eagle_config", "layer_types", "torch_dtype"]
    for key in dict.fromkeys([*raw, *beside, "specblock_head"]):
        for value in ANYTHING:
            (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
            try:
                files = drafter_kind(kind_of(tmp_path)).load_checkpoint_module()
                files.check_tensors(tmp_path, files.read_config(tmp_path))
            except CheckpointError as error:
                one_sentence(str(error))
            except Exception as error:
                pytest.fail(f"{key} = {value!r}: {type(error).__name__}: {error}")


@pytest.fixture
def copied(tmp_path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "drafter"))


TEXTS = {
    "empty": b"",
    "a list": b"[]",
    "null": b"null",
    "a number": b"4",
    "half": b'{"hidden_size": ',
    "bytes": b"\xff\xfe\x00\x80",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_config_that_is_none(copied, text):
    (copied / "config.json").write_bytes(TEXTS[text])
    refused(copied)


def test_no_config(copied):
    (copied / "config.json").unlink()
    refused(copied)
    refused(copied / "nowhere")


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda file: b"",
    "seven bytes": lambda file: file[:7],
    "within its header": lambda file: file[:100],
    "half": lambda file: file[: len(file) // 2],
    "without its last byte": lambda file: file[:-1],
    "a header of 2^63 bytes": lambda file: b"\xff" * 7 + b"\x7f" + file[8:],
    "a header of a gigabyte": lambda file: (1 << 30).to_bytes(8, "little") + file[8:],
    "a header that is no JSON": lambda file: file[:8] + b"!" * 64 + file[72:],
    "text": lambda file: b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.mark.parametrize("how", BROKEN)
def test_weights_that_are_not_whole(copied, how):
    path = copied / "model.safetensors"
    path.write_bytes(BROKEN[how](path.read_bytes()))
    refused(copied)


NAMES = sorted(load_file(FIXTURE / "model.safetensors"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["left out", "of another shape", "by another name"])
def test_a_tensor_that_is_not_what_the_config_says(copied, name, how):
    (copied / "vocab_mapping.pt").unlink()  # which would bring these in place of the file's own
    tensors = load_file(copied / "model.safetensors")
    tensor = tensors.pop(name)
    if how == "of another shape":
        tensors[name] = torch.cat([tensor, tensor])
    elif how == "by another name":
        tensors[f"{name}.other"] = tensor
    save_file(tensors, copied / "model.safetensors")
    refused(copied)


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return exec, (f"open({str(self.trace)!r}, 'w').close()",)


def test_a_pickle_is_not_run(copied, tmp_path):
    trace = tmp_path / "it ran"
    for content in (Hostile(trace), {"d2t": Hostile(trace), "t2d": torch.zeros(2)}):
        torch.save(content, copied / "vocab_mapping.pt")
        refused(copied)
        (copied / "vocab_mapping.pt").write_bytes(pickle.dumps(content))
        refused(copied)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Hostile(trace)))
    assert trace.exists(), "it is not hostile: this tested nothing"


def mappings() -> dict[str, Any]:
    good = torch.load(FIXTURE / "vocab_mapping.pt", weights_only=True)
    d2t, t2d = good["d2t"], good["t2d"]
    return {
        "a list": [d2t, t2d],
        "a tensor": d2t,
        "no d2t": {"t2d": t2d},
        "no t2d": {"d2t": d2t},
        "numbers": {"d2t": 1, "t2d": 2},
        "too short": {"d2t": d2t[:-1], "t2d": t2d},
        "all tokens": {"d2t": d2t, "t2d": torch.ones_like(t2d)},
        "no tokens": {"d2t": d2t, "t2d": torch.zeros_like(t2d)},
        "beyond the vocabulary": {"d2t": d2t + len(t2d), "t2d": t2d},
        "before the vocabulary": {"d2t": d2t - len(t2d), "t2d": t2d},
        "fractions": {"d2t": d2t + 0.5, "t2d": t2d},
        "other tokens": {"d2t": d2t, "t2d": ~t2d},
    }


@pytest.mark.parametrize("how", mappings())
def test_a_mapping_that_is_none(copied, how):
    torch.save(mappings()[how], copied / "vocab_mapping.pt")
    refused(copied)
