"""EAGLE-3, DFlash and JetSpec drafters draft what vLLM's own do.

Drafters are random, so that nearly every draft is wrong and each step is another text to compare.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import dflash
from support.committed import served_trees
from support.eagle3 import SIZES, small_eagle3, speculators_json
from support.engines import TARGET, make_engine, note_calls, record_drafts
from support.matrix import PROMPTS, params
from support.targets import LLAMA3
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import CandidateSampler

from vllm_specblock.drafters.dflash.drafter import DFlashDrafter
from vllm_specblock.drafters.dflash.model import FILES as DFLASH
from vllm_specblock.drafters.eagle3.config import from_json
from vllm_specblock.drafters.eagle3.drafter import Eagle3Drafter
from vllm_specblock.drafters.eagle3.model import FILES as EAGLE3
from vllm_specblock.drafters.options import DFlashConfig, Eagle3Config
from vllm_specblock.engine.runner.speculator import TreeSpeculator
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.train.target.features import load_target

DRAFTED, LAYERS, PAGE, PAGES = 3, (2, 3, 4), 16, 16
MAX_LEN = PAGE * PAGES


def layer_json(**changes) -> dict:
    target = json.loads((TARGET / "config.json").read_text())
    return SIZES | {
        "hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
        "head_dim": 32,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **changes,
    }


def flat() -> dict:
    """The authors' layout: two layers, every bias, one norm before fc, llama3 RoPE; embedding, LM
    head and vocabulary are the target's."""
    return layer_json(
        architectures=["LlamaForCausalLMEagle3"],
        model_type="llama",
        num_hidden_layers=2,
        attention_bias=True,
        mlp_bias=True,
        rope_theta=5000.0,
        rope_scaling=LLAMA3 | {"original_max_position_embeddings": 64},
        eagle_aux_hidden_state_layer_ids=LAYERS,
        eagle_config={"norm_before_fc": True, "use_aux_hidden_state": True},
    )


def speculators() -> dict:
    """Qwen3, every other norm, YaRN over half of each head, a mapping, LM head and embedding."""
    yarn = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "partial_rotary_factor": 0.5}
    yarn |= {"original_max_position_embeddings": 64}
    return speculators_json(
        layer_json(model_type="qwen3", rope_parameters=yarn),
        TARGET,
        draft_vocab_size=1500,
        norm_before_residual=True,
        fc_norm=True,
        norm_output=True,
        eagle_aux_hidden_state_layer_ids=LAYERS,
        torch_dtype="float32",
    )


def write(directory: Path, raw: dict, whole: bool) -> None:
    """whole: with embedding, LM head and mapping; else those of the target serve."""
    drafter = small_eagle3(whole, **from_json(raw, "config.json").model_dump())
    with torch.no_grad():
        for weight in drafter.parameters():
            # Large enough for every part of the layer to tell.
            weight.uniform_(0.5, 1.5) if weight.dim() == 1 else weight.normal_(std=0.2)
    tensors = {n.replace("midlayer", "layers.0"): t for n, t in drafter.state_dict().items()}
    if not whole:
        del tensors["d2t"], tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(raw))


@pytest.fixture(scope="module")
def target():
    return load_target(TARGET, "fp32", torch.device("cpu"))


def engine_with(speculative: dict, **changes):
    # Interpreted kernels of vLLM's drafters pad to a step's most tokens.
    engine = make_engine(speculative, max_num_batched_tokens=128, **changes)
    assert not isinstance(engine.speculator, TreeSpeculator), "vLLM's own"
    return engine


def committed(chains: list[list[int]], text: list[int], root: int):
    """Yield the root from which vLLM's drafter drafted each chain, the first from `root`."""
    for chain in chains:
        if root + len(chain) >= len(text):
            return
        yield root
        wrong = (k for k, token in enumerate(chain) if token != text[root + 1 + k])
        root += 1 + next(wrong, len(chain))


def steps(engine, drafts: list, noted: list, drafter, target, layer_ids):
    """Yield what was noted when vLLM's drafter drafted, and our drafter's tree of the same text."""
    shapes = [(PAGES + 1, PAGE, of.num_kv_heads, 2 * of.head_dim) for of in drafter.cache_layers()]
    drafter.bind([torch.zeros(shape).transpose(1, 2) for shape in shapes])
    for prompt in PROMPTS[:4]:
        drafts.clear()
        noted.clear()
        ((answer,),) = engine.generate([prompt], params(1, max_tokens=24))
        text = [*prompt, *answer.tokens]
        hidden = target(torch.tensor([text]), output_hidden_states=True).hidden_states
        states = torch.cat([hidden[layer][0] for layer in layer_ids], -1)
        sequence = EvalSequence(torch.tensor(text), len(prompt), states, hidden[-1][0], None)
        assert len(noted) == len(drafts)
        roots = committed(drafts, text, len(prompt))
        trees = served_trees(drafter, sequence, roots, PAGES, PAGE, len(layer_ids))
        yield from zip(noted, trees)


@pytest.mark.parametrize(("make", "whole"), [(flat, False), (speculators, True)])
@torch.no_grad()
def test_eagle3_drafts_the_same_tokens(make, whole, target, tmp_path, monkeypatch):
    write(tmp_path, make(), whole)
    # Where it names its target vLLM finds it, and its method.
    asked, named = {"num_speculative_tokens": DRAFTED, "method": "eagle3"}, {"model": str(tmp_path)}
    engine = engine_with(asked, **named) if whole else engine_with(asked | named)
    drafts, model = record_drafts(engine, monkeypatch), EAGLE3.load(tmp_path)
    assert model.wants_head is not whole
    if model.wants_head:
        model.share_head(target.get_output_embeddings().weight)
    options = Eagle3Config(depth=DRAFTED, top_k=1)
    drafter = Eagle3Drafter(model, target.get_input_embeddings(), options, DRAFTED, MAX_LEN)
    found = [
        tree.token[0].tolist() == chain
        for chain, tree in steps(engine, drafts, drafts, drafter, target, LAYERS)
    ]
    # Two tokens that score the same to the last bits may change places.
    assert len(found) > 40 and found.count(False) <= 1


@pytest.fixture
def dflash_pair(target, tmp_path, monkeypatch):
    """Make an engine with vLLM's own drafter, its drafts, and our drafter of the same weights."""

    def make(kind: str):
        raw = dflash.FOR_TINY_PAIR[kind]
        model = dflash.make_model(raw, std=0.2)
        # vLLM 0.32 on a CPU norms the context's keys of every layer by the first one's weights.
        first, second = (layer.self_attn.k_norm.weight for layer in model.layers)
        second.copy_(first)
        folder = dflash.write(tmp_path / "drafter", model, raw)
        method = "dspark" if kind == "dspark" else "dflash"
        asked = {"method": method, "model": str(folder), "num_speculative_tokens": 4}
        engine = engine_with(asked)
        drafts, model = record_drafts(engine, monkeypatch), DFLASH.load(folder)
        if model.wants_head:
            model.share_head(target.get_output_embeddings().weight)
        drafter = DFlashDrafter(
            model, target.get_input_embeddings(), DFlashConfig(), 12, MAX_LEN, layers=(0, 1, 2, 3)
        )
        return engine, drafts, drafter

    return make


@pytest.mark.parametrize("kind", ["dflash", "jetspec", "windows"])
@torch.no_grad()
def test_dflash_has_the_same_logits(kind, dflash_pair, target, monkeypatch):
    engine, drafts, drafter = dflash_pair(kind)
    model, named = drafter.model, torch.arange(len(drafter.model.d2t)) + drafter.model.d2t
    theirs = note_calls(
        monkeypatch, engine.speculator.model, "compute_logits", lambda logits, *_: logits.cpu()
    )
    ours = note_calls(monkeypatch, model, "logits", lambda logits, *_: logits)
    compared = 0
    for logits, _ in steps(engine, drafts, theirs, drafter, target, model.config.layer_ids):
        torch.testing.assert_close(ours[-1][0], logits[:, named], atol=1e-3, rtol=0)
        compared += 1
    assert compared > 60


def walk(_, token, scores, count, *rest):
    """vLLM's greedy walk through DFlash2's pairs, whose kernel Triton's interpreter cannot run."""
    drafts, before = rest[4], torch.zeros(count, dtype=torch.int64)
    for place in range(token.shape[1]):
        before = scores[torch.arange(count), place, before].argmax(-1)
        drafts[:count, place] = token[torch.arange(count), place, before]


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
@torch.no_grad()
def test_with_a_head_for_pairs_the_likeliest_tokens_are_the_same(
    kind, dflash_pair, target, monkeypatch
):
    monkeypatch.setattr(CandidateSampler, "sample", walk)
    engine, drafts, drafter = dflash_pair(kind)
    noted = note_calls(monkeypatch, drafter.model, "choices", lambda found, *_: found)
    compared = 0
    for chain, _ in steps(engine, drafts, drafts, drafter, target, drafter.model.config.layer_ids):
        logprob, token = (each[0] for each in noted[-1])
        before = 0
        for place, drafted in enumerate(chain):
            (here,) = (token[place] == drafted).nonzero()[:, 0].tolist()
            best = logprob[place, before]
            assert best[here] > best.max() - 1e-3, (place, drafted)
            before = here
        compared += 1
    assert compared > 60
