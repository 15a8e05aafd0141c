"""The kernels compile for a GPU, which needs Triton's compiler but no GPU.

The interpreter accepts much that the compiler refuses, so a machine without a GPU would otherwise
find out last.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.compiled import RELOADS, SHARED, Compile, resources
from vllm_specblock.triton_kernels.attention import attention_schedule, tree_attention
from vllm_specblock.triton_kernels.drafting import (
    expand,
    first_block_metadata,
    later_block_metadata,
)
from vllm_specblock.triton_kernels.feedback import (
    calibrate_drafts,
    count_step,
    device_clock,
    record_step,
    write_survival,
)
from vllm_specblock.triton_kernels.feedback.record_step import SlabTensors, StepToRecord
from vllm_specblock.triton_kernels.kv_cache import commit, committed_tokens, mask_holes
from vllm_specblock.triton_kernels.layers import (
    best_of_chunks,
    fp8_linear,
    layer_shift,
    lm_and_rank_head,
    norms,
    rope,
    topk_tokens,
)
from vllm_specblock.triton_kernels.ngram import continuations, occurrences
from vllm_specblock.triton_kernels.tree import merge_trees, select_tree, store_tree
from vllm_specblock.triton_kernels.verify import accept_path, build_tree_mask, reallocate_drafts

from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.tree import DraftTree

OWN_PROCESS = "the interpreter runs in this process; `make test` compiles in one of its own"
SHARED_LIMIT = min(SHARED.values())
FLOAT8, HOPPER = 89, 90
"""First architecture with float8, and the one with FlashAttention 3."""
SCALES = "query_scale", "key_scale", "value_scale"


@pytest.fixture
def capability(request) -> int:
    return request.config.getoption("sm", 90)


@pytest.fixture
def compiler(monkeypatch, request, capability):
    """Swap the kernels of modules for a `Compile` each; all of them have to be launched."""
    triton = pytest.importorskip("triton")
    if "nvidia" not in pytest.importorskip("triton.backends").backends:
        pytest.skip("this Triton cannot compile for NVIDIA GPUs")
    jitted, swapped = triton.runtime.jit.JITFunction, []
    if not isinstance(triton.language.max, jitted):
        pytest.skip(OWN_PROCESS)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(request.config.cache.mkdir("triton")))

    def swap(*modules, limit=SHARED_LIMIT, may_spill=True) -> list[Compile]:
        made = []
        for module in modules:
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                if not isinstance(getattr(module, name), jitted):
                    pytest.skip(OWN_PROCESS)
                made.append(Compile(getattr(module, name), capability))
                monkeypatch.setattr(module, name, made[-1])
        swapped.extend((each, limit, may_spill) for each in made)
        return made

    yield swap
    for each, limit, may_spill in swapped:
        assert each.compiled, each.kernel
        assert all(compiled.metadata.shared <= limit for compiled in each.compiled)
        took = [] if may_spill else [resources(compiled) for compiled in each.compiled]
        print(f"sm_{capability}", each.kernel.__name__, *took)
        assert all(one["in_loops"] <= RELOADS.get(capability, 0) for one in took)


def whole(*shape: int) -> torch.Tensor:
    """Integers as most tensors hold them; a column of a table with `[:, 0]`."""
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("rows", "dtype"), [(2, torch.bfloat16), (20, torch.bfloat16), (64, torch.float32)], ids=str
)
def test_layer_shift_compiles(compiler, rows, dtype):
    compiler(layer_shift)
    weight = torch.empty(64, 128, dtype=dtype)
    layer_shift.layer_shift_triton(torch.empty(rows, 5, 64, dtype=dtype), weight)


ONE = torch.ones(())
LATENT = 576
"""Size of DeepSeek's keys, whose first 512 numbers are their values."""


@pytest.mark.parametrize(
    ("dtype", "head_size", "queries", "smallest", "rare"),
    [
        (torch.bfloat16, LATENT, 1, False, {}),
        (torch.bfloat16, LATENT, 61, False, {}),
        (torch.bfloat16, 128, 61, False, {}),
        (torch.bfloat16, 64, 1, True, {"window": True, "soft_cap": 50.0}),
        (torch.bfloat16, 64, 61, False, {"sinks": torch.ones(32)}),
        (torch.bfloat16, 128, 61, True, {"key_scale": ONE, "value_scale": ONE}),
        (torch.float8_e4m3fn, 128, 61, False, dict.fromkeys(SCALES, ONE)),
        (torch.bfloat16, 256, 61, True, {}),
        (torch.float32, 96, 61, True, {}),
    ],
    ids=str,
)
def test_tree_attention_compiles(
    compiler, monkeypatch, capability, dtype, head_size, queries, smallest, rare
):
    if "key_scale" in rare and capability < FLOAT8:
        pytest.skip("this GPU has no float8")
    if "query_scale" in rare and capability != HOPPER:
        pytest.skip("no FlashAttention 3")
    limit = SHARED_LIMIT if smallest else SHARED[capability]
    monkeypatch.setattr(attention_schedule, "shared_memory", lambda device: limit)
    monkeypatch.setattr(attention_schedule, "generation", lambda device: capability // 10)
    compiler(tree_attention, limit=limit, may_spill=smallest or not {*rare} <= {*SCALES})
    scores = dict(rare)
    cache_dtype = torch.float8_e4m3fn if "key_scale" in rare else dtype
    kv_heads, width, value_size = 8, 2 * head_size, head_size
    if head_size == LATENT:
        kv_heads, width, value_size = 1, head_size, 512
    cache = torch.empty(8, 16, kv_heads, width, dtype=cache_dtype).transpose(1, 2)
    window = scores.pop("window", None)
    scores = tree_attention.ScoreOptions(0.1, **scores)
    for requests in (1, 32):  # a program for each split, and one for all of them
        rows = torch.zeros(requests * queries + 1, dtype=torch.int32)
        query = torch.empty(requests * queries, 32, head_size, dtype=dtype)
        seen = tree_attention.VisibleEntries(
            block_table=torch.zeros(requests, 2048, dtype=torch.int32),
            query_start=rows[: requests + 1],
            seq_len=rows[:requests],
            prefix_len=rows[:-1],
            prefix_from=rows[:-1] if window else None,
            mask_words=whole(requests * queries, 1),
            tree_start=rows[:requests],
        )
        bounds = tree_attention.BatchBounds({queries}, 32768, 0)
        kept = torch.bfloat16 if query.itemsize == 1 else dtype
        out = query.new_empty(*query.shape[:2], value_size, dtype=kept)
        tree_attention.tree_attention_triton(query, cache, seen, bounds, scores, out)


@pytest.mark.parametrize("width", [3, 8192])
def test_cache_kernels_compile(compiler, width):
    compiler(commit, mask_holes)
    caches = [torch.empty(4, 2, 16, 256, dtype=torch.bfloat16) for _ in range(2)]
    path, row = whole(2, 12), whole(2)
    rows = commit.AcceptedRows(path[:, 0], path[:, 0], path, row.int())
    commit.move_path_triton(commit.KVCacheSet(caches), path.flatten(), rows, 24)
    table = torch.zeros(2, width, dtype=torch.int32)
    mask_holes.mask_holes_triton(mask_holes.RowsToWrite(whole(9), table, *[row] * 4), 16)


@pytest.mark.parametrize(
    ("dtype", "vocab", "scope", "width", "sharp"),
    [(torch.bfloat16, 32_000, 20, 10, True), (torch.float32, 152_064, None, 32, False)],
)
def test_reading_heads_compiles(compiler, dtype, vocab, scope, width, sharp):
    compiler(best_of_chunks, lm_and_rank_head, topk_tokens)
    sizes = (64 + 15, 256), (256, 4)
    first, second = (torch.nn.Linear(*size, bias=False, dtype=dtype) for size in sizes)
    head = torch.nn.Sequential(first, torch.nn.SiLU(), second)
    normed, logits = torch.empty(2, 4, 64, dtype=dtype), torch.empty(2, 4, vocab, dtype=dtype)
    offset, beta = whole(vocab), torch.ones(2) if sharp else None
    given = lm_and_rank_head.DraftLogits(normed, logits, offset, head, 10, scope, beta)
    lm_and_rank_head.lm_and_rank_head_triton(given)
    topk_tokens.topk_tokens_triton(logits, offset if sharp else None, width, 0.5, beta)


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [(torch.bfloat16, 4), (torch.float16, 36), (torch.bfloat16, 2000), (torch.float32, 2000)],
    ids=str,
)
def test_fp8_linear_compiles(compiler, capability, dtype, rows):
    if capability < FLOAT8:
        pytest.skip("this GPU has no float8")
    compiler(fp8_linear)
    weight = torch.empty(4096, 4096, dtype=torch.float8_e4m3fn)
    x = torch.empty(rows, 4096, dtype=dtype)
    fp8_linear.fp8_linear_triton(x, weight, torch.ones(4096), x if rows < 100 else None)


def result_of(num_nodes: int, known: torch.dtype = torch.int64) -> VerifiedTrees:
    """Of 3 requests; `known`: of what an eager step and a graph have in other dtypes."""
    table, score = torch.zeros(3, 3, dtype=known), torch.zeros(5, num_nodes)
    slot = table[0] if known == torch.int32 else table[:, 0]
    of_requests = slot, slot, torch.zeros(3, dtype=torch.int32), whole(3, 9)
    return VerifiedTrees(*of_requests, score, score.to(torch.uint8), score[:, 0].contiguous())


@pytest.mark.parametrize(
    ("num_nodes", "known"), [(12, torch.int64), (60, torch.int32), (256, torch.int64)], ids=str
)
def test_committing_and_feedback_compile(compiler, num_nodes, known):
    """Calibration with requests told apart, and without; counts of one, two or no drafters."""
    compiler(committed_tokens, calibrate_drafts, count_step, write_survival, record_step)
    result, heat, rows = result_of(num_nodes, known), torch.zeros(5), whole(39)
    for own in (heat, heat[:0]):
        rates = calibrate_drafts.LearnRates(-1.0, 1.0, 20.0, 500.0, 1.4, 10.0, 50.0)
        state = heat[:2], heat[2:4], own, own
        calibrate_drafts.update_calibration_triton(*state, 0, result, rates)
    flag, size = heat[:3] > 0, result.accepted
    one = count_step.Drafted(whole(3, 3)[:, 0], None, None, size, None)
    two = count_step.Drafted(flag, flag, flag, size, heat[:3], size, None)
    for drafted in (None, one, two):
        count_step.count_step_triton(whole(30), result, drafted)
    counts, steps = torch.zeros(2, 32), torch.zeros(4, num_nodes)
    seen = write_survival.SeenNodes(counts, counts, counts[0], 4.0, 4)
    later = write_survival.Later(whole(5, num_nodes + 1), result.origin, 4, 2)
    given = result.req_idx, result.score, heat[:3], seen, steps, later
    write_survival.write_survival_triton(*given)
    dtype = torch.float32 if num_nodes == 12 else torch.bfloat16
    slabs, states = SlabTensors.empty(2, 256, 4096, 5, dtype), torch.zeros(7, 4096, dtype=dtype)
    committed = *[rows] * 5, rows[:3], (states,) * 3, states
    recorded = result._replace(score=None, temperatures=None), result.origin.int()
    record_step.record_step_triton(slabs, StepToRecord(*committed, *recorded))
    of_paths = rows[:3], rows[:3], whole(3, 13), rows[:3].int()
    text = torch.zeros(5, 100, dtype=torch.int32)
    step = committed_tokens.StepRows(
        *of_paths, rows, rows, rows[:4].int(), rows, rows, result.req_idx, text, heat, rows, rows
    )
    committed_tokens.committed_tokens_triton(step, 180)


@pytest.mark.parametrize(("count", "joins"), [(577, True), (130, False)])
def test_select_compiles(compiler, count, joins):
    compiler(select_tree, may_spill=False)
    key = whole(2, count)
    given = select_tree.Candidates(key, key, key.float(), key, key if joins else None)
    select_tree.select_triton(given, 60, 12)


LEVELS = (3, 10, 8), (2, 1, 1), (3, 10, 1), (2, 32, 32)
GROWN = [expand.TreeShape.levels(*sizes, 60) for sizes in LEVELS]


@pytest.mark.parametrize("shape", [expand.TreeShape(4, 3, 4, (4, 4, 4, 4), 60), *GROWN], ids=str)
def test_growth_compiles(compiler, shape):
    starting, _ = compiler(expand, may_spill=False)
    growing, starts = expand.Growing(shape, whole(4), 2), None
    for rows in [1] + [shape.num_starts] * (shape.num_blocks - 1):
        token = whole(2, rows, shape.block_size, shape.width)
        bucket = None if shape.by_level else token[..., 0]
        starts = growing.attach(starts, token.float(), token, bucket)
    assert len(starting.compiled) == shape.num_blocks - 1


@pytest.mark.parametrize(("size", "starts", "mask_words"), [(1, 10, 1), (4, 4, 1), (8, 40, 15)])
def test_metadata_of_blocks_compiles(compiler, size, starts, mask_words):
    compiler(first_block_metadata, later_block_metadata)
    first = whole(20)
    of_step = {"position": first, "index": first[1:], "kv_slot": first, "last": first[:3]}
    step = SimpleNamespace(**of_step, row_start=first[:4].int())
    first_block_metadata.first_block_metadata_triton(step, size)
    row, known, rows = whole(2, starts), whole(5, 3), 1 + 3 * starts
    seen = whole(rows, size, mask_words), whole(2, rows), whole(2, rows, mask_words)
    for last, reach in ((known[:2, 0], None), (row[:, 0], whole(2, 5))):
        limits = 3, 16, 4096, reach is not None
        later_block_metadata.later_block_metadata_triton(
            expand.NextStarts(row, row, row, row, row.bool()),
            later_block_metadata.CommittedRows(known[:, 1], known[:, 1], last, whole(2, 9).int()),
            later_block_metadata.DraftedRows(*seen, reach),
            *limits,
        )


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 128), (torch.float32, 96)], ids=str)
def test_rope_and_norms_compile(compiler, dtype, size):
    rotating, *_ = compiler(rope, norms)
    both = torch.empty(3, 5, 48, size, dtype=dtype)  # as a product leaves them
    query, key = both[..., :32, :], both[..., 32:40, :]
    keep, norm = whole(3, 3)[:, 0], torch.nn.RMSNorm(size, 1e-6, dtype=dtype)
    angles = rope.Rope(keep, torch.empty(size), None)
    rope.rotate_pair(query, key, angles)
    rope.rotate_pair(query[:2], key, angles, keep[:2], [norm, norm])
    # Quick sines are far off at far positions.
    assert not any("sin.approx" in each.asm["ptx"] for each in rotating.compiled)
    row, query = torch.empty(3, 1, 4096, dtype=dtype), torch.empty(1, 4, 4096, dtype=dtype)
    both, norm = torch.empty(3, 4, 8192, dtype=dtype), torch.nn.RMSNorm(4096, 1e-5, dtype=dtype)
    norms.add_norm_triton(row, query, norm)
    norms.add_norm_triton(both[..., 4096:], both[:2, :, :4096], norm, keep[:2])
    norms.norm_pair_triton(row[0], query[0, :2], norm, norm, None)
    norms.norm_pair_triton(row[0], row[:2, 0], norm, norm, keep[:2].contiguous())


@pytest.mark.parametrize("num_nodes", [1, 256])
def test_trees_compile(compiler, num_nodes):
    """Storing, merging and verification."""
    compiler(store_tree, merge_trees, build_tree_mask, accept_path, reallocate_drafts)
    tree, column = DraftTree.empty(3, num_nodes, "cpu"), whole(3, 3)[:, 0]
    new = replace(tree, origin=tree.token.to(torch.uint8))
    kept = store_tree.KeptTrees(
        tree.parent, tree.token, tree.logprob, tree.ancestors, new.origin, tree.size, tree.token
    )
    for chain in (None, column.bool(), column):
        store_tree.store_trees_triton(column, new, kept, chain, None, tree.token)
    store_tree.store_trees_triton(tree.size, tree, kept, column, column.bool(), tree.token)
    merge_trees.merge_trees_triton(tree, tree, num_nodes > 1, num_nodes, 12)
    row, depth = whole(16), whole(5, num_nodes + 1)
    start, ancestors = row[:4].int(), whole(5, num_nodes + 1, num_nodes // 64 + 1)
    build_tree_mask.build_tree_mask_triton(
        build_tree_mask.BatchRows(row, start, start[:3], row[:3], start, row, row, row),
        depth,
        ancestors,
        build_tree_mask.MaskTensors(row.int(), ancestors[0], start[:3], row, row),
    )
    path = whole(5, 9)
    trees = whole(5, num_nodes).int(), depth, None, ancestors, None, row[:5].int(), path
    rows = accept_path.DrawnRows(row.int(), row, start, column)
    accept_path.accept_path_triton(rows, store_tree.KeptTrees(*trees))
    starts, confidence = row[:9].int(), torch.zeros(5, num_nodes)
    drafts = reallocate_drafts.DraftStarts(confidence, whole(2, 3).int(), starts, starts)
    reallocate_drafts.reallocate_drafts_triton(drafts, row[:3], 1)


def test_device_clock_compiles(compiler):
    spans = compiler(device_clock)
    device_clock.begin_span_triton(whole(3))
    device_clock.end_span_triton(whole(3))
    assert all("globaltimer" in each.compiled[0].asm["ptx"] for each in spans)


@pytest.mark.parametrize(
    ("width", "branches", "depth"), [(1024, 8, 16), (32_768, 1, 1), (1 << 20, 32, 8)]
)
def test_following_compiles(compiler, width, branches, depth):
    compiler(occurrences, continuations)
    table, known = torch.zeros(1, width, dtype=torch.int32), whole(1, 3)
    earlier = torch.zeros(16_384, dtype=torch.int32)
    texts = occurrences.Texts(table, known[:, 0], known[0], known[:, 1], earlier)
    how = occurrences.Following(1, 8, branches, depth, 60, 0.32, 1.2, 4096, 1024)
    continuations.follow_triton(texts, how)
