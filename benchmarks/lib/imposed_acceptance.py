"""Imposed acceptance in our engines, for benchmarks on random weights.

A drafter drafts at full cost, and its tree is replaced by the one that the imposed probabilities α
grow. A child is then accepted with exactly the probability that the tree gives it. The target runs
and its sampler draws; what it draws at the end of the path is the bonus token.
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
from vllm_specblock.drafters.interface import CacheLayer, CommittedTokens, Drafter
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.engine.runner import speculator
from vllm_specblock.engine.runner.model_state import TreeModelState
from vllm_specblock.engine.runner.sampler import TreeSampler
from vllm_specblock.engine.runner.tree_states import TreeStates
from vllm_specblock.tree import DraftTree
from vllm_specblock.verify.accept_path import accept_path_rows

_DRAWS = 1 << 17
_SEED_FACTOR = 0x9E3779B1
"""Odd: seeds one apart read far from each other."""


def impose(rates: Sequence[float], put: Callable[[Any, str, Any], object] = setattr) -> None:
    """Impose acceptance on the engines of ours that this process makes from now on.

    Args:
        rates: as vLLM's `synthetic_acceptance_rates`; entry i is the probability that the best
            candidates down to depth i + 1 are all accepted.
        put: sets an attribute; a test's takes it back.
    """
    best = unconditional_to_conditional_rates(list(rates))
    load, custom_sampler = speculator.load_drafters, TreeModelState.custom_sampler

    def load_drafters(config: Any, resolved: Any, target: Any, device: torch.device) -> list:
        (drafter,) = load(config, resolved, target, device)
        return [ImposedDrafter(drafter, best, device)]

    def imposed_sampler(self: TreeModelState, sampler: Any) -> tuple[Any, Any]:
        found, verifier = custom_sampler(self, sampler)
        verifier.__class__ = ImposedSampler
        return found, verifier

    put(speculator, "load_drafters", load_drafters)
    put(speculator, "TreeStates", ImposedStates)
    put(TreeModelState, "custom_sampler", imposed_sampler)


class ImposedDrafter(Drafter):
    """A SpecBlock drafter that drafts, and whose tree is then another.

    Args:
        drafter: what drafts.
        best: α by depth, as `synthetic_tree`.
        device: of its trees.
    """

    def __init__(
        self, drafter: SpecBlockDrafter, best: Sequence[float], device: torch.device
    ) -> None:
        self.drafter, self.kind, self.model = drafter, drafter.kind, drafter.model
        self.num_nodes, self.max_depth = drafter.num_nodes, drafter.max_depth
        self.max_model_len = drafter.max_model_len
        tree = synthetic_tree(drafter.shape, best)
        self.tree = replace(tree, **{name: getattr(tree, name).to(device) for name in tree.TENSORS})

    def cache_layers(self) -> list[CacheLayer]:
        return self.drafter.cache_layers()

    def bind(self, caches: list[Tensor]) -> None:
        self.drafter.max_model_len = self.max_model_len
        self.drafter.bind(caches)

    def warm_up(self, block_table: Tensor, most_rows: int) -> None:
        self.drafter.warm_up(block_table, most_rows)

    def advance(self, rows: CommittedTokens) -> None:
        self.drafter.advance(rows)

    def draft(self, requests: Tensor | None = None) -> DraftTree:
        token = self.drafter.draft(requests).token
        fields = (getattr(self.tree, name) for name in DraftTree.TENSORS)
        tree = DraftTree(*(x.expand(len(token), *x.shape[1:]) for x in fields))
        return replace(tree, token=token)


class ImposedStates(TreeStates):
    """Tree states, and which children would be taken.

    Attributes:
        low, high: [S, N] fp32, a node is taken when its parent draws a number in [low, high).
        draws: a fixed table, read by seed and position as the sampler's noise is: a request draws
            the same again however it is batched.
    """

    def __init__(
        self, num_slots: int, num_nodes: int, max_depth: int, device: torch.device
    ) -> None:
        self.low, self.high = torch.zeros(2, num_slots, num_nodes, device=device)
        self.draws = torch.rand(_DRAWS, generator=torch.Generator().manual_seed(0)).to(device)
        super().__init__(num_slots, num_nodes, max_depth, device)

    def reset(self, req_idx: int | slice) -> None:
        super().reset(req_idx)
        self.low[req_idx] = self.high[req_idx] = 0

    def store(self, req_idx: Tensor, *given: Any) -> Tensor:
        """Store the trees, and lay siblings side by side in 0 … 1."""
        tokens = super().store(req_idx, *given)
        parent, logprob = self.parent[req_idx], self.score[req_idx]
        used, parent = parent >= 0, parent.clamp(min=0).long()
        above = pad(logprob, (1, 0)).gather(1, parent)
        # −inf − −inf is NaN: a node that is not in use has no share.
        share = torch.where(used, (logprob - above).exp(), 0)  # [R, N]
        siblings = (parent[:, :, None] == parent[:, None]).float().tril(-1)
        low = (siblings * share[:, None]).sum(-1)
        self.low[req_idx], self.high[req_idx] = low, low + share
        return tokens


class ImposedSampler(TreeSampler):
    """TreeSampler that accepts by the imposed probabilities."""

    def accept(self, rows: DrawnRows, pos: Tensor) -> tuple[Tensor, Tensor]:
        states, slots, first = self.tree_states, rows.req_idx.long(), rows.first_row.long()
        seed, most = self.sampler.sampling_states.seeds.gpu, len(rows.drawn) - 1
        row = torch.arange(most + 1, device=pos.device)
        request = (torch.searchsorted(first, row, right=True) - 1).clamp(max=len(slots) - 1)
        slot = slots[request]
        node = (row - first[request] - 1).clamp(0, states.num_nodes - 1)
        above = first[request] + states.parent[slot, node].clamp(min=0)
        key = pos[above.clamp(max=most)] + seed[slot] * _SEED_FACTOR
        draw = states.draws[key & (_DRAWS - 1)]
        taken = (states.low[slot, node] <= draw) & (draw < states.high[slot, node])
        token = torch.where(rows.token < 0, rows.token, taken.to(rows.token.dtype))
        walked = rows._replace(token=token, drawn=torch.ones_like(rows.drawn))
        _, num_sampled = accept_path_rows(walked, *states.trees)
        # Tokens of the path's nodes, and after the last of them what the target drew.
        path, ends = states.path[slots], num_sampled[:, None] - 1
        at = (first[:-1, None] + path).clamp(max=most)
        place = torch.arange(path.shape[1], device=path.device)
        output = torch.where(place < ends, rows.token[at].roll(-1, 1), rows.drawn[at])
        return torch.where(place <= ends, output, 0), num_sampled
