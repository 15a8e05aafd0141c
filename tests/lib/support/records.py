"""A drafter of few numbers, and records of random requests for it."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.learning.train_batches import RecordTeacher
from vllm_specblock.drafters.specblock.config import DrafterConfig, TargetInfo
from vllm_specblock.drafters.specblock.model import SpecBlockModel

HIDDEN, VOCAB, DRAFT_VOCAB = 32, 20, 14
NAMED = torch.tensor([0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 15, 17, 19])
"""Target ids of the draft vocabulary."""
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "target_hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}


def small_drafter(seed: int = 3, vocab: int = VOCAB, **changes: Any) -> SpecBlockModel:
    """K = 4, two layers; with another vocabulary every token can be named."""
    torch.manual_seed(seed)
    sizes = {
        "num_hidden_layers": 2,
        "block_size": 4,
        "vocab_size": vocab,
        "draft_vocab_size": DRAFT_VOCAB if vocab == VOCAB else vocab,
        "rank_topk": 10,
        "target": TargetInfo(hidden_size=HIDDEN, vocab_size=vocab, layer_ids=(2, 3, 4)),
    }
    config = DrafterConfig(**(SIZES | sizes | changes))
    drafter = SpecBlockModel(config)
    if vocab == VOCAB:
        drafter.t2d.zero_()[NAMED] = True
        drafter.d2t.copy_(NAMED - torch.arange(DRAFT_VOCAB))
    return drafter


def small_teacher() -> RecordTeacher:
    draw = torch.Generator().manual_seed(0)
    head = torch.randn(DRAFT_VOCAB, HIDDEN, generator=draw)
    return RecordTeacher(torch.randn(VOCAB, HIDDEN, generator=draw), head)


def random_record(request: str, rows: int = 12, prompt: int = 4, seed: int | None = None) -> Record:
    """`prompt` rows of context, then labels."""
    draw = torch.Generator().manual_seed(len(request) if seed is None else seed)
    return Record(
        request,
        torch.randn(rows, 3 * HIDDEN, generator=draw),
        torch.randn(rows, HIDDEN, generator=draw),
        torch.randint(VOCAB, (rows,), generator=draw),
        torch.arange(rows) >= prompt,
        (rows - prompt) / 3,
    )
