"""TreeSampler on a CPU: draws only at nodes that the accepted path can reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_specblock.cpu.gumbel import drawn_along, sample_by_depth
from vllm_specblock.engine.runner.sampler import Sample, TreeSampler

if TYPE_CHECKING:
    import torch


class PathSampler(TreeSampler):
    def draw(
        self,
        sample: Sample,
        token: torch.Tensor,
        first_row: torch.Tensor,
        req_idx: torch.Tensor,
        wants_rows: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        trees = token, first_row, req_idx, self.tree_states.parent
        slots = req_idx.numpy()  # a host tensor
        processes = self.sampler.needs_logits_processing[slots].any()
        if processes and not wants_rows and not self.chains[slots].any():
            return sample_by_depth(lambda rows: sample(rows)[0], *trees), None
        with drawn_along(*trees):
            return sample(slice(None))
