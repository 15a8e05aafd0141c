"""One engine on a tiny random model: what it generates, or how it fails."""

from __future__ import annotations

import json
import math
import random
import re
import sys
import traceback
import zlib
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import gated_delta_net
import torch
from families import ROPE, VOCAB, Family
from torch import Tensor

NODES, TOKENS = 12, 48
NGRAM = {"kind": "ngram"}
MODES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "alone": None,
    "trees": NGRAM,
    "drafter": {"second_drafter": NGRAM, "draft_policy": "merge"},
}
"""Engine → what it drafts with; "alone" has one request after the other."""


def generate(family: Family, folder: Path, mode: str) -> dict[str, Any]:
    """Serve greedy and seeded requests with one engine.

    Returns:
        `tokens`, counts of an engine that drafts, and of "trees" `control`: tokens from trees
        whose mask is a chain's. Or `refused`, a sentence before weights are loaded. Or `error`.
    """
    from vllm_specblock.config import OptionError

    loaded: list[str] = []
    try:
        _prepare(family, loaded)
        return _serve(family, folder, mode)
    except BaseException as error:
        traceback.print_exc()
        text = str(error).replace(str(folder), "…")
        if isinstance(error, OptionError) and not loaded:
            return {"refused": text}
        return {"error": f"{type(error).__name__}: {text}"}


def _serve(family: Family, folder: Path, mode: str) -> dict[str, Any]:
    from support.engines import make_engine
    from vllm import SamplingParams

    drafts = MODES[mode]
    if drafts is not None:
        drafter = str(_untrained_drafter(folder)) if mode == "drafter" else None
        drafts = {"num_speculative_tokens": NODES, "model": drafter, **drafts}
    # For recurrent layers it runs kernels that copy states, which are interpreted here.
    caching = {"enable_prefix_caching": False} if drafts is None else {}
    engine = make_engine(
        drafts,
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256,
        kv_cache_memory_bytes=48 << 20,
        **caching,
        **family.engine,
    )
    prompts = repetitive_prompts(11, (40, 7), (75, 11), (21, 5))
    common = {"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(temperature=0.0, **common) for _ in prompts]
    params += [SamplingParams(temperature=0.8, seed=i, **common) for i, _ in enumerate(prompts)]
    requests = list(zip(prompts * 2, params, strict=True))
    batches = [[each] for each in requests] if mode == "alone" else [requests]

    def serve() -> list[list[int]]:
        answers = [each for batch in batches for each in engine.generate(*zip(*batch))]
        return [answer.tokens for (answer,) in answers]

    result = {"tokens": serve()}
    if drafts is None:
        return result
    counts = engine.metrics
    result |= {
        "accepted": int(counts["vllm:spec_decode_num_accepted_tokens"]),
        "drafted": int(counts["vllm:spec_decode_num_draft_tokens"]),
    }
    if mode == "trees":
        _see_chains()
        result["control"] = serve()
    return result


def repetitive_prompts(seed: int, *sizes: tuple[int, int]) -> list[list[int]]:
    """Prompts of (length, words), in which n-grams return with different tokens after them."""
    draw, made = random.Random(seed), []
    for length, words in sizes:
        book = [[draw.randrange(5, VOCAB) for _ in range(3)] for _ in range(words)]
        made.append([token for _ in range(length) for token in draw.choice(book)][:length])
    return made


# ---- changes of this process ----


def _prepare(family: Family, loaded: list[str]) -> None:
    """Make vLLM load random weights, configs without their code and models without torchvision."""
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.model_executor.models import registry
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    def load_weights(self, model, model_config) -> None:
        loaded.append(type(model).__name__)
        draw_weights(model, family.mix)

    DummyModelLoader.load_weights = load_weights
    gated_delta_net.install()
    # vLLM inspects a class in a new process, which imports everything again.
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: (
        registry._ModelInfo.from_model_cls(self.load_model_cls())
    )
    kind = family.config["model_type"]
    if kind not in CONFIG_MAPPING and kind not in _CONFIG_REGISTRY:
        AutoConfig.register(kind, type("Config", (PretrainedConfig,), {"model_type": kind}))
    # Image processors import it, and no torchvision of PyPI loads beside torch's CPU build.
    for part in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2"):
        _stand_in(f"torchvision{part}")
    _stand_in("torchvision.transforms.v2.functional")


def _stand_in(name: str) -> None:
    sys.modules.setdefault(name, MagicMock(__spec__=ModuleSpec(name, None), __version__="0.28.0"))


def _see_chains() -> None:
    """Let every node go on from the one before it: wrong wherever a tree branches."""
    from vllm_specblock.verify.recurrence import Paths
    from vllm_specblock.verify.tree_mask import TreeMask

    fill, init = TreeMask.fill, Paths.__init__

    def fill_as_chain(self, rows, depth, ancestors) -> None:
        fill(self, rows, depth, ancestors)
        node = rows.node.long()
        self.mask_words[rows.row, 0] = (torch.ones_like(node) << (node + 1)) - 1

    def init_as_chain(self, base, parent, num_rows) -> None:
        init(self, base, torch.arange(parent.shape[1]).expand_as(parent), num_rows)

    TreeMask.fill, Paths.__init__ = fill_as_chain, init_as_chain


def _untrained_drafter(folder: Path) -> Path:
    """A SpecBlock drafter of random weights for the model in `folder`."""
    from vllm_specblock.train import saving, untrained

    config = json.loads((folder / "config.json").read_text())
    sizes = {"num_hidden_layers": 3, "intermediate_size": 192}
    llama = {"model_type": "llama", "hidden_act": "silu", **sizes}
    shape = {**config.get("text_config", config), **llama, "rope_parameters": ROPE}
    like, drafter = folder / "like", folder / "drafter"
    like.mkdir()
    (like / "config.json").write_text(json.dumps(shape))
    made = untrained.init(like, layer_ids=(0, 1, 2), target_name=str(folder), qk_norm=False)
    saving.save(made, drafter)
    return drafter


# ---- random weights ----


HEAD = re.compile(r"lm_head|output_layer|embed_out|\boutput\.")


def draw_weights(model: torch.nn.Module, mix: float = 1.0) -> None:
    """Draw each weight by its name, so that every engine of a family has the same ones."""
    parameters = dict(model.named_parameters())
    tied = not any(HEAD.search(name) for name in parameters)
    buffers = {
        name: tensor
        for name, tensor in model.named_buffers()
        if re.search("bias|sink", name) and "scale" not in name
    }
    drawn = set()
    for name, tensor in {**parameters, **buffers}.items():
        if tensor.data_ptr() not in drawn and tensor.device.type != "meta":
            drawn.add(tensor.data_ptr())
            _draw(name, tensor.data, embedding=0.1 if tied else 1.0, mix=mix)


def _draw(name: str, tensor: Tensor, embedding: float, mix: float) -> None:
    if not tensor.is_floating_point():
        tensor.zero_()
        return
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    normal = torch.randn(tensor.shape, generator=generator)
    last = name.rsplit(".", 1)[-1]
    if last == "A":  # of Mamba, kept negative by vLLM
        value = -normal.abs() - 0.2
    elif "dt_bias" in name or "sink" in name:
        value = normal + 0.5
    elif "bias" in last:
        value = 0.1 * normal
    elif tensor.dim() <= 1:  # of a norm
        value = 1 + 0.1 * normal
    elif HEAD.search(name):
        value = 4 * normal / math.sqrt(tensor.shape[-1])  # logits far apart
    elif re.search("embed|wte", name):
        value = embedding * normal
    elif "conv" in name:
        value = 0.6 * normal
    else:
        leaves = re.search("o_proj|out_proj|down_proj|w2|dense", name)
        value = (mix if leaves else 1.0) * 1.3 * normal / math.sqrt(tensor.shape[-1])
    tensor.copy_(value)
