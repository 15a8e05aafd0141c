"""Choice of the drafts to verify in a batch; the kernel is `verify/reallocate_drafts.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_specblock.triton_kernels.op import op, views
from vllm_specblock.triton_kernels.optional_numba import njit
from vllm_specblock.triton_kernels.verify.reallocate_drafts import (
    DraftStarts,
    reallocate_drafts_triton,
)


@op(reallocate_drafts_triton)
def reallocate_drafts(drafts: DraftStarts, req_idx: torch.Tensor, budget: int) -> None:
    """Write `logit_start` and `row_start`.

    req_idx: [R] integers. budget: number of admitted drafts, at most all.
    """
    _reallocate_drafts(*views([*drafts, req_idx]), budget)


@njit
def _reallocate_drafts(
    confidence: Any, counts: Any, logit_start: Any, row_start: Any, req_idx: Any, budget: int
) -> None:
    scheduled, others, count = counts[0], counts[1], len(req_idx)
    admitted, product = np.zeros(count, np.int64), np.ones(count)
    survival = np.empty(count, np.float32)  # of each request's next draft; −1: it has none
    for turn in range(count + budget):
        at = turn
        if turn >= count:
            at = int(survival.argmax())
            admitted[at] += 1
        survival[at] = -1.0
        if admitted[at] < scheduled[at]:
            likely = confidence[req_idx[at], admitted[at]]
            product[at] *= min(likely, 1.0) if likely > 0 else 0.0  # 0 for NaN
            survival[at] = product[at]
    logit_start[0] = row_start[0] = 0
    for at in range(count):
        logit_start[at + 1] = logit_start[at] + admitted[at] + 1
        row_start[at + 1] = row_start[at] + admitted[at] + others[at]
    row_start[count + 1 :] = row_start[count]
