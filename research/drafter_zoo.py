"""Drafters of the controlled comparison: SpecBlock, its ablations, and the baselines.

All start from the target's LM head where their widths allow it, share the draft vocabulary, and
come as close to SpecBlock's parameter count as their sizes allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from baselines.eagle3 import Eagle3
from baselines.falcon import Falcon
from baselines.mask_blocks import DFlash, JetSpec
from baselines.medusa import Medusa
from baselines.parallelspec import ParallelSpec
from baselines.sps import SmallModel
from torch import Tensor

from vllm_specblock.train.config import Recipe, TrainError
from vllm_specblock.train.learner import Learner
from vllm_specblock.train.specblock import SpecBlockLearner
from vllm_specblock.train.target import target_rows
from vllm_specblock.train.untrained import init

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


@dataclass(frozen=True)
class RunContext:
    """The target, and the settings that all drafters share."""

    target: Any  # its folder
    config: Any  # of transformers
    d2t: Tensor  # [Vd] int64
    t2d: Tensor  # [V] bool
    counts: Tensor  # [V] int64, of tokens
    head: Tensor  # [Vd, Ht] fp32, the target's LM head
    folded: Tensor  # with its final norm in it
    layer_ids: tuple[int, int, int]
    recipe: Recipe  # SpecBlock's
    budget: int  # N, nodes of each tree
    seed: int
    sizes: dict[str, Any] = field(default_factory=dict)  # of SpecBlock, for `untrained.init`


def make(name: str, run_context: RunContext) -> Learner:
    """The drafter called `name`, untrained."""
    if name in ABLATIONS:
        return _specblock(run_context, **ABLATIONS[name])
    if name not in BASELINES:
        raise TrainError(f"No drafter is called {name!r}; there are {', '.join(EVERYONE)}.")
    wanted = parameters(_specblock(run_context))
    if name == "SpS":
        return _small_model(run_context, wanted)
    of_target = run_context.config, run_context.d2t, run_context.t2d, run_context.seed
    head, folded, budget = run_context.head, run_context.folded, {"budget": run_context.budget}
    if name == "Medusa":
        # Its heads have no width of their own, so their depth is matched.
        build = partial(Medusa.for_target, *of_target, head, **budget)
        return _matched(wanted, lambda depth: build(num_layers=depth), step=1)
    # The rarest token stands for masks.
    masks = budget | {"mask_token_id": int(run_context.counts.argmin())}
    kind, given, options = {
        "EAGLE-3": (Eagle3, folded, {}),
        "ParallelSpec": (ParallelSpec, folded, budget),
        "Falcon": (Falcon, folded, budget),
        "DFlash": (DFlash, head, masks),
        "JetSpec": (JetSpec, head, masks),
    }[name]
    options |= {"layer_ids": run_context.layer_ids}
    build = partial(kind.for_target, *of_target, given, **options)
    learner = _matched(wanted, lambda width: build(intermediate_size=width))
    if isinstance(learner, DFlash):
        learner.norm.weight.data.copy_(target_rows.final_norm(run_context.target))
    return learner


def _small_model(run_context: RunContext, wanted: int) -> SmallModel:
    """Two thirds as wide as the target and half as deep, with whole heads of 32 or more.

    Narrower where the embedding, which is the whole vocabulary's, leaves too little for the layers:
    their MLPs are to be as wide as the model at least.
    """
    config = run_context.config
    head_dim = max(32, config.hidden_size // config.num_attention_heads)
    widest = max(1, round(2 / 3 * config.hidden_size / head_dim))
    for heads in range(widest, 0, -1):
        build = partial(
            SmallModel.for_target,
            *(config, run_context.t2d, run_context.seed),
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


def _specblock(run_context: RunContext, **changes: Any) -> SpecBlockLearner:
    of_recipe = {k: v for k, v in changes.items() if k in Recipe.model_fields}
    choices = {k: v for k, v in changes.items() if k not in of_recipe}
    drafter = init(
        run_context.target,
        draft_vocab_size=len(run_context.d2t),
        layer_ids=run_context.layer_ids,
        token_counts=run_context.counts,
        seed=run_context.seed,
        **run_context.sizes,
        **choices,
    )
    with torch.no_grad():
        drafter.lm_head.weight.copy_(run_context.folded)
    return SpecBlockLearner(drafter, run_context.recipe.model_copy(update=of_recipe))
