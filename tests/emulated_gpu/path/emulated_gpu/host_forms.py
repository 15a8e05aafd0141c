"""Host forms in torch of the kernels in which the interpreter spends its time.

A form gets a launch's arguments by name, and its grid. It may return `NotImplemented`.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import math
import operator
import os
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace as Arguments
from typing import Any

import torch
import torch.nn.functional as F
from vllm_specblock.triton_kernels.attention import tree_attention as attention
from vllm_specblock.triton_kernels.attention.tree_attention_reference import _attend as attend
from vllm_specblock.triton_kernels.drafting.expand import NextStarts, TreeShape
from vllm_specblock.triton_kernels.drafting.expand_numba import CompiledGrowing
from vllm_specblock.triton_kernels.drafting.first_block_metadata import first_block_metadata
from vllm_specblock.triton_kernels.drafting.later_block_metadata import later_block_metadata
from vllm_specblock.triton_kernels.layers import fp8_linear as fp8
from vllm_specblock.triton_kernels.layers.best_of_chunks import top_logprobs
from vllm_specblock.triton_kernels.layers.layer_shift import shift
from vllm_specblock.triton_kernels.layers.lm_and_rank_head import top_and_features
from vllm_specblock.triton_kernels.layers.rope import Rope
from vllm_specblock.triton_kernels.layers.rope import rotate_pair as rotate
from vllm_specblock.triton_kernels.ngram import continuations_numba as continuations
from vllm_specblock.triton_kernels.ngram.occurrences import Texts
from vllm_specblock.triton_kernels.tree.merge_trees_numba import merge_trees_numba
from vllm_specblock.triton_kernels.tree.select_tree import Candidates
from vllm_specblock.triton_kernels.tree.select_tree_numba import select_numba
from vllm_specblock.triton_kernels.verify.accept_path import DrawnRows

from emulated_gpu.triton_launches import tensors
from emulated_gpu.vllm_operators import fa3_fwd, reshape_and_cache_flash
from vllm_specblock.commit import committed_tokens
from vllm_specblock.cpu import batches, gumbel, sampling  # noqa: F401 - fill `REPLACED`
from vllm_specblock.cpu.kernels import REPLACED
from vllm_specblock.engine.draft_allocation import reallocate_drafts
from vllm_specblock.engine.metrics.counters import count_step
from vllm_specblock.engine.runner.tree_states import store_trees
from vllm_specblock.feedback.acceptance_estimator import write_survival
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.tree import DraftTree
from vllm_specblock.verify.accept_path import accept_path_rows
from vllm_specblock.verify.tree_mask import build_tree_mask

Grid = tuple[int, int, int]


def write(results: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    for result, value in zip(results, values, strict=True):
        result.view(value.shape).copy_(value)


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
    seen, out = a.seen, a.into.out
    dense = seen.query_start, seen.seq_len, seen.tree_start, seen.prefix_len
    assert all(each.is_contiguous() for each in dense), "the kernel reads them without strides"
    starts, most = seen.query_start.tolist(), grid[1]
    if most > a.num_requests:
        out[starts[-1] : a.num_tokens] = 0
        most = a.num_requests
    many = a.whole_from is not None and starts[a.whole_from] > starts[a.whole_from - 1]
    if a.whole_from is not None and many != a.READ.WHOLE:
        return
    key_scale, cap = a.key_scale_ptr, a.soft_cap if a.READ.CAPPED else 0.0
    if key_scale is None and a.query_ptr.dtype != torch.float32:
        key_scale = torch.ones(())  # the reference then computes in float32
    scales = key_scale, a.into.value_scale, a.into.sinks, a.query_scale_ptr
    scores = attention.ScoreOptions(a.scale, cap, *scales)
    lengths = [stop - first for first, stop in itertools.pairwise(starts[: most + 1])]
    for length in set(lengths):
        if length and a.above < length * a.TILE.GROUP <= a.up_to:
            chosen = torch.tensor([i for i, each in enumerate(lengths) if each == length])
            rows = seen.query_start[chosen][:, None] + torch.arange(length)
            attend_alike(a, chosen, rows, scores)


def attend_alike(a: Arguments, chosen: torch.Tensor, rows: torch.Tensor, scores: Any) -> None:
    """Attend some requests of Q rows each; rows: [R, Q]."""
    seen, cache = a.seen, a.kv_cache_ptr
    words = seen.mask_words.view(torch.int64)[rows]  # [R, Q, W]
    counts = seen.seq_len[chosen].clamp(max=a.max_seq_len)
    entry = torch.arange(max(1, int(counts.max())))
    visible = entry < seen.prefix_len[rows][..., None]  # [R, Q, L]
    if seen.prefix_from is not None:
        visible &= entry >= seen.prefix_from[rows][..., None]
    column = (entry - seen.tree_start[chosen][:, None])[:, None]
    word = (column // 64).clamp(0, words.shape[2] - 1).expand(visible.shape)
    inside = (column >= 0) & (column < 64 * words.shape[2])
    visible |= (words.gather(2, word) >> column % 64 & 1 > 0) & inside
    visible &= entry < counts[:, None, None]
    seen_by_any = visible.any(1)
    # Other entries may be unwritten, and 0 · NaN is NaN. Torch does not index float8.
    block = torch.where(seen_by_any, seen.block_table[chosen].long()[:, entry // cache.shape[2]], 0)
    memory = cache.view(torch.uint8) if cache.itemsize == 1 else cache
    entries = memory[block, :, entry % cache.shape[2]]
    entries = entries.masked_fill(~seen_by_any[..., None, None], 0).view(cache.dtype)
    # One call with the heads of all requests. Values follow their keys, or begin them.
    count, (_, heads, width), size = len(rows), a.query_ptr.shape, a.into.out.shape[2]
    begin = width if entries.shape[-1] > width else 0
    query = a.query_ptr[rows].transpose(1, 2).flatten(0, 1)
    entries = entries.transpose(1, 2).flatten(0, 1)
    key, value = entries[..., :width], entries[..., begin : begin + size]
    longest = (float(x.float().norm(dim=-1).max()) for x in (query, key))
    a.rounding = max(getattr(a, "rounding", 0.0), ROUNDING * scores.scale * math.prod(longest))
    if scores.sinks is not None:
        scores = scores._replace(sinks=scores.sinks.repeat(count))
    found = attend(query, key, value, visible.repeat_interleave(heads, 0), scores)
    found = found.unflatten(0, (count, heads)).transpose(1, 2)
    a.into.out[rows] = found.to(a.into.out.dtype)


def rotate_pair(a: Arguments, grid: Grid) -> None:
    position = a.base_ptr[:, None] + torch.arange(a.ROPE.EACH)
    angle = position.float()[..., None, None] * a.turn_ptr
    rope = Rope(a.base_ptr, a.turn_ptr, (angle.cos(), angle.sin()))
    both, norms = (a.query, a.key), None
    if a.query.norm is not None:
        norms = [partial(rms_normed, weight=of.norm, eps=a.eps) for of in both]
    states = (of.source.unflatten(0, (-1, a.ROPE.EACH)) for of in both)
    write((of.out for of in both), rotate(*states, rope, a.keep_ptr, norms))


def rms_normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return wide.to(x.dtype)


def add_norm(a: Arguments, grid: Grid) -> None:
    left = a.left_ptr if a.keep_ptr is None else a.left_ptr[a.keep_ptr]
    a.total_ptr.view(a.right_ptr.shape).copy_(left.float() + a.right_ptr.float())
    a.normed_ptr.copy_(rms_normed(a.total_ptr, a.weight_ptr, a.eps))


def norm_pair(a: Arguments, grid: Grid) -> None:
    left = a.left_ptr if a.rows_ptr is None else a.left_ptr[a.rows_ptr]
    pairs = (left, a.left_weight_ptr), (a.right_ptr, a.right_weight_ptr)
    both = [rms_normed(x, weight, a.eps) for x, weight in pairs]
    a.out_ptr.view(grid[0], -1).copy_(torch.cat(both, -1))


def gated_norm(a: Arguments, grid: Grid) -> None:
    assert a.IS_RMS_NORM and a.NORM_BEFORE_GATE and a.B is None and grid[1] == 1
    gate = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}[a.ACTIVATION]
    a.Y.copy_(rms_normed(a.X.float(), a.W, a.eps) * gate(a.Z.float()))


def layer_shift(a: Arguments, grid: Grid) -> None:
    a.out_ptr.copy_(shift.reference(a.hidden_ptr.float(), a.weight_ptr.float()))


def fp8_linear(a: Arguments, grid: Grid) -> None:
    residual = None if a.residual_ptr is None else a.residual_ptr.view(a.out_ptr.shape)
    x = a.x_ptr.float()
    a.out_ptr.copy_(fp8.fp8_linear.reference(x, a.weight_ptr, a.scale_ptr, residual))


def merge_chunks(a: Arguments, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits, and the best of them; the chunks' launch has computed nothing."""
    logits, beta = a.first.logits_ptr.float() * a.first.scale, a.chunks.beta
    ordered = torch.where(logits.isnan(), float("-inf"), logits)
    values, index = ordered.sort(dim=-1, descending=True, stable=True)
    index = index[:, : a.WIDTH]
    if beta is not None:
        beta = beta.flatten().repeat_interleave(a.chunks.rows_each)
    logprob = top_logprobs(logits, values[:, : a.WIDTH], beta)
    offset = 0 if a.offset_ptr is None else a.offset_ptr[index]
    write((a.logprob_ptr, a.token_ptr), (logprob, index + offset))
    return logits, values


def merge_and_rank(a: Arguments, grid: Grid) -> None:
    logits, _ = merge_chunks(a, grid)
    _, psi = top_and_features(logits, a.LOGPROBS, a.SCOPE or None)
    psi = psi.to(a.of_state_ptr.dtype).float()
    state = F.silu(a.of_state_ptr.float() + psi @ a.first_ptr[:, a.size :].float().T)
    a.bucket_ptr.copy_((state @ a.second_ptr.float().T).argmax(-1))


def grow(a: Arguments, grid: Grid) -> None:
    """Attach a block by the loops for CPUs, which keep the same tensors."""
    made, given, last = a.GROW, a.drafts, hasattr(a, "tree")
    shape = TreeShape(
        made.K, made.BLOCKS, made.S, tuple(given.branching.tolist()),
        budget=a.SELECT.BUDGET if last else 1,
        by_level=not (a.JOINS if last else made.REOPENS),
    )  # fmt: skip
    growing = CompiledGrowing(shape, given.branching, grid[0])
    growing.fields, growing.score, growing.started = a.fields_ptr, a.score_ptr, a.started_ptr
    starts = None
    if not made.ROOT:
        growing.block = 1 + (a.done - 1) // made.S
        starts = NextStarts(given.start_node, None, None, None, given.start_valid)
    cells = grid[0], made.ROWS, made.K, made.B
    gain = given.top_logprob.view(cells).fmin(torch.zeros(()))  # 0 for NaN, as in a kernel
    bucket = None if given.bucket is None else given.bucket.view(cells[:3])
    found = growing.attach(starts, gain, given.top_token.view(cells), bucket)
    write(a.tree if last else a.starts, found)


def merge(a: Arguments, grid: Grid) -> None:
    sizes = a.SELECT.BUDGET, a.SELECT.MAX_DEPTH
    made, *rest = merge_trees_numba(a.first, a.second, a.JOINS, *sizes)
    write((*a.tree[:-1], a.origin_ptr, a.agreed_ptr), (*made[:-1], *rest))


def follow(a: Arguments, grid: Grid) -> None:
    score, (token, parent, key) = a.score_ptr, a.fields_ptr[:3].zero_()
    given = (getattr(a, f"{name}_ptr").contiguous().numpy() for name in Texts._fields)
    continuations._follow(*given, a.HOW, *(x.numpy() for x in (token, parent, score, key)))
    write(a.tree, select_numba(Candidates(token, parent, score, key, None), a.HOW.budget))


def accept_path(a: Arguments, grid: Grid) -> None:
    rows = DrawnRows(a.token_ptr, a.drawn_ptr, a.first_row_ptr, a.req_idx_ptr)
    write((a.output_ptr, a.num_sampled_ptr), accept_path_rows.reference(rows, a.trees))


def by_reference(op: Any, names: str) -> Callable[[Arguments, Grid], None]:
    """Return a form by an op's torch reference, which takes these of the kernel's arguments."""

    def form(a: Arguments, grid: Grid) -> None:
        found = op.reference(*(getattr(a, name) for name in names.split()))
        if found is not None:
            write(a.out, found)

    return form


def committed(a: Arguments, grid: Grid) -> None:
    a.num_rows = a.last_row + 1
    by_reference(committed_tokens, "step num_rows")(a, grid)


def first_block(a: Arguments, grid: Grid) -> None:
    a.rows = Arguments(**{name.removesuffix("_ptr"): value for name, value in vars(a).items()})
    by_reference(first_block_metadata, "rows K")(a, grid)


def later_block(a: Arguments, grid: Grid) -> None:
    a.block = 2 + (a.first_row - 1) // a.S
    names = "starts committed kept block TOKENS max_position BY_LEVEL"
    by_reference(later_block_metadata, names)(a, grid)


def tree_mask(a: Arguments, grid: Grid) -> None:
    starts, first = (x[: grid[0]].long() for x in (a.rows.query_start, a.rows.node_start))
    assert first[0] == 0 and starts[-1] <= a.num_rows
    each = torch.arange(grid[0] - 1).repeat_interleave(first.diff())  # the request of a node
    place = torch.arange(int(first[-1]))
    a.rows = a.rows._replace(
        node_start=first,
        row=place + starts[1:][each] - first[1:][each],
        row_req_idx=a.rows.req_idx[each],
        node=place - first[each],
    )
    by_reference(build_tree_mask, "rows depth_ptr ancestors_ptr out")(a, grid)


def learn(a: Arguments, grid: Grid) -> None:
    calibration, verified = DraftCalibration("cpu"), VerifiedTrees(*a.result)
    calibration.rates, calibration.log, calibration.trees = a.rates, a.log_ptr, a.trees_ptr
    if a.own_ptr is not None:
        calibration.own, calibration.own_trees = a.own_ptr, a.own_trees_ptr
    a.beta_ptr.copy_(calibration.learn_from(verified, a.BIT >> 1))


def store(a: Arguments, grid: Grid) -> object:
    if (a.req_idx_ptr < 0).any():  # a captured step has rows without a request
        return NotImplemented
    a.tree = DraftTree(*a.new[:-1], a.origin_ptr)
    names = "req_idx_ptr tree kept chain_ptr paused_ptr token_ptr"
    return store_trees.reference(*operator.attrgetter(*names.split())(a))


def block_table(a: Arguments, pointers: torch.Tensor, group: int, rows: Any) -> torch.Tensor:
    shape = max((0, *rows)) + 1, int(a.block_table_strides[group])
    memory = (ctypes.c_int32 * math.prod(shape)).from_address(int(pointers[group]))
    return torch.frombuffer(memory, dtype=torch.int32).view(shape)


def slot_mappings(a: Arguments, grid: Grid) -> object:
    if a.CP_SIZE > 1 or not a.slot_mapping_enabled.all():
        return NotImplemented
    starts, slots = a.query_start_loc.tolist(), a.idx_mapping.tolist()[: grid[1] - 1]
    for group, size in zip(range(grid[0]), a.block_sizes.tolist()):
        table = block_table(a, a.block_table_ptrs, group, slots)
        out = a.slot_mappings_ptr[group]
        out[: a.max_num_tokens] = a.PAD_ID
        for (first, end), slot in zip(itertools.pairwise(starts), slots):
            if slot >= 0:
                at = a.pos[first:end]
                out[first:end] = table[slot, at // size].long() * size + at % size
    return None


def gather_block_tables(a: Arguments, grid: Grid) -> object:
    if getattr(a, "MASK_SLIDING_WINDOW", False):
        return NotImplemented
    slots = a.batch_idx_to_req_idx.tolist()[: a.num_reqs]
    for group in range(grid[0]):
        table = block_table(a, a.src_block_table_ptrs, group, slots)
        out = block_table(a, a.dst_block_table_ptrs, group, range(grid[1]))
        out[len(slots) :] = 0
        for row, slot in enumerate(slots):
            count = int(a.num_blocks_ptr[group, slot])
            out[row, :count] = table[slot, :count]
    return None


def on_cpu(function: Callable, compiled: bool) -> Callable[[Arguments, Grid], object]:
    """Return a form of the function that replaces the kernel on a CPU."""
    wanted = list(inspect.signature(function).parameters)

    def form(a: Arguments, grid: Grid) -> object:
        given = {name.removesuffix("_ptr"): value for name, value in vars(a).items()}
        values = [given[name] for name in wanted]
        if compiled:
            values = [x.numpy() if isinstance(x, torch.Tensor) else x for x in values]
        try:
            return function(*values)
        except NotImplementedError:  # of some arguments
            return NotImplemented

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


def adapted_rows(a: Arguments, grid: Grid) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the slot of each LoRA adapter in a launch, and its rows."""
    slots, counts = a.lora_ids.tolist(), a.num_tokens_per_lora.tolist()
    for place, slot in enumerate(slots[: grid[2]]):
        if slot >= 0:
            first = int(a.lora_token_start_loc[place])
            yield slot, a.token_indices_sorted_by_lora_ids[first : first + counts[place]].long()


def adapter(a: Arguments, part: int, start: int, rows: int, like: torch.dtype) -> torch.Tensor:
    """Return the weight [rows, K] that starts so many elements after that of the first slot."""
    pointer = a.lora_ptr.data_ptr() if a.SLICE_NUM == 1 else int(a.lora_ptr[part])
    memory = ctypes.string_at(pointer + start * like.itemsize, rows * a.K * like.itemsize)
    return torch.frombuffer(bytearray(memory), dtype=like).view(rows, a.K).float()


def lora_shrink(a: Arguments, grid: Grid) -> None:
    assert not a.STORE_PARTIALS
    for (slot, rows), part in itertools.product(adapted_rows(a, grid), range(grid[1])):
        down = adapter(a, part, slot * a.lora_d0_stride, a.N, a.input_ptr.dtype)
        a.out_ptr[part, rows] = a.input_ptr[rows].float() @ down.T * a.scaling


def lora_expand(a: Arguments, grid: Grid) -> None:
    assert a.ADD_INPUTS
    kind = a.lora_ptr.dtype if a.SLICE_NUM == 1 else a.out_ptr.dtype
    sizes, starts, strides = (
        [x] * grid[1] if isinstance(x, int) else x.tolist()
        for x in (a.output_hs_ptr, a.slice_start_loc, a.ls_d0_ptr)
    )
    for (slot, rows), part in itertools.product(adapted_rows(a, grid), range(grid[1])):
        up = adapter(a, part, slot * strides[part], sizes[part], kind)
        added = (a.input_ptr[part, rows].to(kind).float() @ up.T).to(kind)
        columns = slice(starts[part], starts[part] + sizes[part])
        a.out_ptr[rows, columns] = a.out_ptr[rows, columns] + added


ALL = "*"
"""Of results: each tensor in the arguments."""
TREE = "tree.token tree.parent tree.depth tree.logprob tree.size tree.ancestors"
FORMS: dict[str, tuple[Callable[[Arguments, Grid], object], str]] = {
    "kernel_unified_attention": (unified_attention, ""),
    "reshape_and_cache_kernel_flash": (reshape_and_cache, "key_cache_ptr value_cache_ptr"),
    "_tree_attention_kernel": (tree_attention, "into.out"),
    "_rotate_pair_kernel": (rotate_pair, "query.out key.out"),
    "_add_norm_kernel": (add_norm, "total_ptr normed_ptr"),
    "_norm_pair_kernel": (norm_pair, "out_ptr"),
    "layer_norm_fwd_kernel": (gated_norm, "Y"),
    "_layer_shift_kernel": (layer_shift, "out_ptr"),
    "_fp8_linear_kernel": (fp8_linear, "out_ptr"),
    "_merge_and_rank_kernel": (merge_and_rank, "logprob_ptr token_ptr"),
    "topk_tokens._merge_kernel": (merge_chunks, "logprob_ptr token_ptr"),
    # Starts that are not valid differ.
    "expand._attach_and_start_kernel": (grow, "starts.valid score_ptr"),
    "expand._attach_and_select_kernel": (grow, f"score_ptr {TREE}"),
    "merge_trees._merge_kernel": (merge, f"{TREE} origin_ptr agreed_ptr"),
    "_follow_kernel": (follow, f"score_ptr {TREE}"),
    "_accept_path_kernel": (accept_path, "trees.path trees.accepted output_ptr num_sampled_ptr"),
    "_first_block_metadata_kernel": (first_block, ALL),
    "_later_block_metadata_kernel": (later_block, ALL),
    "_build_tree_mask_kernel": (tree_mask, ALL),
    "_committed_tokens_kernel": (committed, ALL),
    "_learn_kernel": (learn, ALL),
    "_count_step_kernel": (by_reference(count_step, "total_ptr result drafted"), ALL),
    "_write_survival_kernel": (
        by_reference(write_survival, "req_idx_ptr score_ptr temperature_ptr seen steps_ptr later"),
        ALL,
    ),
    "_reallocate_drafts_kernel": (
        by_reference(reallocate_drafts, "drafts req_idx_ptr budget"),
        "drafts.logit_start drafts.row_start",
    ),
    "_store_trees_kernel": (store, "kept.accepted"),  # best paths may differ at ties
    "_compute_slot_mappings_kernel": (slot_mappings, "slot_mappings_ptr"),
    "_gather_block_tables_kernel": (gather_block_tables, ""),
    "_move_path_kernel": (move_path, ""),
    "_lora_shrink_kernel": (lora_shrink, "out_ptr"),
    "_lora_expand_kernel": (lora_expand, "out_ptr"),
}
"""By a kernel's name, or its module's and its own where two have one name: its form, and the
results in which the interpreter has to agree."""
for path, of in REPLACED.items():
    FORMS[".".join(path.split(".")[-2:])] = on_cpu(*of), ALL
# It writes a row's best into the first block's place.
FORMS["gumbel._gumbel_sample_kernel"] = FORMS["gumbel._gumbel_sample_kernel"][0], ""
SECONDS = {
    "_merge_splits_kernel": "_tree_attention_kernel",
    "reduce_segments": "kernel_unified_attention",
}
"""Kernels that finish another's work, which a host form has done by itself."""
FIRST = {"_best_of_chunk_kernel": "out.best", "_occurrences_kernel": "found_ptr"}
"""Kernels whose work the form of the kernel after them does, and the result by which that finds
their launch."""
EVERY = int(os.environ.get("EMU_CHECK_EVERY", 256))
"""One in so many launches of a kernel runs in the interpreter, too."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-4, torch.float16: 2**-7}
"""In half precision a step of the dtype at 8 to 16."""
ROUNDING = 2**-22
"""Of a float32 sum, relative to its largest term. It counts where weights are far too large."""
FP8_TOLERANCE = 2**-3
"""Of weights in e4m3, rounded relative to the largest one so far, or to the largest of all."""


@functools.cache
def known(kernel: Callable) -> str | None:
    """Return the name of a kernel that has a form, or whose work another's form has done."""
    name = kernel.__name__
    names = f"{kernel.__module__.split('.')[-1]}.{name}", name
    return next((each for each in names if each in (*FORMS, *SECONDS, *FIRST)), None)


draw = random.Random(0)
unfinished: dict[str, list[tuple[torch.Tensor, torch.Tensor, float]]] = {}
"""By a first kernel's name, if its last launch was interpreted: its results, and the host's."""

begun: dict[int, tuple[Arguments, bool]] = {}
"""By the address of its results: a launch of `FIRST`, and whether it was interpreted."""


@torch.inference_mode()  # as what they write to may be made in it
def run(name: str, given: dict[str, Any], grid: Grid, interpret: Callable[[], None]) -> None:
    """Run a kernel's host form; now and then the interpreter, too."""
    if name in SECONDS:
        pairs = unfinished.pop(SECONDS[name], None)
        if pairs is not None:
            interpret()
            compare(name, pairs)
        return
    unfinished.pop(name, None)
    arguments, interprets = Arguments(**given), not draw.randrange(EVERY)
    if name in FIRST:
        begun[operator.attrgetter(FIRST[name])(arguments).data_ptr()] = arguments, interprets
        return interpret() if interprets else None
    of_first = arguments.chunks.best if "chunks" in given else given.get("found_ptr")
    if of_first is not None:
        arguments.first, interprets = begun.pop(of_first.data_ptr())
    form, results = FORMS[name]
    if name == "kernel_unified_attention" or not interprets:
        if form(arguments, grid) is NotImplemented:
            interpret()
        return
    found = [*tensors(tuple(given.values()))]
    if results != ALL:
        found = [operator.attrgetter(result)(arguments) for result in results.split()]
    before = [tensor.clone() for tensor in found]
    if not found or form(arguments, grid) is NotImplemented:
        return interpret()
    rounded = given.get("query_scale_ptr") is not None
    least = max(FP8_TOLERANCE * rounded, getattr(arguments, "rounding", 0.0))
    pairs = [(tensor, tensor.clone(), least) for tensor in found]
    for tensor, value in zip(found, before, strict=True):
        tensor.copy_(value)
    interpret()
    if name in SECONDS.values() and not given["READ"].WHOLE:
        unfinished[name] = pairs
    else:
        compare(name, pairs)


def compare(name: str, pairs: list[tuple[torch.Tensor, torch.Tensor, float]]) -> None:
    for interpreted, host, least in pairs:
        bound = max(least, TOLERANCE.get(host.dtype, 0.0))
        largest = float(host.double().nan_to_num(0, 0, 0).abs().max()) if host.numel() else 0
        absolute = max(bound, 4 * ROUNDING * largest) if host.is_floating_point() else bound
        close = torch.isclose(interpreted, host, rtol=bound, atol=absolute, equal_nan=True)
        if not close.all():
            apart = (interpreted.double() - host.double()).abs().max()
            raise AssertionError(f"{name}: {(~close).sum()} results differ, {apart=} {largest=}")
        interpreted.copy_(host)  # equal steps stay equal, whichever of them are interpreted
