"""DFlash and JetSpec drafters: the logits of vLLM's own, and what they ask of a target."""

from __future__ import annotations

import pytest
import torch
from support import dflash
from support.committed import along_a_chain, own_caches
from support.engines import TARGET, configure, make_engine, note_calls, record_drafts
from support.matrix import PROMPTS, params

from vllm_specblock.config import OptionError
from vllm_specblock.drafters.dflash.drafter import DFlashDrafter
from vllm_specblock.drafters.dflash.model import FILES
from vllm_specblock.drafters.options import DFlashConfig
from vllm_specblock.engine.runner.speculator import TreeSpeculator
from vllm_specblock.train.target.features import load_target

MASKS, PAGE, MAX_LEN = 4, 16, 256
OF_KIND = dflash.FOR_TINY_PAIR


@pytest.mark.parametrize("kind", OF_KIND)
@torch.no_grad()
def test_step_by_step_the_logits_are_those_of_vllms_own(kind, tmp_path, monkeypatch):
    """A random drafter is nearly always wrong, so that each step is another text to compare."""
    raw = OF_KIND[kind]
    model = dflash.make_model(raw, std=0.2)
    # vLLM 0.32 on a CPU norms the context's keys of every layer by the first one's weights.
    first, second = (layer.self_attn.k_norm.weight for layer in model.layers)
    second.copy_(first)
    folder = dflash.write(tmp_path / "drafter", model, raw)
    asked = {"method": "dflash", "model": str(folder), "num_speculative_tokens": MASKS}
    engine = make_engine(asked)
    assert not isinstance(engine.speculator, TreeSpeculator)
    drafts = record_drafts(engine, monkeypatch)
    theirs = note_calls(
        monkeypatch, engine.speculator.model, "compute_logits", lambda logits, *_: logits.cpu()
    )
    target = load_target(TARGET, "fp32", torch.device("cpu"))
    model = FILES.load(folder)
    model.share_head(target.get_output_embeddings().weight)
    ours = note_calls(monkeypatch, model, "logits", lambda logits, *_: logits)
    drafter = DFlashDrafter(
        model, target.get_input_embeddings(), DFlashConfig(), 12, MAX_LEN, layers=(0, 1, 2, 3)
    )
    table, steps = own_caches(drafter, MAX_LEN, PAGE), 0
    for prompt in PROMPTS[:4]:
        drafts.clear()
        theirs.clear()
        ((answer,),) = engine.generate([prompt], params(1, max_tokens=24))
        text = torch.tensor([*prompt, *answer.tokens])
        hidden = target(text[None], output_hidden_states=True).hidden_states
        states = torch.stack([hidden[layer] for layer in model.config.layer_ids])
        trees = along_a_chain(drafter, prompt, answer.tokens, drafts, states, table, PAGE)
        assert len(theirs) == len(drafts)
        for logits, _ in zip(theirs, trees):
            torch.testing.assert_close(ours[-1][0], logits, atol=1e-3, rtol=0)
            steps += 1
    assert steps > 60


@pytest.mark.parametrize("kind", OF_KIND)
def test_what_is_asked_of_the_target(kind, tmp_path):
    raw = OF_KIND[kind]
    folder = dflash.write(tmp_path / "drafter", dflash.make_model(raw), raw)
    config = configure({"model": str(folder), "depth": 3})
    draft = config.speculative_config.draft_model_config.hf_config
    assert draft.eagle_aux_hidden_state_layer_ids == [1, 3, 5, 6]
    plan = config.speculative_config.specblock
    assert plan.drafters[0].kind == kind and plan.drafters[0].options.depth == 3
    with pytest.raises(OptionError, match=f"of a drafter of kind '{kind}'"):
        configure({"model": str(folder), "top_k": 3})
    other = next(each for each in OF_KIND if each != kind)
    with pytest.raises(OptionError, match=f"holds a drafter of kind '{kind}'"):
        configure({"model": str(folder), "kind": other})
    with pytest.raises(OptionError, match="adapt"):
        configure({"model": str(folder), "adapt": True})
