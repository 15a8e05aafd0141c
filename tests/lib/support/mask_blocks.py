"""Drafters over blocks of masks on a paged cache, and the trees of plainly computed blocks."""

from __future__ import annotations

from typing import Any

import torch
from support.dflash import JETSPEC, PUBLISHED, make_model, plain_logits
from torch import Tensor

from vllm_specblock.drafters.common.linear import process_after_loading
from vllm_specblock.drafters.dflash.drafter import DFlashDrafter
from vllm_specblock.drafters.options import DFlashConfig

H, V, PAGE, MAX_LEN, NODES = 32, 64, 8, 64, 20
TABLES = torch.tensor([[3, 7, 1, 12, 5, 6, 9, 10], [4, 2, 8, 11, 13, 14, 15, 16]])
KINDS: dict[str, dict[str, Any]] = {"dflash": PUBLISHED, "jetspec": JETSPEC}
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
    model.share_head(head)
    process_after_loading(model, options.get("quantization"))
    drafter = DFlashDrafter(
        model, lambda ids: embedding[ids], DFlashConfig(**options), nodes, MAX_LEN, lookahead
    )
    assert drafter.kind == kind
    return drafter


def made_up(requests: int) -> tuple[Tensor, Tensor]:
    """States [3, R, n, H] of three layers, and texts [R, n + 1]."""
    draw = torch.Generator().manual_seed(2)
    states = torch.randn(3, requests, MAX_LEN, H, generator=draw)
    return states, torch.randint(0, V, (requests, MAX_LEN + 1), generator=draw)


def plain_logprobs(
    kind: str, states: Tensor, text: Tensor, end: int, masks: int, beta: float = 1.0
) -> Tensor:
    """[masks, V], what each mask says behind the root text[end]; states [3, n, H], text [n]."""
    embedding, head = tables_of_target()
    model = make_model(KINDS[kind])
    model.share_head(head)
    features = states.transpose(0, 1).flatten(1)[:end]
    block = embedding[torch.tensor([int(text[end]), *[model.config.mask_token_id] * masks])]
    return (beta * plain_logits(model, features, block)[1:]).log_softmax(-1)
