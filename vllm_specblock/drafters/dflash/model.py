"""The DFlash network: Qwen3 layers over blocks of masks (arXiv 2602.06036).

The target's states enter only as keys and values of every layer, by the block's own projections.
Parameter names are those of the authors' checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from vllm_specblock.drafters.common.checkpoint_files import (
    CheckpointReader,
    Tensors,
    own_tables,
    with_d2t,
)
from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.drafters.common.layers import Attend, DecoderLayer, DraftLM, RMSNorm
from vllm_specblock.drafters.common.rope import Rotary, rewritten
from vllm_specblock.drafters.dflash.block_layers import (
    CandidateSelector,
    ConvLayer,
    MarkovHead,
    pair_logprobs,
)
from vllm_specblock.drafters.dflash.config import DFlashShape, from_json
from vllm_specblock.triton_kernels.layers.topk_tokens import topk_tokens

_UNUSED = ("t2d", "confidence_head.")
"""The mapping's other direction, and a head that predicts acceptance, which we measure."""

_MASK = "mask_embedding.pt"  # another embedding of masks, which vLLM's loader reads


class DFlashModel(DraftLM):
    """Feature fusion, the layers, and an embedding and an LM head only if the checkpoint has them.

    Without them it uses the target's embedding, and wants the target's LM head by `share_head`.
    """

    def __init__(
        self, shape: DFlashShape, own_embedding: bool = False, own_head: bool = False
    ) -> None:
        super().__init__()
        self.config, self.logit_scale = shape, shape.logit_scale
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.make_tables(shape, own_embedding, own_head)
        self.fc = nn.Linear(len(shape.layer_ids) * shape.target_hidden_size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        kind = ConvLayer if shape.selector_rank else DecoderLayer
        self.layers = nn.ModuleList(kind(shape) for _ in range(shape.num_hidden_layers))
        self.markov_head = MarkovHead(shape) if shape.markov_rank else None
        self.candidate_selector = CandidateSelector(shape) if shape.selector_rank else None
        self.norm = RMSNorm(size, eps)
        self.rotary = Rotary(shape, shape.rotary_dim)

    def context(self, features: Tensor, position: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each layer's keys, with their RoPE, and values of committed tokens.

        features [T, n·Ht], the target's states side by side, low layers first; position [T] int64
        -> [T, kv heads, D] each.
        """
        fused = self.hidden_norm(self.fc(features.to(self.dtype)))
        rope = self.rotary(position, self.dtype)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer.self_attn.key_value(fused, rope)

    def forward(self, embedding: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """Run the layers over blocks: embedding [n, H] of roots and masks, position [..., S] int64.

        Returns:
            [n, H], after the last layer.
        """
        rope, state = self.rotary(position.flatten(), self.dtype), embedding.to(self.dtype)
        if self.config.input_embedding_scale != 1:
            state = state * self.config.input_embedding_scale
        if self.config.selector_rank:
            state = state.unflatten(0, (-1, position.shape[-1]))
        for index, layer in enumerate(self.layers):
            state = layer(index, state, rope, attend)
        return state.flatten(0, -2)

    def choices(
        self, state: Tensor, root: Tensor, width: int, beta: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the `width` likeliest tokens of K positions, for `PathTrees`.

        state [R, K, H], root [R] int64, beta [R] float32 (None: 1, see `feedback/calibration.py`)
        -> log-probabilities over the draft vocabulary [R, K, width] float32, best first, or with a
        head for pairs [R, K, width, width]; and target ids [R, K, width] int64.
        """
        head = self.markov_head or self.candidate_selector
        if head is None:
            return self.best(state, width, beta)
        normed, cap, scale = self.norm(state), self.config.final_logit_softcapping, self.logit_scale
        logits = self.lm_head(normed)
        if cap:  # as vLLM, which scales first here
            logits, scale = cap * torch.tanh(logits * scale / cap), 1.0
        logprob, draft = topk_tokens(logits, None, width, scale, beta)
        token = draft + self.d2t[draft]
        before = torch.cat([root[:, None, None].expand(-1, 1, width), token[:, :-1]], 1)
        return pair_logprobs(logprob, head(before, draft, normed), beta), token


def _named(found: Tensors, config: DFlashShape, directory: Path) -> Tensors:
    if (directory / _MASK).is_file():
        raise CheckpointError(
            f"{directory} holds {_MASK}, which is not supported: use another one."
        )
    names = {name: name.removeprefix("model.") for name in found}
    stored = {new: found[name] for name, new in names.items() if not new.startswith(_UNUSED)}
    return with_d2t(stored, found, config, directory)


FILES = CheckpointReader(
    from_json,
    lambda config, names: DFlashModel(config, *own_tables(config, names)),
    _named,
    rewritten,
)
"""Reads checkpoints, which may lack an embedding and an LM head."""
