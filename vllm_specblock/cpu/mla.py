"""Trees in multi-head latent attention on a CPU: vLLM's layer there, our attention for trees."""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from vllm_specblock.engine.mla import TreeMLABackend, TreeMLAImpl


class CpuTreeMLAImpl(TreeMLAImpl, CPUMLAImpl):
    """The layer without what vLLM's common one loads for a GPU."""


class CpuTreeMLABackend(TreeMLABackend):
    """Registered as vLLM's CUSTOM backend on a CPU."""

    supported_dtypes: ClassVar = [*TreeMLABackend.supported_dtypes, torch.float32]
    get_impl_cls = staticmethod(lambda: CpuTreeMLAImpl)
