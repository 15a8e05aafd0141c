"""Drafters whose rows each carry a group of entries: sizes, weights, and attention in training.

An entry sees some entries of earlier rows (the prefix) and some of its own row's group, never
other rows' groups. Symbols: B windows, R rows, n entries per row, H hidden size, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from vllm_specblock.drafters.common.config import check_rope_scaling, default_layer_ids, layers_of
from vllm_specblock.drafters.specblock.config import TargetInfo
from vllm_specblock.train.attention import sdpa

KeyValue = tuple[Tensor, Tensor]
Shape, Made = TypeVar("Shape", bound=BaseModel), TypeVar("Made")

_ROWS_AT_ONCE = 32
"""Rows that attend together: of their own entries they compute those of each other in vain."""


def sizes_like(
    target_config: Any,
    draft_vocab_size: int,
    block_size: int,
    layer_ids: tuple[int, int, int] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Return keys of a DrafterConfig whose layers are like the target's.

    Args:
        target_config: transformers config of a Llama- or Qwen3-like target.
        block_size: entries per row.
        layer_ids: of the target's features; None: the usual ones.
        changes: other keys, such as `intermediate_size` and `num_hidden_layers`.
    """
    raw = target_config.to_dict()
    size, vocab_size = raw["hidden_size"], raw["vocab_size"]
    like = ("num_attention_heads", "intermediate_size", "rms_norm_eps")
    return {
        "hidden_size": size,
        "target_hidden_size": size,
        **{name: raw[name] for name in like},
        **layers_of(raw),
        "num_hidden_layers": 2,
        "block_size": block_size,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "qk_norm": raw["model_type"] == "qwen3",
        "target": TargetInfo(hidden_size=size, vocab_size=vocab_size, layer_ids=layer_ids),
        **changes,
    }


def shape_like(
    kind: type[Shape], target_config: Any, draft_vocab_size: int, **changes: Any
) -> Shape:
    """Return a published kind's shape, of layers like the target's; changes: see `sizes_like`."""
    like = sizes_like(target_config, draft_vocab_size, 1, **changes)
    check_rope_scaling(like["rope_scaling"])  # YaRN's factor goes into weights that are loaded
    layers = like["target"].layer_ids or default_layer_ids(target_config.num_hidden_layers)
    fields = {key: value for key, value in like.items() if key in kind.model_fields}
    return kind(**fields | {"layer_ids": layers})


def seeded(seed: int, make: Callable[[], Made]) -> Made:
    """Call `make` with a seed; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def draw_weights(network: nn.Module, std: float | None = None) -> None:
    """First weights of matrices, from the global generator; None: outputs of unit size."""
    for weight in network.parameters():
        if weight.dim() == 2:  # the others are norms
            nn.init.normal_(weight, std=std or weight.shape[1] ** -0.5)


def extend(kept: dict[int, KeyValue], layer: int, new: KeyValue) -> KeyValue:
    """Add a pass's entries to those of earlier passes [B, R, m, nkv, D]; returns the layer's."""
    if layer in kept:
        new = tuple(torch.cat(pair, 2) for pair in zip(kept[layer], new))
    kept[layer] = new
    return new


def group_attention(
    query: Tensor, prefix: KeyValue, own: KeyValue, sees: Tensor, inside: Tensor
) -> Tensor:
    """Attention of each row's group over the prefix and over its own entries, some rows at a time.

    Args:
        query: [B, R, n, nh, D].
        prefix: key and value, [B, P, nkv, D] each.
        own: key and value, [B, R, m, nkv, D] each.
        sees: [B, R, P] bool, whether the row's entries see the prefix's entry.
        inside: [n, m] bool, whether entry n sees own entry m; one at least.

    Returns:
        [B, R, n, nh, D].
    """
    mixed = []
    for window, groups in enumerate(query):
        for queries, seen, *mine in zip(
            *(
                x.split(_ROWS_AT_ONCE)
                for x in (groups, sees[window], own[0][window], own[1][window])
            )
        ):
            columns = seen.any(0).nonzero()[:, 0].tolist()
            span = slice(columns[0], columns[-1] + 1) if columns else slice(0, 0)
            key, value = (
                torch.cat([far[window, span], near.flatten(0, 1)])
                for far, near in zip(prefix, mine)
            )
            mask = _additive(seen[:, span], inside, queries.dtype)
            mixed.append(sdpa(queries.flatten(0, 1), key, value, mask))
    return torch.cat(mixed).view(query.shape)


def _additive(seen: Tensor, inside: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask of some rows' groups, for their scores: seen [r, P], inside [n, m] -> [r·n, P + r·m]."""
    rows, (queries, entries) = len(seen), inside.shape
    itself = torch.eye(rows, dtype=torch.bool, device=seen.device)
    near = (itself[:, None, :, None] & inside[:, None]).reshape(rows * queries, rows * entries)
    may = torch.cat([seen.repeat_interleave(queries, 0), near], 1)
    return torch.zeros(may.shape, dtype=dtype, device=may.device).masked_fill(~may, -math.inf)


def earlier_rows(document: Tensor, row: slice, stride: int = 1) -> Tensor:
    """Rows that are a multiple of `stride` before each of the rows `row`, in the same document.

    document [B, L] int64 -> [B, R, row.stop] bool.
    """
    column = torch.arange(row.stop, device=document.device)
    distance = column[row, None] - column
    same = document[:, row, None] == document[:, None, : row.stop]
    return same & (distance > 0) & (distance % stride == 0)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """query [B, Q, nh, D], key and value [B, T, nkv, D], mask [B, Q, T] bool -> [B, Q, nh, D]."""
    # Repeated by hand: fused kernels that take a mask know no groups.
    group = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
    return mixed.transpose(1, 2)
