"""Imposed acceptance in our engines, for benchmarks on random weights.

A drafter drafts at full cost, and its tree is replaced by the one that the imposed probabilities α
grow. A child is accepted with exactly the probability that the tree gives it. The target's sampler
draws the bonus token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates
from vllm_specblock.triton_kernels.verify.accept_path import DrawnRows

from lib.acceptance import synthetic_tree
from vllm_specblock.engine.runner import speculator
from vllm_specblock.engine.runner.model_state import TreeModelState
from vllm_specblock.engine.runner.sampler import TreeSampler
from vllm_specblock.tree import DraftTree
from vllm_specblock.verify.accept_path import accept_path_rows

_DRAWS = 1 << 17
_SEED_FACTOR = 0x9E3779B1
"""Odd: seeds one apart read far from each other."""


def impose(rates: Sequence[float]) -> None:
    """Impose vLLM's `synthetic_acceptance_rates` on our engines that this process makes: entry i is
    the probability that the best candidates down to depth i + 1 are all accepted."""
    best = unconditional_to_conditional_rates(list(rates))
    load, custom_sampler = speculator.load_drafters, TreeModelState.custom_sampler

    def load_drafters(config: Any, resolved: Any, target: Any, device: torch.device) -> list:
        (drafter,) = load(config, resolved, target, device)
        drafter.calibration = None  # its own scores do not count
        drafter.draft = imposed_draft(drafter.draft, synthetic_tree(drafter.shape, best), device)
        return [drafter]

    def imposed_sampler(self: TreeModelState, sampler: Any) -> tuple[Any, Any]:
        found, verifier = custom_sampler(self, sampler)
        verifier.__class__ = ImposedSampler
        device = sampler.sampling_states.seeds.gpu.device
        verifier.draws = torch.rand(_DRAWS, generator=torch.Generator().manual_seed(0)).to(device)
        return found, verifier

    speculator.load_drafters = load_drafters
    TreeModelState.custom_sampler = imposed_sampler


def imposed_draft(draft: Callable[..., DraftTree], tree: DraftTree, device: torch.device) -> Any:
    """Return a `draft` of the same cost whose trees keep their tokens and are `tree` otherwise."""
    fields = [getattr(tree, name).to(device) for name in DraftTree.TENSORS]

    def imposed() -> DraftTree:
        token = draft().token
        tree = DraftTree(*(x.expand(len(token), *x.shape[1:]) for x in fields))
        return replace(tree, token=token)

    return imposed


class ImposedSampler(TreeSampler):
    """TreeSampler that accepts by the imposed probabilities.

    Attributes:
        draws: a fixed table, read by seed and position as the sampler's noise is: a request draws
            the same again however it is batched.
    """

    draws: Tensor

    def accept(self, rows: DrawnRows, pos: Tensor) -> tuple[Tensor, Tensor]:
        states, slots, first = self.tree_states, rows.req_idx.long(), rows.first_row.long()
        low, high = sibling_ranges(states.parent[slots], states.score[slots])
        seed, most = self.sampler.sampling_states.seeds.gpu, len(rows.drawn) - 1
        row = torch.arange(most + 1, device=pos.device)
        request = (torch.searchsorted(first, row, right=True) - 1).clamp(max=len(slots) - 1)
        slot = slots[request]
        node = (row - first[request] - 1).clamp(0, states.num_nodes - 1)
        above = first[request] + states.parent[slot, node].clamp(min=0)
        key = pos[above.clamp(max=most)] + seed[slot] * _SEED_FACTOR
        draw = self.draws[key & (_DRAWS - 1)]
        taken = (low[request, node] <= draw) & (draw < high[request, node])
        token = torch.where(rows.token < 0, rows.token, taken.to(rows.token.dtype))
        walked = rows._replace(token=token, drawn=torch.ones_like(rows.drawn))
        _, num_sampled = accept_path_rows(walked, states.trees)
        # Tokens of the path's nodes, and after the last of them what the target drew.
        path, ends = states.path[slots], num_sampled[:, None] - 1
        at = (first[:-1, None] + path).clamp(max=most)
        place = torch.arange(path.shape[1], device=path.device)
        output = torch.where(place < ends, rows.token[at].roll(-1, 1), rows.drawn[at])
        return torch.where(place <= ends, output, 0), num_sampled


def sibling_ranges(parent: Tensor, logprob: Tensor) -> tuple[Tensor, Tensor]:
    """Lay siblings side by side in 0 … 1 by their probabilities.

    parent [R, N] int, logprob [R, N] fp32 of paths -> low and high [R, N]: a node is taken when
    its parent draws a number in [low, high).
    """
    used, parent = parent >= 0, parent.clamp(min=0).long()
    above = pad(logprob, (1, 0)).gather(1, parent)
    # −inf − −inf is NaN: a node that is not in use has no share.
    share = torch.where(used, (logprob - above).exp(), 0)  # [R, N]
    siblings = (parent[:, :, None] == parent[:, None]).float().tril(-1)
    low = (siblings * share[:, None]).sum(-1)
    return low, low + share
