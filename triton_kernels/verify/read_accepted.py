"""Accepted paths of the last step by request, and where their rows begin.

The torch reference is `commit/accepted_paths.py`: seven launches over a few numbers of each
request.
"""

from __future__ import annotations

import torch

from ..optional_triton import jit, next_power_of_2, tl


def read_accepted_triton(
    req_idx: torch.Tensor,
    live: torch.Tensor,
    row_start: torch.Tensor,
    base: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernel; arguments and results as `commit.result.read_accepted` has them."""
    count, places = len(req_idx), path.shape[1]

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=path.device)

    found = empty(count, places), empty(count, dtype=torch.int32), empty(count), empty(count)
    if count:
        _read_accepted_kernel[(count,)](
            req_idx,
            req_idx.stride(0),
            live,
            live.stride(0),
            row_start,
            base,
            base.stride(0),
            path,
            accepted,
            *found,
            LEN=places,
            PLACES=next_power_of_2(places),
            num_warps=1,
        )
    return found


# The rows of a part of a table begin anywhere, which is not to be compiled for.
@jit(do_not_specialize=["req_idx", "live"])
def _read_accepted_kernel(
    req_idx,  # [R] integers
    req_idx_stride,
    live,  # [R] integers or bool
    live_stride,
    row_start,  # [R + 1] int32
    base,  # [R] int64
    base_stride,
    path,  # [S, LEN] int64
    accepted,  # [S] int32
    new_path,  # [R, LEN] int64
    new_accepted,  # [R] int32
    query_start,  # [R] int64
    drafts,  # [R] int64
    LEN: tl.constexpr,
    PLACES: tl.constexpr,
):
    """One request."""
    request = tl.program_id(0).to(tl.int64)
    at = tl.load(req_idx + request * req_idx_stride).to(tl.int64)
    place = tl.arange(0, PLACES)
    node = tl.load(path + at * LEN + place, mask=place < LEN)
    tl.store(new_path + request * LEN + place, node, mask=place < LEN)
    tl.store(new_accepted + request, tl.load(accepted + at))
    start = tl.load(row_start + request).to(tl.int64)
    tl.store(query_start + request, start)
    rows = tl.load(row_start + request + 1) - start
    run = rows - tl.load(base + request * base_stride)
    tl.store(drafts + request, tl.where(tl.load(live + request * live_stride) != 0, run, 0))
