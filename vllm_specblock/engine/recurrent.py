"""Recurrent layers that verify draft trees: Mamba-2, short convolution, Gated DeltaNet.

A request's state stays that of its committed tokens while a tree is verified; the accepted path is
applied once it is known (`verify/recurrence.py`). Requests without drafts are run by vLLM, as if
they were the whole batch. Only hybrid targets import this: vLLM's layers load kernels for a GPU.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

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
from vllm.platforms import current_platform
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specblock.engine.attention import ReadsTreeMask, after_trees
from vllm_specblock.engine.runner.step_batch import rows_without_drafts
from vllm_specblock.verify.recurrence import (
    Paths,
    Recurrence,
    Written,
    advance,
    convolve,
    newest,
    scan,
)

ON_CPU = current_platform.is_cpu()


class TreeRows:
    """The rows of the R requests with drafts, which come first in a batch.

    Attributes (n rows of theirs, L rows of the longest):
        base: [R] int64, rows up to and with the root.
        place: [n] int64, r · L + j for row j of request r.
        others: rows of the requests without drafts.
    """

    def __init__(self, batch: InputBatch, count: int, parent: torch.Tensor) -> None:
        """count: R; parent: [slots, N] int32, of all requests' trees."""
        self.num_reqs = count
        starts, device = batch.query_start_loc[: count + 1], parent.device
        # With adaptive budgets, on a CPU only, a request's rows are those of the tensor.
        self.num_rows = int(batch.query_start_loc_np[count])  # a host array
        self.others = slice(self.num_rows, batch.num_tokens)
        counts = starts.diff() if device.type == "cpu" else batch.num_scheduled_tokens[:count]
        self.shape = count, int(counts.max())  # a host tensor or array
        row = torch.arange(self.num_rows, dtype=starts.dtype, device=device)
        owner = torch.searchsorted(starts[1:], row, right=True)
        self.place = owner * self.shape[1] + row - starts[owner]
        base = rows_without_drafts(batch)[:count].astype(np.int64)
        self.base = async_tensor_h2d(base, device=device)
        self.paths = Paths(self.base, parent[batch.idx_mapping[:count].long()], self.shape[1])

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


@cache
def tree_backend(plain: type[AttentionBackend]) -> type[AttentionBackend]:
    """Return vLLM's backend of a recurrent layer, whose metadata builder knows draft trees."""
    builder_class: Any = plain.get_builder_cls()

    class TreeBuilder(builder_class):
        if not ON_CPU:  # where adaptive budgets need another answer, and nothing is captured
            # Shapes in `verify` depend on the batch: vLLM captures only the layers in between.
            _cudagraph_support = AttentionCGSupport.NEVER
        trees: TreeRows | None = None  # set before every build; None in a step without drafts

        def __init__(
            self, spec: KVCacheSpec, names: list[str], config: VllmConfig, device: torch.device
        ) -> None:
            config = copy.copy(config)
            config.speculative_config = None
            super().__init__(spec, names, config, device)
            self.supports_update_block_table = False  # of a step without drafts alone

        # vLLM asks before it builds a budget manager, on a CPU, too.
        get_varlen_cudagraph_max_query_len = ReadsTreeMask.get_varlen_cudagraph_max_query_len

        def build(
            self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, **_: Any
        ) -> Any:
            batch, trees = common_attn_metadata, self.trees
            if trees is None:
                return super().build(common_prefix_len, batch)
            slot = batch.block_table_tensor[: trees.num_reqs, 0].long()
            rest = after_trees(batch, trees.num_reqs)
            others = None if rest is None else super().build(common_prefix_len, rest)
            return RecurrentTreeMetadata(trees, slot, others)

    class RecurrentTreeBackend(plain):
        get_builder_cls = staticmethod(lambda: TreeBuilder)
        # With adaptive budgets the rows of each request are those of the device's tensor.
        supports_device_cpu_query_lens_mismatch = classmethod(lambda cls: True)

    return RecurrentTreeBackend


class RecurrentLayer(ABC):
    """Verifies trees in one of the target's layers, which keeps one state per request.

    Attributes:
        layer: vLLM's; it is changed in place, before its cache is allocated.
        replaced: name of the layer's method whose inputs `verify` takes.
        step: the step whose accepted paths are not applied yet.
        x: [R, L, C], its inputs of the convolution.
        written: what its rows add to the states; None: the layer is a convolution only.
    """

    replaced: str
    step: RecurrentTreeMetadata | None = None
    x: Tensor
    written: Written | None = None

    def __init__(self, layer: Any) -> None:
        self.layer, get_spec = layer, layer.get_kv_cache_spec
        # vLLM's chains keep a state per draft.
        layer.num_spec = 0
        layer.get_kv_cache_spec = lambda config: replace(get_spec(config), num_speculative_blocks=0)
        backend = tree_backend(layer.get_attn_backend())
        layer.get_attn_backend = lambda: backend
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
        return self.layer.kv_cache[1].transpose(2, 3)

    def forward(self, **given: Tensor) -> None:
        """Write the last tensor, [rows, …], the output; requests without drafts run vLLM's."""
        metadata, name = get_forward_context().attn_metadata, self.layer.prefix
        step = metadata.get(name) if isinstance(metadata, dict) else None
        if not isinstance(step, RecurrentTreeMetadata):
            return self.plain(*given.values())
        trees, (*inputs, output) = step.trees, given.values()
        if step.others is not None:
            metadata[name] = step.others
            self.plain(*(x[trees.others] for x in given.values()))
            metadata[name] = step
        self.step = step
        made = self.verify(step, *map(trees.pad, inputs)).flatten(0, 1)[trees.place]
        output[: trees.num_rows] = made.reshape(-1, *output.shape[1:]).to(output.dtype)

    @abstractmethod
    def verify(self, step: RecurrentTreeMetadata, *inputs: Tensor) -> Tensor:
        """Return the layer's output [R, L, …] for inputs [R, L, …]."""

    def convolve(
        self, step: RecurrentTreeMetadata, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return [R, L, C], the layer's convolution, in the dtype of x."""
        self.x, history = x, self.histories[step.slot].float()
        bias = None if bias is None else bias.float()
        out = convolve(history, x.float(), step.trees.paths, weight.float(), bias)
        activated = getattr(self.layer, "activation", "") == "silu"
        return (F.silu(out) if activated else out).to(x.dtype)

    def scan(self, step: RecurrentTreeMetadata, rows: Recurrence) -> Tensor:
        """Return [R, L, H, V], the output of the layer's recurrence."""
        out, self.written = scan(rows, step.trees.paths, self.states[step.slot].float())
        return out

    def commit(self, path: Tensor, accepted: Tensor) -> None:
        """Apply the accepted paths; path [all requests, D + 1] int64, accepted [all requests]."""
        step, self.step = self.step, None
        if step is None:
            return
        trees, histories = step.trees, self.histories
        count = trees.num_reqs
        node = path[:count].gather(1, accepted[:count].long()[:, None])[:, 0]
        last = trees.base - 1 + node
        history = histories[step.slot]
        histories[step.slot] = newest(history, self.x.to(history.dtype), trees.paths, last)
        if self.written is not None:
            state = self.states[step.slot]
            after = advance(self.written, trees.paths, last, state.float())
            self.states[step.slot] = after.to(state.dtype)
        del self.x
        self.written = None


class Mamba2Layer(RecurrentLayer):
    replaced = "conv_ssm_forward"

    def verify(self, step: RecurrentTreeMetadata, *inputs: Tensor) -> Tensor:
        layer, (projected,) = self.layer, inputs
        sizes = [layer.tped_intermediate_size, layer.tped_conv_size, layer.tped_dt_size]
        _, x, dt = projected.split(sizes, dim=-1)
        mixed = self.convolve(step, x, layer.conv_weights, layer.conv1d.bias)
        value, key, query = layer.split_hidden_states_B_C_fn(mixed.float())
        value = value.unflatten(-1, (dt.shape[-1], -1))
        # Copies: a view would keep all of `mixed` until the commit.
        key, query = (
            each.unflatten(-1, (-1, layer.ssm_state_size)).contiguous() for each in (key, query)
        )
        dt = F.softplus(dt.float() + layer.dt_bias.float())
        out = self.scan(step, Recurrence(query, key, dt[..., None] * value, dt * layer.A.float()))
        return (out + layer.D.float()[:, None] * value).flatten(2)


class ShortConvLayer(RecurrentLayer):
    replaced = "forward_native" if ON_CPU else "forward_cuda"

    def verify(self, step: RecurrentTreeMetadata, *inputs: Tensor) -> Tensor:
        layer = self.layer
        mixed, _ = layer.in_proj(inputs[0])
        before, after, x = mixed.chunk(3, dim=-1)
        made = self.convolve(step, before * x, layer.conv.weight.flatten(1), layer.conv.bias)
        out: Tensor = layer.out_proj(after * made)[0]
        return out


class GatedDeltaNetLayer(RecurrentLayer):
    replaced = "core" if ON_CPU else "_forward_core"

    def __init__(self, layer: Any) -> None:
        if ON_CPU:
            _call_core()
        layer.enable_fused_gdn_spec_decode = False  # it bypasses `_forward_core`
        super().__init__(layer)

    @property
    def states(self) -> Tensor:
        states = super().states
        # vLLM's kernels for CPUs take the memory of [V, K] as [K, V].
        return self.layer.kv_cache[1].view(states.shape) if ON_CPU else states

    def verify(self, step: RecurrentTreeMetadata, *inputs: Tensor) -> Tensor:
        layer, (x, b, a) = self.layer, inputs
        weight = gdn_attention._unpacked_conv_weight(layer)
        mixed = self.convolve(step, x, weight, layer.conv1d.bias)
        split = layer.rearrange_mixed_qkv(mixed.flatten(0, 1))
        query, key, value = (each[0].unflatten(0, x.shape[:2]).float() for each in split)
        query, key = (
            each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (query, key)
        )
        decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())
        query = query * query.shape[-1] ** -0.5
        return self.scan(step, Recurrence(query, key, value, decay, b.float().sigmoid()))


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


@cache  # the library holds the implementation
def _call_core() -> torch.library.Library:
    """Let vLLM's operator call a method of the layer, as its other operators do."""

    def core(layer: Any, *tensors: Tensor) -> None:
        gdn_attention.cpu_gdn_attention_core(*tensors, layer.prefix)

    def cpu_gdn_attention_core(
        mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: Any
    ) -> None:
        layers: Any = get_forward_context().no_compile_layers
        layer = layers[gdn_attention._resolve_layer_name(layer_name)]
        layer.core(mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)

    QwenGatedDeltaNetAttention.core = core
    library = torch.library.Library("vllm", "IMPL")
    library.impl("cpu_gdn_attention_core", cpu_gdn_attention_core, "CPU", allow_override=True)
    return library
