"""Installation of the CPU replacements for Model Runner V2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_specblock.cpu import (
    batches,  # noqa: F401 - replaces kernels
    gumbel,  # noqa: F401 - likewise
    loops,
    sampling,  # noqa: F401 - likewise
    sleeping_waits,
)
from vllm_specblock.cpu.device import CpuDevice
from vllm_specblock.cpu.kernels import overrides
from vllm_specblock.cpu.runner import hidden
from vllm_specblock.cpu.top_k_top_p import apply_top_k_top_p
from vllm_specblock.drafters.common.layers import RMSNorm
from vllm_specblock.engine import compat, patches
from vllm_specblock.engine.device import DEVICES
from vllm_specblock.engine.patches import Function, patch, replaces
from vllm_specblock.options import TargetError

if TYPE_CHECKING:
    from vllm.v1.attention.selector import AttentionSelectorConfig
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.buffer_utils import FusedStagedWriter, StagedWriteTensor


def install() -> None:
    """Replace slow or unsupported kernels and allow CUSTOM attention. Idempotent."""
    if "cpu kernels" in patches.PATCHES:
        return
    from vllm import _custom_ops  # noqa: F401 - loads the kernels
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.buffer_utils import FusedStagedWriter

    found = overrides()
    with hidden("llvmlite"):
        register_kernels(found)
    patches.PATCHES["cpu kernels"] = register_kernels
    # The interpreter does not support the loop over rows in its kernels.
    topk_topp_sampler.HAS_TRITON = False
    patch(topk_topp_sampler, "apply_top_k_top_p_pytorch", lambda original: apply_top_k_top_p)
    # These three pass arrays of raw pointers to their kernels.
    patch(BlockTables, "gather_block_tables", lambda original: _gather_block_tables)
    patch(BlockTables, "compute_slot_mappings", lambda original: _compute_slot_mappings)
    patch(FusedStagedWriter, "apply", lambda original: _apply_staged_writes)
    loops.register()
    RMSNorm.loop = rms_norm
    DEVICES["cpu"] = CpuDevice()
    register_backend(AttentionBackendEnum.CUSTOM, CpuDevice.attention)
    patches.load_compiled_models()
    sleeping_waits.install()
    _accept_custom_attention()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Run vLLM's kernel, four times as fast as torch's for a few rows; it takes whole vectors."""
    if x.shape[-1] % 16:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, eps)
    return out


def _accept_custom_attention() -> None:
    """Let the CPU platform select our backend; vLLM's always returns CPU_ATTN, unvalidated."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    @replaces(CpuPlatform, "get_attn_backend_cls")
    def get_attn_backend_cls(
        original: Function,
        cls: type[CpuPlatform],
        selected_backend: AttentionBackendEnum,
        attn_selector_config: AttentionSelectorConfig,
        *args: Any,
        **kwargs: Any,
    ) -> str:
        if selected_backend is not AttentionBackendEnum.CUSTOM:
            return original(selected_backend, attn_selector_config, *args, **kwargs)
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise TargetError(f"unsupported attention ({', '.join(reasons)})")
        return AttentionBackendEnum.CUSTOM.get_path()


def _gather_block_tables(
    self: BlockTables,
    idx_mapping: torch.Tensor,
    num_reqs_padded: int,
    out: tuple[torch.Tensor, ...] | None = None,
    out_ptrs: torch.Tensor | None = None,
    num_computed_tokens: torch.Tensor | None = None,  # [S], for windows; from 0.33 on
) -> tuple[torch.Tensor, ...]:
    count, rows = len(idx_mapping), num_reqs_padded
    tables = out
    if tables is None:
        tables = tuple(self.input_block_tables)
        rows = max(rows, compat.rows_left_over(self, count))
    reaches = compat.window_reach(self)
    for source, table, reach, size in zip(self.block_tables, tables, reaches, self.block_sizes):
        table[:count] = source.gpu[idx_mapping]
        table[count:rows] = 0
        if reach > 0 and num_computed_tokens is not None:
            first = (num_computed_tokens[idx_mapping] - reach).clamp(min=0) // size
            table[:count].masked_fill_(torch.arange(table.shape[1]) < first[:, None], 0)
    return tuple(table[:num_reqs_padded] for table in tables)


def _compute_slot_mappings(
    self: BlockTables,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    num_tokens_padded: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    slots, start = self.slot_mappings if out is None else out, query_start_loc
    start, dummies = start[: len(idx_mapping) + 1], idx_mapping < 0
    slots.fill_(-1)
    for of, source, size in zip(slots, self.block_tables, self.block_sizes):
        table = source.gpu[idx_mapping]
        torch.ops._C.compute_slot_mapping_kernel_impl(start, positions, table, of, size)
    if dummies.any():
        rows = dummies.repeat_interleave(start.diff())
        slots[:, : len(rows)].masked_fill_(rows, -1)
    return slots[:, :num_tokens_padded]


def _apply_staged_writes(
    self: FusedStagedWriter,
    tensors: Sequence[StagedWriteTensor],
    output_ptrs: torch.Tensor,
    output_strides: torch.Tensor,
) -> None:
    for tensor in tensors:
        tensor.apply_write()
