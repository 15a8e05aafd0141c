"""Drafters over blocks of masks on a paged cache, and the trees of plainly computed blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support import dflash
from support.dflash import make_model, plain_states
from torch import Tensor

from vllm_specblock.drafters.common.linear import process_after_loading
from vllm_specblock.drafters.dflash.drafter import DFlashDrafter
from vllm_specblock.drafters.options import DFlashConfig
from vllm_specblock.drafters.registry import DRAFTERS

H, V, PAGE, MAX_LEN, NODES = 32, 64, 8, 64, 20
TABLES = torch.tensor([[3, 7, 1, 12, 5, 6, 9, 10], [4, 2, 8, 11, 13, 14, 15, 16]])
KINDS: dict[str, dict[str, Any]] = {
    "dflash": dflash.PUBLISHED,
    "jetspec": dflash.JETSPEC,
    "dflash2": dflash.DFLASH2,
    "dspark": dflash.DSPARK,
    "windows": dflash.WINDOWS,
    "windows, speculators": dflash.speculators("dflash", dflash.WINDOWED),
    "both ways": dflash.speculators("dflash", dflash.WINDOWED, sliding_window_non_causal=True),
}
"""The config.json of each."""


def masks_of(kind: str) -> int:
    """Of a block."""
    return KINDS[kind]["block_size"] - 1


def tables_of_target() -> tuple[Tensor, Tensor]:
    """Embedding and LM head [V, H] each."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(V, H, generator=draw), torch.randn(V, H, generator=draw)


def make_drafter(
    kind: str, nodes: int = NODES, lookahead: int | None = None, **options
) -> DFlashDrafter:
    """A drafter without caches."""
    embedding, head = tables_of_target()
    model = make_model(KINDS[kind])
    if model.wants_head:
        model.share_head(head)
    process_after_loading(model, options.get("quantization"))
    drafter = DFlashDrafter(
        model, lambda ids: embedding[ids], DFlashConfig(**options), nodes, MAX_LEN, lookahead
    )
    assert drafter.kind == (kind if kind in DRAFTERS else "dflash")
    return drafter


def made_up(requests: int) -> tuple[Tensor, Tensor]:
    """States [3, R, n, H] of three layers, and texts [R, n + 1]."""
    draw = torch.Generator().manual_seed(2)
    states = torch.randn(3, requests, MAX_LEN, H, generator=draw)
    return states, torch.randint(0, V, (requests, MAX_LEN + 1), generator=draw)


def plain_logprobs(
    drafter: DFlashDrafter, states: Tensor, text: Tensor, end: int, drafted: int, beta: float = 1.0
) -> Callable[[int, int], dict[int, float]]:
    """Log-probability of each token of the first `drafted` behind the root text[end].

    It is asked by place and the token before; states [3, n, H], text [n].
    """
    model, config = drafter.model, drafter.model.config
    features = states.transpose(0, 1).flatten(1)[:end]
    masks = [config.mask_token_id] * (drafted - config.from_root)
    block = drafter.embed(torch.tensor([int(text[end]), *masks]))
    normed = plain_states(model, features, block)[0 if config.from_root else 1 :]
    logits = config.logit_scale * model.lm_head(normed)
    if cap := config.final_logit_softcapping:
        logits = cap * torch.tanh(logits / cap)
    logits, target = beta * logits, torch.arange(len(model.d2t)) + model.d2t

    def choices(place: int, before: int) -> dict[int, float]:
        here = logits[place]
        if config.kind in ("dflash2", "dspark"):
            if markov := model.markov_head:
                left, scale = markov.markov_w1.weight[before], config.logit_scale
                right = markov.markov_w2.weight
            else:
                selector, scale = model.candidate_selector, 1.0
                left = selector.predecessor_codebook[before]
                left = left * selector.hidden_projection(normed[place])
                right = selector.successor_codebook
            # Tokens beyond the likeliest are left as they are.
            asked = here.topk(min(config.selector_top_k, len(here))).indices
            gain = right @ left * beta * scale
            here = here.index_add(0, asked, gain[asked]).log_softmax(0)[asked]
            return dict(zip(target[asked].tolist(), here.tolist()))
        return dict(zip(target.tolist(), here.log_softmax(0).tolist()))

    return choices
