"""When a kernel may stand in for torch."""

from __future__ import annotations

import torch


def runs_kernel(*tensors: torch.Tensor) -> bool:
    """Whether all lie on CUDA, are of one dtype, and need no gradient: kernels give none.

    Under autocast weights and states are of different dtypes, and torch knows what to make of it.
    """
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    one_kind = all(x.is_cuda and x.dtype == tensors[0].dtype for x in tensors)
    return one_kind and not needs_grad
