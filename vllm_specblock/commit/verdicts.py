"""The last verdicts on the trees of a step's requests, from where they wait by request slot."""

from __future__ import annotations

import torch

from vllm_specblock.triton_kernels.optional_numba import takes
from vllm_specblock.triton_kernels.verify.read_verdicts import read_verdicts_triton
from vllm_specblock.triton_kernels.verify.read_verdicts_numba import read_verdicts_numba


def read_verdicts(
    slot: torch.Tensor,
    live: torch.Tensor,
    row_start: torch.Tensor,
    base: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """CUDA tensors go to the kernel.

    Args:
        slot: [R] integers, of each request.
        live: [R] bool or integers; the others, rows of nobody, count as no drafts.
        row_start: [R+1] int32, first row of each request in the batch.
        base: [R] int64, its rows up to and including the root.
        path: [S, D+1] int64, accepted: [S] int32, as `TreeSlots` has them.

    Returns:
        path: [R, D+1] int64.
        accepted: [R] int32.
        query_start: [R] int64, first row of each request.
        drafts: [R] int64, nodes that the target ran on. On the host there is only how many were
            scheduled.
    """
    if path.is_cuda or takes(path):
        op = read_verdicts_triton if path.is_cuda else read_verdicts_numba
        return op(slot, live, row_start, base, path, accepted)
    starts = row_start.long()
    drafts = (starts.diff() - base) * (live != 0)
    return path[slot], accepted[slot], starts[:-1], drafts
