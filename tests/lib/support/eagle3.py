"""A small EAGLE-3 drafter, and how one drafts along a text without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support import records
from support.trees import best_paths
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from vllm_specblock.triton_kernels.drafting.expand import TreeShape

from vllm_specblock.drafters.eagle3.config import Eagle3Shape
from vllm_specblock.drafters.eagle3.model import Eagle3Model

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
}
"""Of a decoder layer's config.json."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def small_eagle3(own_embedding: bool = False, **changes: Any) -> Eagle3Model:
    """Random weights; `changes` of its shape."""
    torch.manual_seed(0)
    sizes = records.SIZES | {"vocab_size": 64, "draft_vocab_size": 40, "rms_norm_eps": 1e-5}
    shape = Eagle3Shape(**sizes | changes)
    drafter = Eagle3Model(shape, own_embedding).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(std=0.25)
        named = torch.randperm(shape.vocab_size)[: shape.draft_vocab_size].sort().values
        drafter.d2t.copy_(named - torch.arange(len(named)))
    return drafter


def speculators_json(layer: dict[str, Any], target: object = "org/target", **keys: Any) -> dict:
    """A config.json in the speculators layout: a decoder layer's, 3 tokens, and other `keys`."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "speculators_config": {
            "proposal_methods": [{"speculative_tokens": 3}],
            "verifier": {"name_or_path": str(target)},
        },
        **keys,
    }


@dataclass
class PlainEagle3:
    """Every state is computed from the whole path before it, row by row.

    features: [≥ end, 3·Ht] of the committed text; text: [> end], the root is text[end].
    """

    drafter: Eagle3Model
    embed: Callable[..., Tensor]
    features: Tensor
    text: Tensor
    end: int

    def state(self, path: Sequence[int]) -> Tensor:
        """[H], after the committed text and `path`."""
        drafter, end = self.drafter, self.end
        seen: list[list[tuple[Tensor, Tensor]]] = [
            [] for _ in range(drafter.config.num_hidden_layers)
        ]

        def attend(layer, query, key, value):
            seen[layer].append((key[0], value[0]))
            window = drafter.config.layer_windows[layer] or len(seen[layer])
            keys, values = (torch.stack(each, 1)[None] for each in zip(*seen[layer][-window:]))
            mixed = scaled_dot_product_attention(query[..., None, :], keys, values, enable_gqa=True)
            return mixed[..., 0, :]

        def row(token, feature, position):
            at = torch.tensor([position])
            return drafter.run(self.embed(token)[None], feature[None], at, attend)[0]

        for t in range(end):
            state = row(self.text[t + 1], drafter.fuse(self.features[t]), t)
        for step, token in enumerate(path):
            masked = token == drafter.config.mask_token_id
            feature = drafter.fuse(drafter.mask_hidden) if masked else drafter.carry(state)
            state = row(token, feature, end + step)
        return state

    def logprobs(self, path: Sequence[int], beta: float) -> dict[int, float]:
        """Target id -> log-probability behind `path`."""
        logits = self.drafter.logit_scale * self.drafter.logits(self.state(path))
        target = torch.arange(len(self.drafter.d2t)) + self.drafter.d2t
        return dict(zip(target.tolist(), (beta * logits).log_softmax(-1).tolist()))

    def block(self, depth: int, nodes: int, beta: float) -> dict[tuple[int, ...], float]:
        """Path -> score of P-EAGLE's tree: behind any path are as many masks."""
        mask = self.drafter.config.mask_token_id
        rows = [self.logprobs([mask] * k, beta) for k in range(depth)]
        return best_paths(lambda path: rows[len(path)], depth, nodes)

    def tree(self, shape: TreeShape, slots: int, beta: float) -> dict[tuple[int, ...], float]:
        """Path -> score. A row of a later level needs one of the `slots` behind the text."""

        def children(path, score):
            found = sorted(self.logprobs(path, beta).items(), key=lambda node: -node[1])
            return {(*path, token): score + each for token, each in found[: shape.width]}

        level = children((), 0.0)
        found = dict(level)
        for done in range(shape.num_blocks - 1):
            best = sorted(level.items(), key=lambda node: -node[1])[: shape.num_starts]
            level = {}
            for place, (path, score) in enumerate(best):
                if done * shape.num_starts + place < slots:
                    level |= children(path, score)
            found |= level
        return dict(sorted(found.items(), key=lambda node: -node[1])[: shape.budget])
