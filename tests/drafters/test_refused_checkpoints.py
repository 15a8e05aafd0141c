"""Checkpoints that cannot be used: one sentence each, before a weight is read."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.dflash import DSPARK, PUBLISHED, make_model
from support.dflash import write as write_dflash
from support.targets import edit_config

from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.drafters.registry import drafter_kind

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "tests/fixtures/llama"
EAGLE3 = ROOT / "examples/two_heads/eagle3"
LAYOUTS = ["published", "ours", "eagle3", "speculators", "dflash", "dspark"]
OWN = PUBLISHED["dflash_config"]


@pytest.fixture
def write(tmp_path) -> Callable[[str], Path]:
    """Write a checkpoint that loads, in one of `LAYOUTS`."""

    def written(layout: str) -> Path:
        folder = tmp_path / "drafter"
        if layout in ("dflash", "dspark"):
            raw = {"dflash": PUBLISHED, "dspark": DSPARK}[layout]
            return write_dflash(folder, make_model(raw), raw)
        ours = ROOT / "examples/tiny_pair/drafter"
        shutil.copytree({"published": FIXTURE, "ours": ours}.get(layout, EAGLE3), folder)
        if layout == "speculators":
            layer = json.loads((folder / "config.json").read_text())
            raw = {
                "speculators_model_type": "eagle3",
                "draft_vocab_size": layer.pop("draft_vocab_size"),
                "transformer_layer_config": layer,
            }
            (folder / "config.json").write_text(json.dumps(raw))
        return folder

    return written


@pytest.fixture
def published(write) -> Path:
    return write("published")


def check(folder: Path) -> None:
    """Look at a drafter as an engine does: its kind, its config, then names and shapes."""
    files = drafter_kind(kind_of(folder)).load_checkpoint_module()
    files.check_tensors(folder, files.read_config(folder))


def load(folder: Path) -> None:
    drafter_kind(kind_of(folder)).load_checkpoint_module().load(folder)


def one_sentence(message: str) -> None:
    assert message.endswith(".") and "\n" not in message and len(message) < 700, message


def refused(folder: Path) -> str:
    """The sentence with which both the check and the loader refuse."""
    messages = []
    for attempt in (check, load):
        with pytest.raises(CheckpointError) as error:
            attempt(folder)
        messages.append(str(error.value))
        one_sentence(messages[-1])
    assert messages[0] == messages[1]
    return messages[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_here_loads(write, layout):
    folder = write(layout)
    check(folder)
    load(folder)


# ---- config.json ----
def rope(kind: str | None = None, **more: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **more}}


WINDOWS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
BY_TYPE = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e6}}
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "published": [
        ({"hidden_size": ...}, "lacks the key 'hidden_size'"),
        ({"num_attention_heads": 6}, "must be a whole multiple of the second"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads, 3"),
        ({"draft_vocab_size": 161}, "must not exceed vocab_size, 160"),
        ({"diffspec_draft_token_num": 0}, "'diffspec_draft_token_num' = 0, but it must be gr"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 5]}}, "_ids' = [2, 2, 5]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "a"}}, "'eagle_config.eagle_aux"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, "'eagle_config.eagle_aux"),
        ({"architectures": "text"}, "it must be a list of names"),
        ({"architectures": None}, "is one of SpecBlockDrafter, LlamaForCausalLMSpecBlock"),
        ({"architectures": ["GemmaForCausalLM"]}, "of architecture ['GemmaForCausalLM']"),
        ({"rms_norm_eps": -1}, "'rms_norm_eps' = -1"),
        (rope("unknown"), "'unknown'"),
        (rope("yarn", factor=4.0), "must be one of default, linear, llama3"),
        ({"rope_scaling": {"type": "linear"}}, "factor = None"),
        (rope("llama3", factor=8.0, low_freq_factor=1.0), "high_freq_factor = None"),
    ],
    "ours": [
        ({"block_size": ...}, "lacks the key 'block_size'"),
        ({"block_sise": 4}, "has the key 'block_sise', which is not one of"),
        ({"head_dim": 3}, "'head_dim' = 3"),
        ({"rank_topk": "some"}, "'rank_topk"),
        ({"block_rope": "depth"}, "it must be 'base' or 'path'"),
        ({"vocab_size": 2049}, "vocab_size is 2049, but the target's is 2048"),
        ({"target": ...}, "lacks the key 'target'"),
        ({"target": {"hidden_size": -1, "vocab_size": 2}}, "'target.hidden_size' = -1"),
        ({"specblock_head": "hydra"}, "specblock_head = 'hydra'"),
    ],
    "eagle3": [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = false"),
        ({"use_aux_hidden_state": False, "eagle_config": None}, "use_aux_hidden_state = false"),
        ({"parallel_drafting": True}, "lacks the key 'mask_token_id', which P-EAGLE needs"),
        ({"ptd_token_id": 3}, "lacks mask_hidden"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "must be one of LlamaForCausalLMEagl"),
        ({"layer_types": ["sliding_attention"]}, "lacks the key 'sliding_window'"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 0}, "'sliding_window' = 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor turns 48 of a head's 32 dim"),
        ({"partial_rotary_factor": 0.3}, "partial_rotary_factor turns 9 of a head's 32 dim"),
        ({"parallel_drafting": True, "pard_token": 2048}, "pard_token is 2048, but the vocabul"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (rope("dynamic"), "one of default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters has factor = None"),
        (rope("yarn", factor=2.0, beta_fast="x"), "beta_fast"),
        ({"hidden_size": None}, "lacks the key 'hidden_size'"),
        ({"eagle_aux_hidden_state_layer_ids": "2,3"}, "'eagle_aux_hidden_state_layer_ids' = '2,3'"),
        (
            {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"layer_ids": [3, 2]}},
            "'eagle_config.layer_ids' = [3, 2], but",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, "but its config.json asks for [192, 384]"),
        # The target's embedding is narrower than the drafter.
        ({"target_hidden_size": 160}, "lacks embed_tokens.weight"),
    ],
    "speculators": [
        ({"speculators_model_type": "peagle"}, "lacks the key 'mask_token_id'"),
        ({"transformer_layer_config": None}, "transformer_layer_config = None"),
        ({"transformer_layer_config": {"model_type": "gemma"}}, "of architecture ['gemma']"),
        ({"quantization_config": {"format": "int8"}}, "quantised weights"),
    ],
    "dflash": [
        ({"speculators_model_type": "dflash"}, "transformer_layer_config = None"),
        ({"speculators_model_type": "dflash3"}, "speculators_model_type = 'dflash3'"),
        ({"architectures": ["DFlash2DraftModel"]}, "lacks the key 'selector_rank'"),
        ({"architectures": ["OtherModel"]}, "architectures = ['OtherModel']"),
        (
            {"dflash_config": OWN | {"causal_head": True, "causal": False}},
            "causal_head and causal that contradict",
        ),
        ({"draft_vocab_size": 32}, "lacks d2t, lm_head.weight"),
        ({"draft_vocab_size": 65}, "must not exceed vocab_size, 64"),
        ({"target_hidden_size": 64}, "lacks embed_tokens.weight, lm_head.weight"),
        ({"dflash_config": OWN | {"use_swa": True}}, "lacks the key 'sliding_window'"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "lacks the key 'mask_token_id'"),
        ({"dflash_config": OWN | {"mask_token_id": 64}}, "the vocabulary ends at 63"),
        ({"dflash_config": {"mask_token_id": 3}}, "lacks the key 'target_layer_ids'"),
        ({"block_size": None}, "lacks the key 'block_size'"),
        ({"block_size": 1}, "'block_size - 1' = 0"),
        ({"dflash_config": OWN | {"target_layer_ids": [5, 3]}}, "'target_layer_ids' = [5, 3], but"),
        ({"dflash_config": OWN | {"layer_types": 5}}, "it must be a list of names"),
        (WINDOWS | {"rope_parameters": BY_TYPE}, "rope_parameters that differ between full_at"),
        ({"rope_scaling": {"full_attention": {"type": "su"}}}, "rope_scaling is of type 'su'"),
        ({"rope_parameters": {"sliding_attention": {}}}, "rope_parameters is of type 'None'"),
    ],
    "dspark": [
        ({"markov_rank": 0}, "'markov_rank' = 0"),
        ({"markov_rank": None}, "lacks the key 'markov_rank'"),
        ({"markov_head_type": "rnn"}, "a gated or recurrent Markov head"),
        ({"aux_hidden_state_layer_ids": [4, 2]}, "'aux_hidden_state_layer_ids' = [4, 2], but"),
        ({"transformer_layer_config": {"layer_types": 3}}, "it must be a list of names"),
        ({"speculators_model_type": []}, "it must be a name"),
    ],
}


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [(layout, *case) for layout, cases in WRONG.items() for case in cases],
)
def test_a_config_that_does_not_fit(write, layout, changes, said):
    folder = write(layout)
    edit_config(folder, **changes)
    assert said in refused(folder)


COUNTS = ["hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers"]
COUNTS += ["vocab_size", "draft_vocab_size", "rank_classes", "block_size"]
COUNTS += ["diffspec_draft_token_num"]
NO_COUNT = ["text", -1, 4.5, [1], {"a": 1}]
ANYTHING = [*NO_COUNT, None, True, 0, 3, 1e300, [], ["a"], {}]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_value_in_a_config_is_taken_or_refused(write, layout):
    """No exception but a `CheckpointError`, and no count that is none."""
    folder = write(layout)
    raw = json.loads((folder / "config.json").read_text())
    beside = ["rope_scaling", "rope_parameters", "eagle_config", "layer_types", "torch_dtype"]
    for key in dict.fromkeys([*raw, *beside, "specblock_head"]):
        for value in ANYTHING:
            (folder / "config.json").write_text(json.dumps(raw | {key: value}))
            try:
                check(folder)
            except CheckpointError as error:
                one_sentence(str(error))
            except Exception as error:
                pytest.fail(f"{key} = {value!r}: {type(error).__name__}: {error}")
            else:
                assert key not in COUNTS or value not in NO_COUNT, f"{key} = {value!r} is taken"


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b"4", b'{"hidden_size": ', b"\xff\xfe\x00\x80"], ids=str
)
def test_a_config_that_is_no_json_object(published, text):
    (published / "config.json").write_bytes(text)
    refused(published)


# ---- Tensors ----
@pytest.mark.parametrize(
    ("layout", "edit", "changes", "said"),
    [
        ("published", None, {"num_hidden_layers": 4}, "and 15 more"),
        ("published", lambda t: t.update({"layers.2.bogus": torch.zeros(1)}), {}, "holds layers.2"),
        ("published", None, {"intermediate_size": 128}, "has shape [96, 64], but its config.json"),
        # The target's LM head names other tokens, and has another place for each.
        ("eagle3", lambda t: t.pop("lm_head.weight"), {}, "lacks lm_head.weight"),
        ("eagle3", lambda t: (t.pop("d2t"), t.pop("t2d")), {}, "lacks d2t"),
        ("eagle3", lambda t: t.update({"layers.1.norm.weight": torch.zeros(1)}), {}, "holds layer"),
        ("eagle3", lambda t: t.update({"fc.weight": torch.zeros(192, 64)}), {}, "for [192, 576]"),
        ("eagle3", None, {"mlp_bias": True}, "lacks midlayer.mlp.down_proj.bias"),
        (
            "eagle3",
            lambda t: t.update({f"model.layers.0{n[8:]}": t.pop(n) for n in {*t} if "mid" in n}),
            {"mlp_bias": True},
            "lacks model.layers.0.mlp.down_proj.bias",
        ),
        ("dflash", None, {"num_hidden_layers": 3}, "lacks layers.2"),
    ],
)
def test_tensors_that_the_config_does_not_ask_for(write, layout, edit, changes, said):
    folder = write(layout)
    if edit is not None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")
    edit_config(folder, **changes)
    assert said in refused(folder)


@pytest.mark.parametrize("name", sorted(load_file(FIXTURE / "model.safetensors")))
@pytest.mark.parametrize("how", ["left out", "of another shape", "by another name"])
def test_no_tensor_may_be_missing_or_of_another_shape(published, name, how):
    (published / "vocab_mapping.pt").unlink()  # it would replace the file's own
    tensors = load_file(published / "model.safetensors")
    tensor = tensors.pop(name)
    if how == "of another shape":
        tensors[name] = torch.cat([tensor, tensor])
    elif how == "by another name":
        tensors[f"{name}.other"] = tensor
    save_file(tensors, published / "model.safetensors")
    refused(published)


# ---- Vocabulary mapping ----
GOOD = torch.load(FIXTURE / "vocab_mapping.pt", weights_only=True)
D2T, T2D = GOOD["d2t"], GOOD["t2d"]
MAPPINGS: dict[str, tuple[Any, str]] = {
    "a list": ([D2T, T2D], "is not a plain dict of the tensors d2t and t2d"),
    "no d2t": ({"t2d": T2D}, "is not a plain dict"),
    "numbers": ({"d2t": 1, "t2d": 2}, "is not a plain dict"),
    "too short": (GOOD | {"d2t": D2T[:-1]}, "d2t has shape [95]"),
    "all tokens": (GOOD | {"t2d": torch.ones_like(T2D)}, "that t2d marks"),
    "other tokens": (GOOD | {"t2d": ~T2D}, "that t2d marks"),
    "ids": (GOOD | {"d2t": D2T + torch.arange(96)}, "d2t holds offsets, not ids"),
    "beyond the vocabulary": (GOOD | {"d2t": D2T + 160}, "target ids below 160"),
    "before the vocabulary": (GOOD | {"d2t": D2T - 160}, "target ids below 160"),
    "fractions": (GOOD | {"d2t": D2T + 0.5}, "must be distinct target ids"),
}


@pytest.mark.parametrize("how", MAPPINGS)
def test_a_mapping_that_is_none(published, how):
    mapping, said = MAPPINGS[how]
    torch.save(mapping, published / "vocab_mapping.pt")
    assert said in refused(published)


@pytest.mark.parametrize(
    "d2t",
    [torch.arange(1536), torch.full((1536,), -1), torch.zeros(1536)],
    ids=["ids", "below 0", "a float"],
)
def test_a_mapping_of_eagle3_that_is_none(write, d2t):
    folder = write("eagle3")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"d2t": d2t}, folder / "model.safetensors")
    assert "d2t holds offsets, not ids" in refused(folder)


# ---- Files ----
@pytest.mark.parametrize("layout", ["published", "eagle3"])
def test_missing_files(write, layout):
    folder = write(layout)
    assert "There is no directory" in refused(folder / "org" / "drafter")
    (folder / "model.safetensors").unlink()
    assert "neither a .safetensors file nor a pytorch_model.bin" in refused(folder)
    (folder / "config.json").unlink()
    assert "There is no config.json" in refused(folder)


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda file: b"",
    "within its header": lambda file: file[:100],
    "without its last byte": lambda file: file[:-1],
    "a header of a gigabyte": lambda file: (1 << 30).to_bytes(8, "little") + file[8:],
    "a header that is no JSON": lambda file: file[:8] + b"!" * 64 + file[72:],
    "text": lambda file: b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.mark.parametrize("how", BROKEN)
def test_weights_that_are_not_whole(published, how):
    path = published / "model.safetensors"
    path.write_bytes(BROKEN[how](path.read_bytes()))
    assert "is not a complete safetensors file" in refused(published)


def test_pickled_weights_that_are_none(write):
    folder = write("eagle3")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_text("hello")
    assert "is not a plain dict of tensors" in refused(folder)
    torch.save([torch.zeros(1)], folder / "pytorch_model.bin")
    assert "is not a plain dict of tensors" in refused(folder)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": {"fc": "model-2.safetensors"}}, "names model-2.safetensors, which"),
        ({"weight_map": {"fc": "../model.safetensors"}}, "names ../model.safetensors, which"),
        ({}, "has no weight_map"),
    ],
)
def test_an_index_that_is_none(write, index, said):
    folder = write("eagle3")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert said in refused(folder)


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return exec, (f"open({str(self.trace)!r}, 'w').close()",)


def test_a_pickle_is_not_run(published, tmp_path):
    trace = tmp_path / "it ran"
    for content in (Hostile(trace), {"d2t": Hostile(trace), "t2d": torch.zeros(2)}):
        torch.save(content, published / "vocab_mapping.pt")
        refused(published)
        (published / "vocab_mapping.pt").write_bytes(pickle.dumps(content))
        refused(published)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Hostile(trace)))
    assert trace.exists(), "it is not hostile: this tested nothing"
