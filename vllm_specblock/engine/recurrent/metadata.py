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
    """The rows of a batch whose requests have drafts.

    Attributes (R requests with drafts, n rows of theirs, L rows of the longest):
        requests: [R] int64, places in the batch; base: [R] int64, rows up to and with the root.
        rows: [n] int64, rows of the batch; place: [n] int64, r · L + j for row j of request r.
        others: places of the requests without drafts; other_rows: [m] int64, their rows.
    """

    def __init__(self, batch: InputBatch, parent: torch.Tensor) -> None:
        """On a CPU; parent: [slots, N] int32, of all requests' trees."""
        drafts = batch.num_draft_tokens_per_req
        assert drafts is not None
        starts = batch.query_start_loc[: batch.num_reqs + 1].numpy()  # a host tensor
        counts, has_drafts = np.diff(starts), drafts[: batch.num_reqs] > 0
        drafted, owner = np.flatnonzero(has_drafts), np.repeat(np.arange(len(counts)), counts)
        self.requests = torch.from_numpy(drafted)
        self.base = torch.from_numpy(rows_without_drafts(batch)[drafted].astype(np.int64))
        self.shape = len(drafted), int(counts[drafted].max())
        own, local = has_drafts[owner], np.arange(len(owner)) - starts[owner]
        place = (has_drafts.cumsum() - 1)[owner] * self.shape[1] + local
        self.rows, self.place = map(torch.from_numpy, (np.flatnonzero(own), place[own]))
        self.others = np.flatnonzero(~has_drafts & (counts > 0))
        self.other_rows = None if own.all() else torch.from_numpy(np.flatnonzero(~own))
        self._parent = parent[batch.idx_mapping[self.requests].long()]

    @cached_property
    def paths(self) -> Paths:
        return Paths(self.base, self._parent, self.shape[1])

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """[rows of the batch, …] → [R, L, …], 0 where a request has fewer rows."""
        padded = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
        padded[self.place] = x[self.rows]
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

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        plain = copy.copy(vllm_config)
        plain.speculative_config = None
        self.plain = self.plain_class(kv_cache_spec, layer_names, plain, device)

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
        if trees.other_rows is not None:
            others = self.plain.build(0, _of_requests(batch, trees), fast_build)
        slot = batch.block_table_tensor[trees.requests, 0].long()
        return RecurrentTreeMetadata(trees, slot, others)


def _of_requests(batch: CommonAttentionMetadata, trees: TreeRows) -> CommonAttentionMetadata:
    """Return the metadata of the requests without drafts alone."""
    requests = torch.from_numpy(trees.others)
    counts = batch.query_start_loc.diff()[requests]
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    kept = {
        name: value[requests]
        for name in ("seq_lens", "block_table_tensor", "is_prefilling", "seq_lens_cpu_upper_bound")
        if (value := getattr(batch, name)) is not None
    }
    return batch.replace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        num_reqs=len(requests),
        num_actual_tokens=int(starts[-1]),  # a host tensor
        max_query_len=int(counts.max()),  # a host tensor
        slot_mapping=batch.slot_mapping[trees.other_rows],
        positions=None if batch.positions is None else batch.positions[trees.other_rows],
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
