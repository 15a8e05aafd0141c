"""Tree sampler: vLLM's sampler at every node, then the accepted path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.config import SpeculativeConfig
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_specblock.engine.runner.tree_states import TreeStates
from vllm_specblock.triton_kernels.verify.accept_path import DrawnRows
from vllm_specblock.verify.accept_path import accept_path_rows
from vllm_specblock.verify.tree_mask import TreeMask

Sample = Callable[[torch.Tensor | slice], tuple[torch.Tensor, torch.Tensor]]
"""Rows of the logits → their tokens [n] int64, and their processed logits [n, V]."""


class TreeSampler(RejectionSampler):
    """RejectionSampler that draws a token at every node, as plain decoding would at its depth.

    The accepted path follows the draws.
    """

    def __init__(
        self,
        sampler: Sampler,
        spec_config: SpeculativeConfig,
        device: torch.device,
        tree_states: TreeStates,
        tree_mask: TreeMask,
        chains: np.ndarray,  # [slots] bool, requests that verify the best path of their tree only
    ) -> None:
        super().__init__(sampler, spec_config, device)
        self.tree_states, self.tree_mask, self.chains = tree_states, tree_mask, chains
        self.enable_adaptive_verification = tree_mask.adaptive

    def _verify_in_chunks(self, *given: Any) -> Any:
        logits, batch, draft_logits, draft_sampled, pos, *rest = given
        # Noise is keyed by (seed, position), here the token's position in plain decoding.
        pos = self.tree_mask.node_position[: len(pos)]
        return super()._verify_in_chunks(logits, batch, draft_logits, draft_sampled, pos, *rest)

    def _verify(
        self,
        logits: torch.Tensor,  # [rows, V], row = node of a request, one request after the other
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,  # [rows], the node's token; -1 where it is a placeholder
        pos: torch.Tensor,  # [rows], position by depth
        cu_num_logits: torch.Tensor,  # [R + 1]
        idx_mapping: torch.Tensor,  # [R], request slot
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,  # [rows], request slot
        expanded_local_pos: torch.Tensor,  # [rows], node
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,  # [rows], as draft_sampled; -1: a grammar forbids it
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wants_rows = self.sampler.return_sampling_mask or (
            self.sampler.sampling_states.max_num_logprobs(idx_mapping_np) != NO_LOGPROBS
        )

        def sample(rows: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
            return self.sampler.sample(
                logits[rows],
                expanded_idx_mapping[rows],
                idx_mapping,
                idx_mapping_np,
                pos[rows],
                draft_sampled[rows],
                expanded_local_pos[rows],
                seq_lens_upper_bound_np,
                return_logprobs=True,
            )

        token = verify_draft_sampled
        drawn, processed = self.draw(sample, token, cu_num_logits, idx_mapping, wants_rows)
        rows = DrawnRows(token, drawn, cu_num_logits, idx_mapping)
        output, num_sampled = self.accept(rows, pos)
        if wants_rows:
            # vLLM reports row cu[r] + j for the j-th token: move the path there.
            order = self._path_order(rows)
            logits.copy_(logits[order])
            if processed is not None and processed is not logits:
                processed = processed[order]
        return logits if processed is None else processed, output, num_sampled

    def draw(
        self,
        sample: Sample,
        token: torch.Tensor,
        first_row: torch.Tensor,
        req_idx: torch.Tensor,
        wants_rows: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw a token at every node, [rows] int64; a device may leave out unreachable nodes.

        token, first_row, req_idx: as in `DrawnRows`. Also returns the processed logits [rows, V],
        or None without `wants_rows`.
        """
        return sample(slice(None))

    def accept(self, rows: DrawnRows, pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the accepted paths; return the emitted tokens [R, D + 1] and their counts [R]."""
        return accept_path_rows(rows, self.tree_states.trees)

    def _path_order(self, rows: DrawnRows) -> torch.Tensor:
        """Return the row to read for every row to write, [rows] int64: paths come first."""
        first, slot = rows.first_row[:-1, None].long(), rows.req_idx  # [R, 1], [R]
        path, accepted = self.tree_states.path[slot], self.tree_states.accepted[slot]
        place = torch.arange(path.shape[1], device=path.device)
        on_path = place <= accepted[:, None]
        # Positions beyond the path write the root to itself.
        to = first + torch.where(on_path, place, 0)
        order = torch.arange(len(rows.drawn), device=path.device)
        order[to] = first + torch.where(on_path, path, 0)
        return order
