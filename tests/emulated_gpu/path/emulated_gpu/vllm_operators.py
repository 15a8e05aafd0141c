"""vLLM's own operators on the emulated GPU: references in torch.

They are registered as CPU kernels. The bridge (`csrc/ops.cpp`) calls them in stream order and at
each replay of a graph.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import pairwise

import torch

from emulated_gpu.operators import replace, with_cuda_kernel

libraries: dict[str, torch.library.Library] = {}


def install() -> None:
    """Register the references of each of vLLM's libraries that is loaded by now."""
    loaded = {name.split("::")[0] for name in torch._C._dispatch_get_all_op_names()}
    for space in REFERENCES.keys() & loaded - libraries.keys():
        library = libraries[space] = torch.library.Library(space, "FRAGMENT")
        for name, function in REFERENCES[space].items():
            library.impl(name, function, "CPU")
            if name in SHAPES:
                library.impl(name, SHAPES[name], "Meta")
        known = {f"{space}::{name}" for name in REFERENCES[space]}
        replace(name for name in with_cuda_kernel(f"{space}::") if name.split(".")[0] in known)
    sampler = sys.modules.get("vllm.v1.sample.ops.topk_topp_sampler")
    if sampler is not None:
        sampler.HAS_TRITON = False  # the interpreter cannot run the loop of its kernel
    adaptive = sys.modules.get("vllm.v1.worker.gpu.spec_decode.adaptive_verification")
    if adaptive is not None:
        adaptive._PROFILE_REPLAYS = 1  # of each step that it times at the start
    logits = sys.modules.get("vllm.model_executor.layers.logits_processor")
    if logits is not None:
        logits.has_flashinfer = lambda: False  # whose top-k nvcc would compile first


def normed(x, weight, epsilon):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return wide.to(x.dtype) if weight is None else wide.to(x.dtype) * weight


def rms_norm(result, input, weight, epsilon):
    result.copy_(normed(input, weight, epsilon))


def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    input.copy_(normed(residual, weight, epsilon))


def rotary_embedding(
    positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset=0, inverse=False
):
    assert not inverse
    rows = cos_sin_cache[positions.flatten()]
    cos, sin = (x.unsqueeze(1).to(query.dtype) for x in rows.chunk(2, dim=-1))
    end = rope_dim_offset + rows.shape[-1]
    for x in filter(torch.is_tensor, (query, key)):
        heads = x.view(len(rows), -1, head_size)[..., rope_dim_offset:end]
        a, b = heads.chunk(2, dim=-1) if is_neox else (heads[..., ::2], heads[..., 1::2])
        turned = a * cos - b * sin, b * cos + a * sin
        heads.copy_(torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(-2))


def silu_and_mul(result, input):
    gate, up = input.chunk(2, dim=-1)
    result.copy_(torch.nn.functional.silu(gate) * up)


def static_scaled_fp8_quant(result, input, scale, group_shape=None):
    assert scale.numel() == 1
    result.copy_((input.float() * scale.reciprocal()).clamp(-448, 448).to(result.dtype))


def reshape_and_cache_flash(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
):
    size = key_cache.shape[1]
    rows = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[rows]
    for cache, new, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        new = new[: len(slot_mapping)][rows]
        if kv_cache_dtype != "auto":
            new = (new.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        cache[slots // size, slots % size] = new


def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale):
    size, rows = kv_cache.shape[1], (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[rows]
    kv_cache[slots // size, slots % size] = torch.cat((kv_c[rows], k_pe[rows]), dim=-1)


def gather_and_maybe_dequant_cache(
    src_cache,
    dst,
    block_table,
    cu_seq_lens,
    token_to_seq,
    num_tokens,
    kv_cache_dtype,
    scale,
    starts,
):
    """Copy each request's entries from `starts` on to its rows of `dst`."""
    row = torch.arange(num_tokens)
    request = token_to_seq[:num_tokens].long()
    entry = row - cu_seq_lens[request] + (0 if starts is None else starts[request])
    size = src_cache.shape[1]
    dst[:num_tokens] = src_cache[block_table[request, entry // size].long(), entry % size]


def merge_attn_states(
    output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse, *rest
):
    both = torch.stack([prefix_lse, suffix_lse])  # [2, heads, T]; infinite: no entries
    both = both.masked_fill(both == float("inf"), float("-inf"))
    first, second = both.softmax(0).transpose(1, 2)[..., None]
    output.copy_(prefix_output.float() * first + suffix_output.float() * second)
    if output_lse is not None:
        output_lse.copy_(both.logsumexp(0))


def fa3_fwd(
    q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
    seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
    rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, is_causal,
    window_left, window_right, softcap, *rest,
):  # fmt: skip
    """Attend one request after the other, in float32, with weights in e4m3 if queries are."""
    fp8 = q.dtype == torch.float8_e4m3fn
    out = q.new_empty(*q.shape[:2], v.shape[-1]) if out is None else out
    assert out.dtype == (torch.bfloat16 if fp8 else q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), float("inf"))
    for i, (first, last) in enumerate(pairwise(cu_seqlens_q.tolist())):
        if first == last:
            continue
        if page_table is not None:
            count = int(seqused_k[i])
            blocks = page_table[i, : -(-count // k.shape[1])].long()
            memory = (x.view(torch.uint8) if fp8 else x for x in (k, v))  # which torch indexes
            entries = (x[blocks].view(k.dtype).flatten(0, 1)[:count] for x in memory)
        else:
            begin, end = cu_seqlens_k[i : i + 2].tolist()
            count = end - begin
            entries = (x[begin:end] for x in (k, v))
        group = q.shape[1] // k.shape[-2]
        keys, values = (x.float().repeat_interleave(group, dim=1) for x in entries)
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), keys)
        if q_v is not None:
            scores += torch.einsum("qhd,khd->hqk", q_v[first:last].float(), values)
        scores = scores * softmax_scale
        if fp8:
            scales = torch.stack([q_descale[i] * k_descale[i], v_descale[i]])
            of_scores, of_values = scales.repeat_interleave(group, dim=1)[..., None, None]
            scores = scores * of_scores
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(count) - torch.arange(count - (last - first), count)[:, None]
        hidden = (distance > 0) & is_causal
        if window_left >= 0:
            hidden |= distance < -window_left
        if window_right >= 0:
            hidden |= distance > window_right
        scores = scores.masked_fill(hidden, float("-inf"))
        total = scores.logsumexp(-1)
        seen = total > float("-inf")
        weights = torch.where(seen[..., None], scores.softmax(-1), 0.0)
        if fp8:
            scores = (scores - scores.amax(-1, keepdim=True)) / math.log(2) + 8
            wide = torch.where(seen[..., None], scores.exp2(), 0.0)  # up to 256
            weights = wide.to(q.dtype).float() / wide.sum(-1, keepdim=True).clamp(min=1) * of_values
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
        lse[:, first:last] = torch.where(seen, total, float("inf"))
    return [out, lse, torch.empty(0), torch.empty(0)]


def scheduler_metadata(*_):
    return torch.zeros(1, dtype=torch.int32)  # `fa3_fwd` reads none


def fa3_shapes(q, k, v, k_new, v_new, q_v, out, *rest):
    """Without a meta kernel, the bridge would have no shapes before the kernel runs."""
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    written = (q if out is None else out).new_empty(*q.shape[:2], v.shape[-1])
    return [written, lse, q.new_empty(0), q.new_empty(0)]


SHAPES: dict[str, Callable] = {"fwd": fa3_shapes, "get_scheduler_metadata": scheduler_metadata}
REFERENCES: dict[str, dict[str, Callable]] = {
    "_C": {
        "rms_norm": rms_norm,
        "fused_add_rms_norm": fused_add_rms_norm,
        "rotary_embedding": rotary_embedding,
        "silu_and_mul": silu_and_mul,
        "static_scaled_fp8_quant": static_scaled_fp8_quant,
        "merge_attn_states": merge_attn_states,
    },
    "_C_cache_ops": {
        "reshape_and_cache_flash": reshape_and_cache_flash,
        "concat_and_cache_mla": concat_and_cache_mla,
        "gather_and_maybe_dequant_cache": gather_and_maybe_dequant_cache,
    },
    "_vllm_fa3_C": {"fwd": fa3_fwd, "get_scheduler_metadata": scheduler_metadata},
}
