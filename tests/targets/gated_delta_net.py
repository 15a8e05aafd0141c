"""Gated DeltaNet on a CPU in float32, row by row from the definition: vLLM's kernels take 16 bits.

Both engines of a comparison run it, the one with trees for requests without drafts only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def install() -> None:
    """Replace vLLM's function before its operator is registered with the first such layer."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    core.__annotations__ = gdn_attention.cpu_gdn_attention_core.__annotations__
    globals()["LayerNameType"] = gdn_attention.LayerNameType
    gdn_attention.cpu_gdn_attention_core = core


def core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: Any) -> None:
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    metadata: Any = context.attn_metadata[layer.prefix]
    windows = layer.kv_cache[0]
    windows = windows if is_conv_state_dim_first() else windows.transpose(1, 2)
    slots, heads, value_size, key_size = layer.kv_cache[1].shape
    states = layer.kv_cache[1].view(slots, heads, key_size, value_size)
    weight = layer.conv1d.weight.flatten(1)
    rate, bias = layer.A_log.exp(), layer.dt_bias
    starts = metadata.non_spec_query_start_loc.tolist()
    known = metadata.has_initial_state
    for request, slot in enumerate(metadata.non_spec_state_indices_tensor.flatten().tolist()):
        first = metadata.num_decodes <= request and not known[request]
        if first:
            windows[slot], states[slot] = 0, 0
        for row in range(starts[request], starts[request + 1]):
            window = torch.cat([windows[slot], mixed_qkv[row][:, None]], 1)
            windows[slot] = window[:, 1:]
            x = F.silu((window * weight).sum(1))
            query, key, value = (each[0, 0] for each in layer.rearrange_mixed_qkv(x[None]))
            query, key = (
                (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(
                    heads // len(each), 0
                )
                for each in (query, key)
            )
            state = states[slot] * (-rate * F.softplus(a[row] + bias)).exp()[:, None, None]
            read = torch.einsum("hkv,hk->hv", state, key)
            written = b[row].sigmoid()[:, None] * (value - read)
            states[slot] = state + key[..., None] * written[:, None]
            query = query * key_size**-0.5
            core_attn_out[row] = torch.einsum("hkv,hk->hv", states[slot], query)
