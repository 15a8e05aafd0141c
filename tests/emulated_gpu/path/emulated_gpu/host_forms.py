"""Host forms in torch of the kernels in which the interpreter spends its time.

A form gets a launch's arguments by name, and its grid.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
import random
from collections.abc import Callable
from types import SimpleNamespace as Arguments
from typing import Any

import torch
import torch.nn.functional as F

from emulated_gpu.vllm_operators import fa3_fwd

Grid = tuple[int, int, int]


def unified_attention(a: Arguments, grid: Grid) -> None:
    assert a.USE_CAUSAL and not (a.SLIDING_WINDOW or a.USE_SINKS or a.USE_ALIBI_SLOPES or a.USE_FP8)
    fa3_fwd(
        a.query_ptr, a.key_cache_ptr, a.value_cache_ptr, None, None, None, a.output_ptr,
        a.query_start_len_ptr, None, None, None, a.seq_lens_ptr, 0, 0, a.block_tables_ptr, None,
        None, None, None, None, None, None, None, a.scale, True, -1, -1, a.softcap,
    )  # fmt: skip


def reshape_and_cache(a: Arguments, grid: Grid) -> None:
    assert not a.FP8_KV_CACHE and not a.USE_HEAD_MAJOR_LAYOUT
    slots = a.slot_mapping_ptr
    rows = (slots >= 0).nonzero().flatten()
    slots = slots[rows].long()
    for cache, new in ((a.key_cache_ptr, a.key_ptr), (a.value_cache_ptr, a.value_ptr)):
        cache[slots // a.block_size, slots % a.block_size] = new[rows].to(cache.dtype)


def tree_attention(a: Arguments, grid: Grid) -> None:
    """One launch, split or whole: what is split writes its result, and no part of it."""
    given, out = a.given, a.into.out
    starts, most = given.query_start.tolist(), grid[1]
    if most > a.num_requests:
        out[starts[-1] : a.num_tokens] = 0
        most = a.num_requests
    many = a.whole_from is not None and starts[a.whole_from] > starts[a.whole_from - 1]
    if a.whole_from is not None and many != a.READ.WHOLE:
        return
    mask_bits, size = 32 * a.READ.MASK_WORDS32, a.READ.BLOCK_SIZE
    for i, (first, stop) in enumerate(itertools.pairwise(starts[: most + 1])):
        if not a.above < (stop - first) * a.TILE.GROUP <= a.up_to:
            continue
        entry = torch.arange(min(int(given.seq_len[i]), a.max_seq_len))
        seen = entry < given.prefix_len[first:stop, None]
        if given.prefix_from is not None:
            seen &= entry >= given.prefix_from[first:stop, None]
        column = entry - given.tree_start[i]
        inside = (column >= 0) & (column < mask_bits)
        column = column.clamp(0, mask_bits - 1)
        bits = given.mask_words32[first:stop][:, column >> 5] >> (column & 31)
        seen |= ((bits & 1) != 0) & inside
        used = seen.any(0).nonzero().flatten()
        entries = given.kv_cache[given.block_table[i, used // size].long(), :, used % size]
        out[first:stop] = attend(given.query[first:stop], entries, seen[:, used], a)


def attend(query: torch.Tensor, entries: torch.Tensor, seen: torch.Tensor, a: Arguments):
    """query [n, nh, D], entries [L, nkv, 2D], seen [n, L] -> [n, nh, D]."""
    entries = entries.float().repeat_interleave(a.TILE.GROUP, dim=1)
    keys, values = entries.split(a.TILE.HEAD, dim=-1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * a.scale
    if a.given.key_scale is not None:
        scores *= a.given.key_scale
    if a.READ.CAPPED:
        scores = a.soft_cap * torch.tanh(scores / a.soft_cap)
    scores = scores.masked_fill(~seen, float("-inf"))
    total = scores.logsumexp(-1)
    if a.into.sinks is not None:
        total = torch.logaddexp(total, a.into.sinks.float()[:, None])
    weights = (scores - total.masked_fill(total.isinf(), 0.0)[..., None]).exp()
    out = torch.einsum("hqk,khd->qhd", weights, values)
    return out if a.into.value_scale is None else out * a.into.value_scale


def rotate_pair(a: Arguments, grid: Grid) -> None:
    each = (
        (a.query_ptr, a.query_out_ptr, a.queries, a.query_norm_ptr),
        (a.key_ptr, a.key_out_ptr, a.keys, a.key_norm_ptr),
    )
    for states, out, count, norm in each:
        at = torch.arange(count)
        rows = at // a.ROPE.EACH
        if states is a.query_ptr and a.keep_ptr is not None:
            rows = a.keep_ptr[rows]
            states = states[rows * a.ROPE.EACH + at % a.ROPE.EACH] if a.ROPE.PICKS else states
        angle = (a.base_ptr[rows] + at % a.ROPE.EACH).float()[:, None, None] * a.turn_ptr[
            a.ROPE.HALF :
        ]
        cos, sin = (x.to(out.dtype).float() for x in (angle.cos(), angle.sin()))
        wide = states.float()
        if norm is not None:
            wide = rms_normed(wide, norm, a.eps).to(out.dtype).float()
        left, right = wide.split(a.ROPE.HALF, dim=-1)
        kept = (left * cos).to(out.dtype).float() - right * sin
        other = (right * cos).to(out.dtype).float() + left * sin
        out.view_as(states).copy_(torch.cat([kept, other], -1))


def rms_normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def add_norm(a: Arguments, grid: Grid) -> None:
    left = a.left_ptr if a.keep_ptr is None else a.left_ptr[a.keep_ptr]
    a.total_ptr.view(a.right_ptr.shape).copy_(left.float() + a.right_ptr.float())
    a.normed_ptr.copy_(rms_normed(a.total_ptr.float(), a.weight_ptr, a.eps))


def layer_shift(a: Arguments, grid: Grid) -> None:
    hidden = a.hidden_ptr.float()
    previous = torch.cat([hidden[:, :1], hidden[:, :-1]], 1)
    a.out_ptr.copy_(F.linear(torch.cat([hidden, previous], -1), a.weight_ptr.float()))


def store_kv(a: Arguments, grid: Grid) -> None:
    rows = (a.kv_index_ptr >= 0).nonzero().flatten()
    slots, cache = a.kv_index_ptr[rows].long(), a.kv_cache_ptr
    assert a.key_scale_ptr is None
    both = torch.cat([a.key_ptr[rows], a.value_ptr[rows]], -1).to(cache.dtype)
    cache[slots // a.BLOCK_SIZE, :, slots % a.BLOCK_SIZE] = both


def best_of_chunk(a: Arguments, grid: Grid) -> None:
    rows, chunks, width = *grid[:2], a.CHUNK
    pad = (0, chunks * width - a.vocab)
    x = F.pad(a.logits_ptr.float() * a.scale, pad, value=float("-inf")).view(rows, chunks, width)
    inside = torch.arange(chunks * width).view(chunks, width) < a.vocab
    largest = x.amax(-1)
    below = torch.where(inside, x - largest[..., None], 0.0)
    weight = torch.where(inside, below.exp(), 0.0)
    sums = a.out.sums.view(4, rows, chunks)
    sums[0], sums[1] = largest, weight.sum(-1)
    if a.SPREAD:
        sums[2] = (weight * below).sum(-1)
    if a.out.beta is not None:
        sharp = a.out.beta.flatten()[torch.arange(rows) // a.out.rows_each, None, None]
        sums[3] = torch.where(inside, (sharp * below).exp(), 0.0).sum(-1)
    bits = torch.where(x == x, x, float("-inf")).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (ordered << 32) | (0x7FFFFFFF - torch.arange(chunks * width).view(chunks, width))
    a.out.best.view(rows, chunks, a.TOP).copy_(keys.topk(a.TOP, -1).values)


def move_path(a: Arguments, grid: Grid) -> None:
    assert a.cache_strides.dim == 1
    size, slots, last = a.INTEGER.primitive_bitwidth // 8, a.slot_mapping_ptr.tolist(), a.last_row
    for i in range(grid[0]):
        root, nodes = int(a.rows.query_start[i]) + int(a.rows.base[i]) - 1, a.rows.path[i].tolist()
        places = range(1, min(int(a.rows.accepted[i]), a.depth) + 1)
        rows = [(root + nodes[place], root + place) for place in places if nodes[place] != place]
        moves = [(slots[min(row, last)], slots[min(to, last)]) for row, to in rows]
        moves = [pair for pair in moves if min(pair) >= 0]
        for pointer, head in itertools.product(a.caches_ptr.tolist(), range(grid[1])):

            def entry(slot, pointer=pointer, head=head):
                (block, place), strides = divmod(slot, a.BLOCK_SIZE), a.cache_strides
                at = block * strides.block + head * strides.head + place * strides.entry
                return pointer + at * size

            read = [ctypes.string_at(entry(slot), a.WIDTH * size) for slot, _ in moves]
            for data, (_, slot) in zip(read, moves, strict=True):
                ctypes.memmove(entry(slot), data, len(data))


def gumbel_sample(a: Arguments, grid: Grid) -> None:
    assert a.logits_cache_ptr is None and not a.IS_DRAFTING and not a.USE_FP64
    (rows, blocks), size = grid[:2], a.BLOCK_SIZE
    request = a.expanded_idx_mapping_ptr[:rows].long()
    seed, temperature = a.seeds_ptr[request].long(), a.temp_ptr[request].float()
    seed, temperature = (x.masked_fill(request < 0, 0)[:, None] for x in (seed, temperature))
    column = torch.arange(blocks * size)
    noise = uniform(seed, seed >> 32, a.pos_ptr[:rows, None].long(), column)
    noise = -torch.log(-torch.log1p(-noise))
    logits = a.logits_ptr[:rows].float()
    if a.APPLY_TEMPERATURE:
        logits = torch.where(temperature != 0, logits / temperature, logits)
    logits = F.pad(logits, (0, blocks * size - a.vocab_size), value=float("-inf"))
    logits = torch.where(temperature != 0, logits + noise, logits).view(rows, blocks, size)
    largest, index = logits.max(-1)
    a.local_max_ptr.copy_(largest)
    a.local_argmax_ptr.copy_(index + size * torch.arange(blocks))


def uniform(*keys: torch.Tensor) -> torch.Tensor:
    """vLLM's `murmur3_uniform32`, of int64 tensors that hold 32 bits each."""
    low = 0xFFFFFFFF

    def turned(x: torch.Tensor, by: int) -> torch.Tensor:
        return (x << by | x >> 32 - by) & low

    h = torch.zeros(1, dtype=torch.int64)
    for key in keys:
        key = turned((key & low) * 0xCC9E2D51 & low, 15) * 0x1B873593 & low
        h = turned(h ^ key, 13) * 5 + 0xE6546B64 & low
    h = h ^ 16
    h = (h ^ h >> 16) * 0x85EBCA6B & low
    h = (h ^ h >> 13) * 0xC2B2AE35 & low
    h = h ^ h >> 16
    return (h >> 16).float() * 2.0**-16 + ((h & 0xFFFF).float() + 0.5) * 2.0**-32


FORMS: dict[str, tuple[Callable[[Arguments, Grid], None], str]] = {
    "kernel_unified_attention": (unified_attention, ""),
    "reshape_and_cache_kernel_flash": (reshape_and_cache, ""),
    "_tree_attention_kernel": (tree_attention, "into.out"),
    "_rotate_pair_kernel": (rotate_pair, "query_out_ptr key_out_ptr"),
    "_add_norm_kernel": (add_norm, "total_ptr normed_ptr"),
    "_layer_shift_kernel": (layer_shift, "out_ptr"),
    "_store_kv_kernel": (store_kv, ""),
    "_best_of_chunk_kernel": (best_of_chunk, "out.best"),
    "_gumbel_sample_kernel": (gumbel_sample, "local_argmax_ptr"),
    "_move_path_kernel": (move_path, ""),
}
"""By a kernel's name: its form, and the results in which the interpreter has to agree."""
SECONDS = {
    "_merge_splits_kernel": "_tree_attention_kernel",
    "reduce_segments": "kernel_unified_attention",
}
"""Kernels that finish another's work, which a host form has done by itself."""
EVERY = 64
"""One in so many launches of a kernel runs in the interpreter, too."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}

draw = random.Random(0)
unfinished: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
"""By a first kernel's name, if its last launch was interpreted: its results, and the host's."""


@torch.inference_mode()  # as what they write to may be made in it
def run(name: str, given: dict[str, Any], grid: Grid, interpret: Callable[[], None]) -> None:
    """Run a kernel's host form; now and then the interpreter, too, whose results then stay."""
    if name in SECONDS:
        pairs = unfinished.pop(SECONDS[name], None)
        if pairs is not None:
            interpret()
            compare(name, pairs)
        return
    unfinished.pop(name, None)
    (form, results), arguments = FORMS[name], Arguments(**given)
    if name == "kernel_unified_attention" or draw.randrange(EVERY):
        form(arguments, grid)
        return
    found = [operator.attrgetter(result)(arguments) for result in results.split()]
    before = [tensor.clone() for tensor in found]
    if found:
        form(arguments, grid)
    pairs = [(tensor, tensor.clone()) for tensor in found]
    for tensor, value in zip(found, before, strict=True):
        tensor.copy_(value)
    interpret()
    if name in SECONDS.values() and not given["READ"].WHOLE:
        unfinished[name] = pairs
    else:
        compare(name, pairs)


def compare(name: str, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for interpreted, host in pairs:
        bound = TOLERANCE.get(host.dtype, 0.0)
        close = torch.isclose(interpreted, host, rtol=bound, atol=bound, equal_nan=True)
        if not close.all():
            raise AssertionError(f"{name}: {(~close).sum()} of {close.numel()} results differ")
