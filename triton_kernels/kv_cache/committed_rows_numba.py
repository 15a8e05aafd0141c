"""What the heads are told of the rows of a step, for CPUs.

See `committed_rows.py`; the torch reference is `vllm_specblock.commit.rows.committed_rows`.
"""

from __future__ import annotations

import torch

from ..optional_numba import njit


def committed_rows_numba(
    request, local, row_start, query_start, base, path, accepted, num_rows, positions,
    slot_mapping, owner, text, temperature,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Arguments and results as `vllm_specblock.commit.rows.committed_rows` has them."""
    made = torch.empty(4, len(request), dtype=torch.int64)
    last, heat = torch.empty(len(owner), dtype=torch.int64), torch.empty(len(owner))
    _committed_rows(
        request.numpy(), local.numpy(), row_start.numpy(), query_start.contiguous().numpy(),
        base.contiguous().numpy(), path.contiguous().numpy(), accepted.contiguous().numpy(),
        num_rows, positions.numpy(), slot_mapping.numpy(), owner.contiguous().numpy(),
        text.numpy(), temperature.numpy(), made.numpy(), last.numpy(), heat.numpy(),
    )  # fmt: skip
    return *made.unbind(), last, heat


@njit
def _committed_rows(
    request,  # [T] int64
    local,  # [T] int64
    row_start,  # [R+1] int32
    query_start,  # [R] int64
    base,  # [R] int64
    path,  # [R, D+1] int64
    accepted,  # [R] int32
    num_rows,
    positions,  # [≥ num_rows] int64
    slot_mapping,  # [≥ num_rows] int64
    owner,  # [R] integers
    text,  # [slots, longest request] int32
    temperature,  # [slots] fp32
    made,  # [4, T] int64: source, token, position, slot
    last,  # [R] int64
    heat,  # [R] fp32
):
    longest = text.shape[1] - 1
    for t in range(len(request)):
        r, own = request[t], local[t]
        start, beyond = query_start[r], own - base[r] + 1
        source = start + (base[r] - 1 + path[r, beyond] if beyond > 0 else own)
        position = positions[start] + own
        real = beyond <= accepted[r]
        made[0, t] = min(source, num_rows - 1)
        made[1, t] = text[owner[r], min(position + 1, longest)] if real else 0
        made[2, t] = position
        made[3, t] = slot_mapping[min(start + own, num_rows - 1)] if real else -1
    for r in range(len(owner)):
        last[r] = row_start[r] + base[r] - 1 + accepted[r]
        heat[r] = temperature[owner[r]]
