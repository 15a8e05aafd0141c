"""Recurrent layers that verify draft trees: Mamba-2, short convolution, Gated DeltaNet.

A request's state stays that of its committed tokens while a tree is verified; the accepted path is
applied once it is known (`verify/recurrence.py`). Requests without drafts are run by vLLM, as if
they were the whole batch. Only hybrid targets import this: vLLM's layers load kernels for a GPU.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specblock.engine.runner.step_batch import rows_without_drafts
from vllm_specblock.verify.recurrence import Paths, Recurrence, advance, convolve, newest, scan


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


class Waiting(NamedTuple):
    """Inputs for applying accepted paths to a layer's states."""

    step: RecurrentTreeMetadata
    x: Tensor
    rows: Recurrence | None = None
    written: Tensor | None = None


class RecurrentLayer(ABC):
    """Verifies trees in one of the target's layers, which keeps one state per request.

    Attributes:
        layer: vLLM's; it is changed in place, before its cache is allocated.
        replaced: name of the layer's method whose inputs `verify` takes; "": an operator calls it.
    """

    replaced = ""
    waiting: Waiting | None = None

    def __init__(self, layer: Any) -> None:
        self.layer, get_spec = layer, layer.get_kv_cache_spec
        # vLLM's chains keep a state per draft.
        layer.num_spec = 0
        layer.get_kv_cache_spec = lambda config: replace(get_spec(config), num_speculative_blocks=0)
        backend = tree_backend(layer.get_attn_backend())
        layer.get_attn_backend = lambda: backend
        if self.replaced:
            self.plain = getattr(layer, self.replaced)
            setattr(layer, self.replaced, self.forward)

    @property
    def histories(self) -> Tensor:
        """[slots, W − 1, C], inputs of the convolution."""
        cache = self.layer.kv_cache[0]
        return cache.transpose(1, 2) if is_conv_state_dim_first() else cache

    @property
    def states(self) -> Tensor:
        """[slots, H, K, V]."""
        raise NotImplementedError

    def forward(self, *, output: Tensor, **inputs: Tensor) -> Any:
        """Called by vLLM with keywords."""
        return self.run(self.plain, tuple(inputs.values()), output)

    def run(self, plain: Callable[..., Any], inputs: tuple[Tensor, ...], out: Tensor) -> Any:
        """Compute `out` [rows, …]; requests and steps without drafts run `plain(*inputs, out)`."""
        metadata, name = get_forward_context().attn_metadata, self.layer.prefix
        step = metadata.get(name) if isinstance(metadata, dict) else None
        if not isinstance(step, RecurrentTreeMetadata):
            return plain(*inputs, out)
        trees = step.trees
        if step.others is not None:
            metadata[name] = step.others
            plain(*(x[trees.others] for x in inputs), out[trees.others])
            metadata[name] = step
        made = self.verify(step, *map(trees.pad, inputs)).flatten(0, 1)[trees.place]
        out[: trees.num_rows] = made.reshape(-1, *out.shape[1:]).to(out.dtype)
        return None

    @abstractmethod
    def verify(self, step: RecurrentTreeMetadata, *inputs: Tensor) -> Tensor:
        """Return the layer's output [R, L, …] for inputs [R, L, …]."""

    def convolved(
        self, step: RecurrentTreeMetadata, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """[R, L, C], in the dtype of x."""
        history, paths = self.histories[step.slot].float(), step.trees.paths
        bias = None if bias is None else bias.float()
        return convolve(history, x.float(), paths, weight.float(), bias)

    def commit(self, path: Tensor, accepted: Tensor) -> None:
        """Apply the accepted paths; path [all requests, D + 1] int64, accepted [all requests]."""
        if self.waiting is None:
            return
        (step, x, rows, written), self.waiting = self.waiting, None
        trees, histories = step.trees, self.histories
        count = trees.num_reqs
        node = path[:count].gather(1, accepted[:count].long()[:, None])[:, 0]
        last = trees.base - 1 + node
        history = histories[step.slot]
        histories[step.slot] = newest(history, x.to(history.dtype), trees.paths, last)
        if rows is not None and written is not None:
            state = self.states[step.slot]
            after = advance(rows, written, trees.paths, last, state.float())
            self.states[step.slot] = after.to(state.dtype)


class Mamba2Layer(RecurrentLayer):
    replaced = "conv_ssm_forward"

    @property
    def states(self) -> Tensor:
        return self.layer.kv_cache[1].transpose(2, 3)

    def verify(self, step: RecurrentTreeMetadata, *inputs: Tensor) -> Tensor:
        layer, (projected,) = self.layer, inputs
        sizes = [layer.tped_intermediate_size, layer.tped_conv_size, layer.tped_dt_size]
        _, x, dt = projected.split(sizes, dim=-1)
        mixed = self.convolved(step, x, layer.conv_weights, layer.conv1d.bias)
        if layer.activation == "silu":
            mixed = F.silu(mixed)
        value, key, query = layer.split_hidden_states_B_C_fn(mixed.to(x.dtype).float())
        heads = dt.shape[-1]
        groups = key.shape[-1] // layer.ssm_state_size
        value = value.unflatten(-1, (heads, -1))
        key, query = (
            each.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 2)
            for each in (key, query)
        )
        dt = F.softplus(dt.float() + layer.dt_bias.float())
        rows = Recurrence(query, key, dt[..., None] * value, dt * layer.A.float())
        out, written = scan(rows, step.trees.paths, self.states[step.slot].float())
        self.waiting = Waiting(step, x, rows, written)
        return (out + layer.D.float()[:, None] * value).flatten(2)


class ShortConvLayer(RecurrentLayer):
    replaced = "forward_native"

    def verify(self, step: RecurrentTreeMetadata, *inputs: Tensor) -> Tensor:
        layer = self.layer
        mixed, _ = layer.in_proj(inputs[0])
        before, after, x = mixed.chunk(3, dim=-1)
        x = before * x
        weight = layer.conv.weight.flatten(1)
        made = self.convolved(step, x, weight, layer.conv.bias).to(x.dtype)
        self.waiting = Waiting(step, x)
        out: Tensor = layer.out_proj(after * made)[0]
        return out


class GatedDeltaNetLayer(RecurrentLayer):
    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        layer.verifies_trees = self
        _install_gated_delta_net()

    @property
    def states(self) -> Tensor:
        # vLLM's kernels for CPUs take the memory of [V, K] as [K, V].
        states = self.layer.kv_cache[1]
        slots, heads, value, key = states.shape
        return states.view(slots, heads, key, value)

    def verify(self, step: RecurrentTreeMetadata, *inputs: Tensor) -> Tensor:
        layer, (x, b, a) = self.layer, inputs
        weight = gdn_attention._unpacked_conv_weight(layer)
        mixed = self.convolved(step, x, weight, layer.conv1d.bias)
        if layer.activation == "silu":
            mixed = F.silu(mixed)
        split = layer.rearrange_mixed_qkv(mixed.to(x.dtype).flatten(0, 1))
        query, key, value = (each[0].unflatten(0, x.shape[:2]).float() for each in split)
        query, key = (
            (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(
                value.shape[2] // each.shape[2], 2
            )
            for each in (query, key)
        )
        decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())
        query = query * query.shape[-1] ** -0.5
        rows = Recurrence(query, key, value, decay, b.float().sigmoid())
        out, written = scan(rows, step.trees.paths, self.states[step.slot].float())
        self.waiting = Waiting(step, x, rows, written)
        return out


KINDS: dict[type[MambaBase], type[RecurrentLayer]] = {
    MambaMixer2: Mamba2Layer,
    ShortConv: ShortConvLayer,
    QwenGatedDeltaNetAttention: GatedDeltaNetLayer,
}
"""vLLM's layer → how it verifies trees."""


def take_recurrent(
    context: dict[str, Any], names: list[str]
) -> tuple[list[str], list[RecurrentLayer]]:
    """Let recurrent layers verify trees; return the names of the others, and these layers."""
    kinds = {name: KINDS.get(type(context[name])) for name in names}
    taken = [kind(context[name]) for name, kind in kinds.items() if kind is not None]
    return [name for name, kind in kinds.items() if kind is None], taken


_LIBRARY: list[torch.library.Library] = []


def _install_gated_delta_net() -> None:
    """Give vLLM's operator an implementation that knows our metadata. Idempotent."""
    if _LIBRARY:
        return

    def cpu_gdn_attention_core(
        mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: Any
    ) -> None:
        def plain(*tensors: Tensor) -> None:
            gdn_attention.cpu_gdn_attention_core(*tensors, layer_name)

        layers: Any = get_forward_context().no_compile_layers
        layer = layers[gdn_attention._resolve_layer_name(layer_name)]
        ours: GatedDeltaNetLayer | None = getattr(layer, "verifies_trees", None)
        if ours is None:
            plain(mixed_qkv, b, a, core_attn_out)
        else:
            ours.run(plain, (mixed_qkv, b, a), core_attn_out)

    library = torch.library.Library("vllm", "IMPL")
    library.impl("cpu_gdn_attention_core", cpu_gdn_attention_core, "CPU", allow_override=True)
    _LIBRARY.append(library)
