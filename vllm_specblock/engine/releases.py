"""Differences between the supported releases of vLLM.

No other module depends on the release. Arguments that a release only adds are accepted and ignored
where they occur. To drop a release, drop its branches here; `contract/` shows what a new one
changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.v1.worker.gpu.block_table import BlockTables


def reallocated(cu_num_logits: torch.Tensor, query_start: torch.Tensor, budget: int) -> Any:
    """What the runner expects of `reallocate_drafts`.

    From 0.33 on a fourth value has the admitted drafts on the host, for batch-sharded sampling.
    `validate.py` refuses that, and None is what vLLM itself returns without it.

    Args:
        cu_num_logits: [R+1] int32.
        query_start: [most requests + 1] int32.
    """
    # Not above: a process that builds no model would load it, too.
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    if hasattr(adaptive_verification, "AdmittedDraftCounts"):
        return cu_num_logits, query_start, budget, None
    return cu_num_logits, query_start, budget


def window_reach(tables: BlockTables) -> Sequence[int]:
    """Per group of caches: tokens before a step's first that its windows still see; 0: all.

    From 0.33 on the blocks before those are not in a step's tables: another request may own them.
    """
    reach: Sequence[int] | None = getattr(tables, "_sliding_window_reach", None)
    return reach if reach is not None else [0] * len(tables.block_tables)


def rows_left_over(tables: BlockTables, num_reqs: int) -> int:
    """Rows that the step before has filled; `num_reqs` are filled now.

    From 0.33 on vLLM clears what a larger batch has left, and counts it on here in its dummy
    batches.
    """
    before: int = getattr(tables, "_num_dirty_rows", 0)
    tables._num_dirty_rows = num_reqs
    return before
