"""Host forms in torch of the kernels in which the interpreter spends its time.

A form gets a launch's arguments by name, and its grid.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import operator
import random
from collections.abc import Callable
from types import SimpleNamespace as Arguments
from typing import Any

import torch
import torch.nn.functional as F
from vllm_specblock.triton_kernels.tree.candidate_keys import (
    CLOSED,
    DEPTH_ONE,
    FIRST,
    INDEX_BITS,
    MAX_DEPTH,
    PATH_FACTOR,
    ROOT_HASH,
)
from vllm_specblock.triton_kernels.verify.accept_path import DrawnRows
from vllm_specblock.triton_kernels.verify.build_tree_mask import BatchRows

from emulated_gpu.vllm_operators import fa3_fwd, reshape_and_cache_flash
from vllm_specblock import candidates
from vllm_specblock.cpu import sampling
from vllm_specblock.verify.accept_path import accept_path_rows
from vllm_specblock.verify.tree_mask import build_tree_mask

Grid = tuple[int, int, int]


def unified_attention(a: Arguments, grid: Grid) -> None:
    assert not (a.USE_SINKS or a.USE_ALIBI_SLOPES or a.USE_FP8)
    assert a.USE_CAUSAL or not a.SLIDING_WINDOW
    fa3_fwd(
        a.query_ptr, a.key_cache_ptr, a.value_cache_ptr, None, None, None, a.output_ptr,
        a.query_start_len_ptr, None, None, None, a.seq_lens_ptr, 0, 0, a.block_tables_ptr, None,
        None, None, None, None, None, None, None, a.scale, a.USE_CAUSAL,
        a.SLIDING_WINDOW - 1, -1, a.softcap,
    )  # fmt: skip


def reshape_and_cache(a: Arguments, grid: Grid) -> None:
    assert not a.FP8_KV_CACHE and not a.USE_HEAD_MAJOR_LAYOUT
    new, caches = (a.key_ptr, a.value_ptr), (a.key_cache_ptr, a.value_cache_ptr)
    reshape_and_cache_flash(*new, *caches, a.slot_mapping_ptr, "auto", 1.0, 1.0)


def tree_attention(a: Arguments, grid: Grid) -> None:
    """One launch, split or whole: what is split writes its result, and no part of it."""
    rule, out = a.seen, a.into.out
    dense = rule.query_start, rule.seq_len, rule.tree_start, rule.prefix_len
    assert all(each.is_contiguous() for each in dense), "the kernel reads them without strides"
    starts, most = rule.query_start.tolist(), grid[1]
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
        entry = torch.arange(min(int(rule.seq_len[i]), a.max_seq_len))
        seen = entry < rule.prefix_len[first:stop, None]
        if rule.prefix_from is not None:
            seen &= entry >= rule.prefix_from[first:stop, None]
        column = entry - rule.tree_start[i]
        inside = (column >= 0) & (column < mask_bits)
        column = column.clamp(0, mask_bits - 1)
        bits = rule.mask_words[first:stop][:, column >> 5] >> (column & 31)
        seen |= ((bits & 1) != 0) & inside
        used = seen.any(0).nonzero().flatten()
        entries = a.kv_cache_ptr[rule.block_table[i, used // size].long(), :, used % size]
        out[first:stop] = attend(a.query_ptr[first:stop], entries, seen[:, used], a)


def attend(query: torch.Tensor, entries: torch.Tensor, seen: torch.Tensor, a: Arguments):
    """query [n, nh, D], entries [L, nkv, 2D], seen [n, L] -> [n, nh, D]."""
    entries = entries.float().repeat_interleave(a.TILE.GROUP, dim=1)
    keys, values = entries.split(a.TILE.HEAD, dim=-1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * a.scale
    if a.key_scale_ptr is not None:
        scores *= a.key_scale_ptr
    if a.READ.CAPPED:
        scores = a.soft_cap * torch.tanh(scores / a.soft_cap)
    scores = scores.masked_fill(~seen, float("-inf"))
    # An extra score with value zero: the sink, or what a row sees that sees nothing.
    sink = torch.tensor([-1e30]) if a.into.sinks is None else a.into.sinks.float()
    sink = sink.view(-1, 1, 1).expand(*scores.shape[:2], 1)
    weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    out = torch.einsum("hqk,khd->qhd", weights, values)
    return out if a.into.value_scale is None else out * a.into.value_scale


def rotate_pair(a: Arguments, grid: Grid) -> None:
    for of, count in ((a.query, a.queries), (a.key, a.keys)):
        states, out, norm, at = of.source, of.out, of.norm, torch.arange(count)
        rows = at // a.ROPE.EACH
        if of is a.query and a.keep_ptr is not None:
            rows = a.keep_ptr[rows]
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


def norm_pair(a: Arguments, grid: Grid) -> None:
    left = a.left_ptr if a.rows_ptr is None else a.left_ptr[a.rows_ptr]
    pairs = (left, a.left_weight_ptr), (a.right_ptr, a.right_weight_ptr)
    both = [rms_normed(x.float(), weight, a.eps) for x, weight in pairs]
    a.out_ptr.view(grid[0], -1).copy_(torch.cat(both, -1))


def layer_shift(a: Arguments, grid: Grid) -> None:
    hidden = a.hidden_ptr.float()
    previous = torch.cat([hidden[:, :1], hidden[:, :-1]], 1)
    a.out_ptr.copy_(F.linear(torch.cat([hidden, previous], -1), a.weight_ptr.float()))


def fp8_linear(a: Arguments, grid: Grid) -> None:
    total = F.linear(a.x_ptr.float(), a.weight_ptr.float()) * a.scale_ptr
    if a.residual_ptr is not None:
        total += a.residual_ptr.view(total.shape).float()
    a.out_ptr.copy_(total)


def best_of_chunk(a: Arguments, grid: Grid) -> None:
    rows, chunks, width = *grid[:2], a.CHUNK
    pad = (0, chunks * width - a.vocab)
    x = F.pad(a.logits_ptr.float() * a.scale, pad, value=float("-inf")).view(rows, chunks, width)
    inside = torch.arange(chunks * width).view(chunks, width) < a.vocab
    largest = x.amax(-1)
    below = torch.where(inside, x - largest[..., None], 0.0)
    weight = torch.where(inside, below.exp(), 0.0)
    sums = a.out.sums.view(rows, 4, chunks).transpose(0, 1)
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


def merge_chunks(a: Arguments, grid: Grid) -> tuple[torch.Tensor, ...]:
    rows = grid[0]
    keys = a.chunks.best.view(rows, -1).topk(a.MERGE.TOP, -1).values
    ordered = (keys >> 32).int()
    values = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32)
    index = 0x7FFFFFFF - (keys & 0x7FFFFFFF)
    largest, weight, spread, sharper = a.chunks.sums.view(rows, 4, -1).unbind(1)
    most = largest.amax(-1)
    lower = largest - most[:, None]
    total = (weight * lower.exp()).sum(-1)
    if a.chunks.beta is None:
        scores = values - (most + total.log())[:, None]
    else:
        sharp = a.chunks.beta.flatten()[torch.arange(rows) // a.chunks.rows_each, None]
        scores = (sharper * (sharp * lower).exp()).sum(-1, keepdim=True).log()
        scores = sharp * (values - most[:, None]) - scores
    index = index[:, : a.WIDTH]
    a.logprob_ptr.view(rows, -1).copy_(scores[:, : a.WIDTH])
    a.token_ptr.view(rows, -1).copy_(index + a.offset_ptr[index])
    return values, most, lower, weight, spread, total


def merge_and_rank(a: Arguments, grid: Grid) -> None:
    values, most, lower, weight, spread, total = merge_chunks(a, grid)
    if a.SCOPE == 0:
        within = most + total.log()
        entropy = total.log() - ((spread + weight * lower) * lower.exp()).sum(-1) / total
    else:
        below = (values - most[:, None])[:, : a.SCOPE]
        mass = below.exp().sum(-1)
        within = most + mass.log()
        entropy = mass.log() - (below.exp() * below).sum(-1) / mass
    features = [
        values[:, : a.LOGPROBS] - within[:, None],
        most[:, None] - values[:, [1, 2, 4]],
        (values[:, :1] - within[:, None]).exp(),
        entropy[:, None],
    ]
    psi = torch.cat(features, -1).to(a.of_state_ptr.dtype).float()
    columns = a.first_ptr[:, a.size : a.size + a.LOGPROBS + 5].float()
    state = F.silu(a.of_state_ptr.float() + psi @ columns.T)
    a.bucket_ptr.copy_((state @ a.second_ptr.float().T).argmax(-1))


def attach_block(a: Arguments, requests: int) -> torch.Tensor:
    """Attach [R, rows, K, B] candidates; returns their keys as starts."""
    grow, given, cells = a.GROW, a.drafts, (requests, a.GROW.ROWS, a.GROW.K, a.GROW.B)
    token, path_hash, key, parent, may_start, _ = a.fields_ptr.unbind()
    score, first = a.score_ptr, 1 + a.done * grow.K * grow.B
    if grow.ROOT:
        for field, value in ((token, 0), (path_hash, ROOT_HASH), (key, 0), (parent, 0), (score, 0)):
            field[:, 0] = value
        node = torch.zeros(requests, 1, dtype=torch.int64)
        total, text, above = score[:, :1], path_hash[:, :1], key[:, :1]
    else:
        node = given.start_node
        total = torch.where(given.start_valid, score.gather(1, node), float("-inf"))
        text, above = path_hash.gather(1, node), key.gather(1, node) & (MAX_DEPTH * DEPTH_ONE)
        if grow.REOPENS:
            begun = torch.where(given.start_valid, text, ROOT_HASH)
            a.started_ptr.flatten(1)[:, a.done - 1 :][:, : grow.S] = begun
    word, width = given.top_token.view(cells), torch.tensor(grow.B)
    if given.bucket is not None:
        width = given.branching[given.bucket].view(cells[:3])[..., None]
    wanted = torch.arange(grow.B) < width.clamp(min=1)
    gain = torch.where(wanted, given.top_logprob.view(cells), float("-inf"))
    gain = gain.fmin(torch.zeros(()))  # 0 for NaN, as in a kernel: padding rows have any value
    totals, texts = torch.empty_like(gain), torch.empty_like(word)
    total, text = total[..., None], text[..., None]
    for k in range(grow.K):
        totals[:, :, k] = total + gain[:, :, k]
        texts[:, :, k] = word[:, :, k] + text * PATH_FACTOR
        total, text = totals[:, :, k, :1], texts[:, :, k, :1]
    index = first + torch.arange(gain[0].numel()).view(cells[1:])
    depth = (1 + torch.arange(grow.K)) * DEPTH_ONE
    rank = (totals.abs().view(torch.int32).long() << 32) + above[..., None, None]
    rank += depth[:, None] + index
    up = (index - torch.arange(grow.B) - grow.B).expand(cells).clone()
    up[:, :, 0] = node[..., None]
    here = slice(first, first + index.numel())
    fields = [(token, word), (path_hash, texts), (key, rank), (parent, up), (score, totals)]
    open_key = torch.where(width > 0, rank, rank | CLOSED)
    if grow.REOPENS:
        open_key[:, 0, -1, 0] |= FIRST
        fields.append((may_start, open_key))
    for field, values in fields:
        field[:, here] = values.flatten(1)
    return open_key.flatten(1)


def attach_and_start(a: Arguments, grid: Grid) -> None:
    open_key, grow, count = attach_block(a, grid[0]), a.GROW, a.COUNT
    token, path_hash, key, _, may_start, _ = a.fields_ptr.unbind()
    final = (a.done + grow.ROWS) * grow.K * grow.B
    if grow.STARTED:
        path_hash, key = path_hash[:, :count], key[:, :count]
        order, winner = candidates.join(key, path_hash)
        best = torch.empty_like(order, dtype=torch.bool)
        best.scatter_(1, order, winner == torch.arange(count))
        started = a.started_ptr.flatten(1)[:, : grow.STARTED]
        free = best & ~(path_hash[..., None] == started[:, None]).any(-1)
        closed = torch.arange(1, count) | CLOSED
        open_key = torch.where(free[:, 1:], may_start[:, 1:count], closed)
    open_key = F.pad(open_key, (0, max(0, grow.S - open_key.shape[1])), value=final | CLOSED)
    chosen = open_key.sort(1).values[:, : grow.S]
    node = chosen & INDEX_BITS
    drafted = (node - 1) // grow.B
    found = node, token.gather(1, node), drafted // grow.K, drafted % grow.K, chosen < CLOSED
    for out, values in zip(a.starts, found, strict=True):
        out.copy_(values)


def attach_and_select(a: Arguments, grid: Grid) -> None:
    attach_block(a, grid[0])
    count, depth = a.SELECT.COUNT, a.GROW.K * a.GROW.BLOCKS
    token, path_hash, key, parent = a.fields_ptr[:4, :, :count].unbind()
    texts = path_hash if a.JOINS else None
    chosen = candidates.select.reference(
        token, parent, a.score_ptr[:, :count], key, texts, a.SELECT.BUDGET, depth
    )
    for name in a.tree._fields[:-1]:
        getattr(a.tree, name).copy_(getattr(chosen, name))
    _, node = candidates.keep(key, texts, a.SELECT.BUDGET)
    a.tree.node.view(node.shape).copy_(node)


def accept_path(a: Arguments, grid: Grid) -> None:
    rows = DrawnRows(a.token_ptr, a.drawn_ptr, a.first_row_ptr, a.req_idx_ptr)
    output, sampled = accept_path_rows.reference(rows, a.trees)
    a.output_ptr.copy_(output)
    a.num_sampled_ptr.copy_(sampled)


def tree_mask(a: Arguments, grid: Grid) -> None:
    requests = grid[0] - 1
    starts = a.rows.node_start[: requests + 1].long()
    counts = starts.diff()
    request = torch.arange(requests).repeat_interleave(counts)
    node = torch.arange(int(starts[-1])) - starts[request]
    row = a.rows.query_start[request + 1] - counts[request] + node
    slots = a.rows.req_idx[:requests].long()
    rows = BatchRows(
        a.rows.position[: a.num_rows], a.rows.query_start, a.rows.seq_len, slots, starts,
        row, slots[request], node,
    )  # fmt: skip
    build_tree_mask.reference(rows, a.depth_ptr, a.ancestors_ptr, a.out)


def on_cpu(function: Callable) -> Callable[[Arguments, Grid], None]:
    """Return a form of the function that replaces the kernel on a CPU."""
    wanted = list(inspect.signature(function).parameters)

    def form(a: Arguments, grid: Grid) -> None:
        given = {name.removesuffix("_ptr"): value for name, value in vars(a).items()}
        function(*(given[name] for name in wanted))

    return form


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


FORMS: dict[str, tuple[Callable[[Arguments, Grid], object], str]] = {
    "kernel_unified_attention": (unified_attention, ""),
    "reshape_and_cache_kernel_flash": (reshape_and_cache, "key_cache_ptr value_cache_ptr"),
    "_tree_attention_kernel": (tree_attention, "into.out"),
    "_rotate_pair_kernel": (rotate_pair, "query.out key.out"),
    "_add_norm_kernel": (add_norm, "total_ptr normed_ptr"),
    "_norm_pair_kernel": (norm_pair, "out_ptr"),
    "_layer_shift_kernel": (layer_shift, "out_ptr"),
    "_fp8_linear_kernel": (fp8_linear, "out_ptr"),
    "_best_of_chunk_kernel": (best_of_chunk, "out.best"),
    "_merge_and_rank_kernel": (merge_and_rank, "logprob_ptr token_ptr"),
    "topk_tokens._merge_kernel": (merge_chunks, "logprob_ptr token_ptr"),
    "expand._attach_and_start_kernel": (
        attach_and_start,
        "starts.node starts.token starts.valid score_ptr",
    ),
    "expand._attach_and_select_kernel": (
        attach_and_select,
        "score_ptr tree.token tree.parent tree.depth tree.logprob tree.size tree.ancestors",
    ),
    "_accept_path_kernel": (accept_path, "trees.path trees.accepted output_ptr num_sampled_ptr"),
    "_build_tree_mask_kernel": (
        tree_mask,
        "out.prefix_len out.mask_words out.tree_start out.position out.node_position",
    ),
    "_penalties_kernel": (on_cpu(sampling.penalties), "logits_ptr"),
    "_min_p_kernel": (on_cpu(sampling.min_p), "logits_ptr"),
    "_temperature_kernel": (on_cpu(sampling.temperature), "logits_ptr"),
    "_gumbel_sample_kernel": (gumbel_sample, "local_argmax_ptr"),
    "_move_path_kernel": (move_path, ""),
}
"""By a kernel's name, or its module's and its own where two have one name: its form, and the
results in which the interpreter has to agree."""
SECONDS = {
    "_merge_splits_kernel": "_tree_attention_kernel",
    "reduce_segments": "kernel_unified_attention",
}
"""Kernels that finish another's work, which a host form has done by itself."""
EVERY = 256
"""One in so many launches of a kernel runs in the interpreter, too."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-4, torch.float16: 2**-7}
"""In half precision a step of the dtype at 8 to 16."""


def known(kernel: Callable) -> str | None:
    """Return the name of a kernel that has a form, or whose work another's form has done."""
    name = kernel.__name__
    names = f"{kernel.__module__.split('.')[-1]}.{name}", name
    return next((each for each in names if each in FORMS or each in SECONDS), None)


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
