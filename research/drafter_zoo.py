"""Drafters of the controlled comparison: SpecBlock, its ablations, and the baselines.

All start from the target's LM head where their widths allow it, share the draft vocabulary, and
come as close to SpecBlock's parameter count as their sizes allow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from baselines.eagle3 import Eagle3
from baselines.falcon import Falcon
from baselines.mask_blocks import DFlash, JetSpec
from baselines.medusa import Medusa
from baselines.parallelspec import ParallelSpec
from baselines.sps import SmallModel
from transformers import AutoConfig

from vllm_specblock.train.config import Recipe, TrainError
from vllm_specblock.train.learner import Learner
from vllm_specblock.train.run import RunContext, folded_head
from vllm_specblock.train.specblock import SpecBlockLearner
from vllm_specblock.train.target import target_rows
from vllm_specblock.train.untrained import init, most_frequent

ABLATIONS: dict[str, dict[str, Any]] = {
    "specblock": {},
    "− prefix broadcast": {"prefix_broadcast": False},
    "− layer-wise shift": {"layer_shift": False},
    "− valid-prefix mask": {"valid_prefix": False},
    "mask restarted": {"mask_restart": True},
    "rank_topk full": {"rank_topk": "full"},
    "RoPE along the path": {"block_rope": "path"},
}
"""Changes of each variant of SpecBlock: of Table 2, then of the choices that the paper leaves
open. The ablation of rank-guided branching is another tree of the first drafter."""

BASELINES = ("EAGLE-3", "DFlash", "JetSpec", "Medusa", "ParallelSpec", "Falcon", "SpS")
EVERYONE = (*ABLATIONS, *BASELINES)


class Footing:
    """The target, and the settings that all drafters share; config: a `Comparison`."""

    def __init__(self, config: Any, run_context: RunContext) -> None:
        self.target, self.seed, self.budget = config.target, config.seed, config.nodes
        self.config = AutoConfig.from_pretrained(config.target)
        self.counts, self.layer_ids = run_context.counts, run_context.target.layer_ids
        size = min(config.draft_vocab_size, run_context.target.vocab_size)
        self.d2t, self.t2d = most_frequent(self.counts, size)
        # [Vd, Ht] fp32: the target's LM head, and with its final norm in it.
        self.head = target_rows.head_rows(config.target, self.t2d.nonzero()[:, 0]).float()
        self.folded = folded_head(config.target, self.t2d)
        recipe = config.model_dump(include={"num_blocks", "rank_from", "loss_floor"})
        self.recipe = Recipe(**recipe)
        width = config.intermediate_size  # of SpecBlock
        self.sizes = {"intermediate_size": width} if width else {}


def make(name: str, footing: Footing) -> Learner:
    """The drafter called `name`, untrained."""
    if name in ABLATIONS:
        return _specblock(footing, **ABLATIONS[name])
    if name not in BASELINES:
        raise TrainError(f"No drafter is called {name!r}; there are {', '.join(EVERYONE)}.")
    wanted = parameters(_specblock(footing))
    if name == "SpS":
        return _small_model(footing, wanted)
    of_target = footing.config, footing.d2t, footing.t2d, footing.seed
    head, folded, budget = footing.head, footing.folded, {"budget": footing.budget}
    if name == "Medusa":
        # Its heads have no width of their own, so their depth is matched.
        build = partial(Medusa.for_target, *of_target, head, **budget)
        return _matched(wanted, lambda depth: build(num_layers=depth), step=1)
    # The rarest token stands for masks.
    masks = budget | {"mask_token_id": int(footing.counts.argmin())}
    kind, given, options = {
        "EAGLE-3": (Eagle3, folded, {}),
        "ParallelSpec": (ParallelSpec, folded, budget),
        "Falcon": (Falcon, folded, budget),
        "DFlash": (DFlash, head, masks),
        "JetSpec": (JetSpec, head, masks),
    }[name]
    options |= {"layer_ids": footing.layer_ids}
    build = partial(kind.for_target, *of_target, given, **options)
    learner = _matched(wanted, lambda width: build(intermediate_size=width))
    if isinstance(learner, DFlash):
        learner.norm.weight.data.copy_(target_rows.final_norm(footing.target))
    return learner


def _small_model(footing: Footing, wanted: int) -> SmallModel:
    """Two thirds as wide as the target and half as deep, with whole heads of 32 or more.

    Narrower where the embedding, which is the whole vocabulary's, leaves too little for the layers:
    their MLPs are to be as wide as the model at least.
    """
    config = footing.config
    head_dim = max(32, config.hidden_size // config.num_attention_heads)
    widest = max(1, round(2 / 3 * config.hidden_size / head_dim))
    for heads in range(widest, 0, -1):
        build = partial(
            SmallModel.for_target,
            *(config, footing.t2d, footing.seed),
            hidden_size=heads * head_dim,
            num_hidden_layers=max(2, config.num_hidden_layers // 2),
            num_attention_heads=heads,
            num_key_value_heads=heads,
        )
        found = _matched(wanted, lambda width, build=build: build(intermediate_size=width))
        if found.llama.config.intermediate_size >= heads * head_dim:
            break
    return found


def parameters(learner: Learner) -> int:
    return sum(weight.numel() for weight in learner.parameters())


def _matched(wanted: int, make: Callable[[int], Any], step: int = 16) -> Any:
    """`make(size)` of the size, a multiple of `step`, whose parameters are nearest to `wanted`."""
    one, two = (parameters(make(times * step)) for times in (1, 2))
    best = max(1, round(1 + (wanted - one) / (two - one)))  # parameters grow linearly
    return make(best * step)


def _specblock(footing: Footing, **changes: Any) -> SpecBlockLearner:
    of_recipe = {k: v for k, v in changes.items() if k in Recipe.model_fields}
    choices = {k: v for k, v in changes.items() if k not in of_recipe}
    drafter = init(
        footing.target,
        draft_vocab_size=len(footing.d2t),
        layer_ids=footing.layer_ids,
        token_counts=footing.counts,
        seed=footing.seed,
        **footing.sizes,
        **choices,
    )
    with torch.no_grad():
        drafter.lm_head.weight.copy_(footing.folded)
    return SpecBlockLearner(drafter, footing.recipe.model_copy(update=of_recipe))
