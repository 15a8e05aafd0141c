"""Metadata of recurrent layers in a step with draft trees.

Requests with drafts are run by `layers.py`, all others by vLLM as if they were the whole batch.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specblock.engine.runner.step_batch import rows_without_drafts
from vllm_specblock.verify.recurrence import Paths


class TreeRows:
    """The rows of the R requests with drafts, which come first in a batch.

    Attributes (n rows of theirs, L rows of the longest):
        base: [R] int64, rows up to and with the root.
        place: [n] int64, r · L + j for row j of request r.
        others: rows of the requests without drafts.
    """

    def __init__(self, batch: InputBatch, parent: torch.Tensor) -> None:
        """On a CPU; parent: [slots, N] int32, of all requests' trees."""
        drafts = batch.num_draft_tokens_per_req
        assert drafts is not None
        self.num_reqs = count = int(np.count_nonzero(drafts[: batch.num_reqs]))
        starts = batch.query_start_loc[: batch.num_reqs + 1].numpy()  # a host tensor
        counts = np.diff(starts[: count + 1])
        self.num_rows = int(starts[count])  # a host array
        self.others = slice(self.num_rows, int(starts[-1]))  # a host array
        self.shape = count, int(counts.max())
        owner = np.repeat(np.arange(count), counts)
        local = np.arange(self.num_rows) - starts[owner]
        self.place = torch.from_numpy(owner * self.shape[1] + local)
        self.base = torch.from_numpy(rows_without_drafts(batch)[:count].astype(np.int64))
        self._parent = parent[batch.idx_mapping[:count].long()]

    @cached_property
    def paths(self) -> Paths:
        return Paths(self.base, self._parent, self.shape[1])

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """[rows of the batch, …] → [R, L, …], 0 where a request has fewer rows."""
        padded = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
        padded[self.place] = x[: self.num_rows]
        return padded.unflatten(0, self.shape)


@dataclass
class RecurrentTreeMetadata:
    """Metadata for the layers of one cache group in a step with drafts."""

    trees: TreeRows
    slot: torch.Tensor  # [R] int64, the state of each request with drafts
    others: Any  # vLLM's metadata of the requests without drafts; None: there are none


class RecurrentTreeBuilder(AttentionMetadataBuilder[Any]):
    """Wraps vLLM's builder; `trees` is set before every build, None in a step without drafts."""

    plain_class: ClassVar[type[AttentionMetadataBuilder[Any]]]
    trees: TreeRows | None = None

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        config = copy.copy(self.vllm_config)
        config.speculative_config = None
        self.plain = self.plain_class(self.kv_cache_spec, self.layer_names, config, self.device)

    @classmethod
    def get_varlen_cudagraph_max_query_len(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> int:
        return vllm_config.num_speculative_tokens + 1

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        batch, trees = common_attn_metadata, self.trees
        if trees is None:
            return self.plain.build(common_prefix_len, batch, fast_build)
        others = None
        if trees.num_reqs < batch.num_reqs:
            others = self.plain.build(0, _without_trees(batch, trees), fast_build)
        slot = batch.block_table_tensor[: trees.num_reqs, 0].long()
        return RecurrentTreeMetadata(trees, slot, others)


def _without_trees(batch: CommonAttentionMetadata, trees: TreeRows) -> CommonAttentionMetadata:
    """Return the metadata of the requests without drafts alone."""
    requests = slice(trees.num_reqs, batch.num_reqs)
    starts = batch.query_start_loc[trees.num_reqs : batch.num_reqs + 1] - trees.num_rows
    kept = {
        name: value[requests]
        for name in ("seq_lens", "block_table_tensor", "is_prefilling", "seq_lens_cpu_upper_bound")
        if (value := getattr(batch, name)) is not None
    }
    return batch.replace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        num_reqs=batch.num_reqs - trees.num_reqs,
        num_actual_tokens=int(starts[-1]),  # a host tensor
        max_query_len=int(starts.diff().max()),  # a host tensor
        slot_mapping=batch.slot_mapping[trees.others],
        positions=None if batch.positions is None else batch.positions[trees.others],
        rswa_prefix_lens=None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
        **kept,
    )


def tree_backend(plain: type[AttentionBackend]) -> type[AttentionBackend]:
    """Return vLLM's backend of a recurrent layer, with our builder."""
    wrapped = plain.get_builder_cls()
    builder = type(
        f"Tree{wrapped.__name__}",
        (RecurrentTreeBuilder,),
        {"plain_class": wrapped, "_cudagraph_support": wrapped._cudagraph_support},
    )
    methods = {
        "get_builder_cls": staticmethod(lambda: builder),
        # With adaptive budgets the rows of each request are those of the device's tensor.
        "supports_device_cpu_query_lens_mismatch": classmethod(lambda cls: True),
    }
    return type(f"Tree{plain.__name__}", (plain,), methods)
