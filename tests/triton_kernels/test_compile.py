"""The kernels compile for a GPU, which needs Triton's compiler but no GPU.

The interpreter accepts much that the compiler refuses, so a machine without a GPU would otherwise
find out last.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm_specblock.triton_kernels.attention import attention_schedule, tree_attention
from vllm_specblock.triton_kernels.drafting import (
    expand,
    first_block_metadata,
    grow_level,
    later_block_metadata,
)
from vllm_specblock.triton_kernels.feedback import (
    calibrate_drafts,
    count_step,
    device_clock,
    record_step,
    write_survival,
)
from vllm_specblock.triton_kernels.feedback.slab_tensors import SlabTensors, StepToRecord
from vllm_specblock.triton_kernels.kv_cache import commit, committed_tokens, mask_holes, store_kv
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
from vllm_specblock.triton_kernels.tree import (
    merge_trees,
    select_tree,
    store_tree,
)
from vllm_specblock.triton_kernels.verify import (
    accept_path,
    build_tree_mask,
    reallocate_drafts,
)
from vllm_specblock.triton_kernels.verify.verification_result import VerificationResult

from vllm_specblock.tree import DraftTree

from .conftest import INTERPRETED

OWN_PROCESS = "the interpreter runs in this process; `make test` compiles in one of its own"
CAPABILITY = 90
SHARED_LIMIT = 99 * 1024  # bytes a block may use on the smallest GPUs of the last generations


class Compile:
    """Stands in for a kernel: compiles it for the arguments that it is launched with."""

    def __init__(self, kernel):
        self.kernel, self.compiled = kernel, []

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *positional, **named):
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, make_backend
        from triton.compiler import compile as triton_compile
        from triton.runtime.jit import create_function_from_signature

        kernel, target = self.kernel, GPUTarget("cuda", CAPABILITY, 32)
        # Triton ignores a name that it does not find.
        assert set(kernel.do_not_specialize) <= set(kernel.arg_names)
        backend = make_backend(target)
        # As a launch finds out what is 1, what is absent and what is aligned.
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, found, options = bind(*positional, **named)
        for parameter in kernel.params:
            grouped = isinstance(bound[parameter.name], tuple)
            assert not (grouped and parameter.do_not_specialize), "Triton heeds it for no group"
        options, *source = kernel._pack_args(backend, named, bound, found, options)
        source = ASTSource(kernel, *source)
        self.compiled.append(triton_compile(source, target=target, options=options.__dict__))


@pytest.fixture
def compiler(request, monkeypatch, tmp_path):
    """Swaps a module's kernel for a `Compile`, in a private copy of the module."""
    if request.config.stash.get(INTERPRETED, False):
        pytest.skip(OWN_PROCESS)
    triton = pytest.importorskip("triton")
    backends = pytest.importorskip("triton.backends").backends
    if "nvidia" not in backends:
        pytest.skip("this Triton cannot compile for NVIDIA GPUs")
    if not isinstance(triton.language.max, triton.runtime.jit.JITFunction):
        pytest.skip(OWN_PROCESS)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def swap(module, name):
        kernel = getattr(module, name)
        if not isinstance(kernel, triton.runtime.jit.JITFunction):
            pytest.skip(OWN_PROCESS)
        stand_in = Compile(kernel)
        monkeypatch.setattr(module, name, stand_in)
        return stand_in

    return swap


def fits(stand_in) -> bool:
    return all(c.metadata.shared <= SHARED_LIMIT for c in stand_in.compiled)


def test_layer_shift_compiles(compiler):
    stand_in = compiler(layer_shift, "_layer_shift_kernel")
    sizes = ((2, torch.bfloat16), (6, torch.float32), (20, torch.bfloat16), (64, torch.float32))
    for rows, dtype in sizes:
        weight = torch.empty(64, 128, dtype=dtype)
        layer_shift.layer_shift_triton(torch.empty(rows, 5, 64, dtype=dtype), weight)
    assert len(stand_in.compiled) == 4 and fits(stand_in)


def attend(compiler, dtype, head_size, queries, requests, cache_dtype=None, **rare):
    """Launch tree attention on stand-ins -> those of its two kernels."""
    module, tokens, rows = tree_attention, requests * queries, torch.int32
    stand_ins = [
        compiler(module, name) for name in ("_tree_attention_kernel", "_merge_splits_kernel")
    ]
    query = torch.empty(tokens, 32, head_size, dtype=dtype)
    cache = torch.empty(8, 16, 8, 2 * head_size, dtype=cache_dtype or dtype).transpose(1, 2)
    if "prefix_from" in rare:
        rare["prefix_from"] = torch.zeros(tokens, dtype=rows)
    module.tree_attention(
        query,
        cache,
        torch.zeros(requests, 2048, dtype=rows),
        torch.zeros(requests + 1, dtype=rows),
        {queries},
        torch.zeros(requests, dtype=rows),
        32768,
        torch.zeros(tokens, dtype=rows),
        torch.zeros(tokens, 1, dtype=torch.int64),
        torch.zeros(requests, dtype=rows),
        0.1,
        torch.empty_like(query),
        **rare,
    )
    return stand_ins


ONE = torch.ones(())
RARE = {
    "plain": {},
    "fp8": {"cache_dtype": torch.float8_e4m3fn, "key_scale": ONE, "value_scale": ONE},
    "window and cap": {"prefix_from": True, "soft_cap": 50.0},
    "sinks": {"sinks": torch.ones(32)},
}


HOPPER = 227 * 1024


@pytest.mark.parametrize(
    ("dtype", "head_size", "queries", "rare", "shared"),
    [
        (torch.bfloat16, 64, 1, "window and cap", SHARED_LIMIT),
        (torch.bfloat16, 64, 61, "sinks", HOPPER),
        (torch.bfloat16, 96, 8, "plain", SHARED_LIMIT),
        (torch.bfloat16, 128, 61, "fp8", SHARED_LIMIT),
        (torch.bfloat16, 256, 61, "plain", SHARED_LIMIT),
        (torch.bfloat16, 256, 61, "plain", HOPPER),
        (torch.float32, 128, 61, "plain", SHARED_LIMIT),
    ],
    ids=str,
)
def test_tree_attention_compiles(compiler, monkeypatch, dtype, head_size, queries, rare, shared):
    monkeypatch.setattr(attention_schedule, "shared_memory", lambda device: shared)
    for stand_in in attend(compiler, dtype, head_size, queries, 1, **RARE[rare]):
        assert [c.metadata.shared <= shared for c in stand_in.compiled] == [True]


def hot_loop(compiled) -> list[str]:
    """Instructions of the loop with the most products, of a program for Hopper's tensor cores."""
    folder = Path(sys.modules["triton"].__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [folder / "nvdisasm", "-c", file.name]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    label, loops, instructions = {}, [], lines.splitlines()
    for number, line in enumerate(instructions):
        if found := re.match(r"(\.L_x_\d+):", line):
            label[found[1]] = number
        elif (found := re.search(r"BRA.*(\.L_x_\d+)\)", line)) and found[1] in label:
            loops.append(range(label[found[1]], number))
    innermost = [loop for loop in loops if not any(inner.start in loop[1:] for inner in loops)]
    bodies = [instructions[loop.start : loop.stop] for loop in innermost]
    hot = max(bodies, key=lambda body: sum("HGMMA" in line for line in body))
    assert sum("HGMMA" in line for line in hot) >= 8
    return hot


LOOPS = {
    "split": (1, "plain", {}),
    "whole": (32, "plain", {}),
    "unknown lengths": (32, "plain", {"unknown_up_to": 61}),
    "fp8": (32, "fp8", {}),
}


@pytest.mark.parametrize(("requests", "rare", "lengths"), LOOPS.values(), ids=LOOPS)
def test_where_the_time_goes_nothing_spills_and_loads_are_on_their_way(
    compiler, requests, rare, lengths
):
    """Head size 128, trees of 61 tokens: the loop without a mask, which reads nearly all entries.

    DEPBAR waits until so many groups of loads are left. With none left (0x0) the loop would stand
    still for memory once a block.
    """
    arguments = RARE[rare] | lengths
    kernels = attend(compiler, torch.bfloat16, 128, 61, requests, **arguments)[0].compiled
    assert len(kernels) == (2 if lengths else 1)  # a graph of many requests has both forms
    for loop in map(hot_loop, kernels):
        assert not [line for line in loop if re.search(r"\b(LDL|STL)", line)]
        left = [int(n, 16) for line in loop for n in re.findall(r"DEPBAR\.LE SB0, (0x\w+)", line)]
        assert left and min(left) >= 4


@pytest.mark.parametrize(
    ("generation", "shared", "rows", "warps"),
    [
        (8, 163 * 1024, (16, 64, 128), (4, 8, 8)),
        (8, SHARED_LIMIT, (16, 64), (4, 8)),
        (9, HOPPER, (16, 64, 128), (4, 4, 8)),
        (10, HOPPER, (16, 64), (4, 8)),
        (12, SHARED_LIMIT, (16, 64), (4, 8)),
    ],
)
def test_tiles_by_generation(generation, shared, rows, warps):
    """Wider tiles, or fewer warps, spill in the loop (`tests/emulated_gpu/compiled.json`)."""
    tiles = attention_schedule.tile_classes(128, torch.bfloat16, shared, generation)
    assert tuple(tile.rows for tile in tiles) == rows
    assert tuple(tile.num_warps for tile in tiles) == warps


def test_move_kv_compiles(compiler):
    stand_in = compiler(commit, "_move_path_kernel")
    caches = [torch.empty(4, 2, 16, 256, dtype=torch.bfloat16) for _ in range(2)]
    path = torch.zeros(2, 12, dtype=torch.int64)
    start, accepted = path[:, 0], torch.zeros(2, dtype=torch.int32)
    rows = commit.AcceptedRows(start, start, path, accepted)
    commit.move_path_triton(commit.KVCacheSet(caches), path.flatten(), rows, 24)
    assert len(stand_in.compiled) == 1 and fits(stand_in)


@pytest.mark.parametrize(
    ("dtype", "vocab", "scope", "sharp"),
    [
        (torch.bfloat16, 32_000, 20, True),
        (torch.float32, 152_064, None, True),
        (torch.bfloat16, 32_000, 20, False),
    ],
)
def test_read_heads_compile(compiler, dtype, vocab, scope, sharp):
    stand_ins = [
        compiler(best_of_chunks, "_best_of_chunk_kernel"),
        compiler(lm_and_rank_head, "_merge_and_rank_kernel"),
    ]
    head = torch.nn.Sequential(
        torch.nn.Linear(64 + 15, 256, bias=False, dtype=dtype),
        torch.nn.SiLU(),
        torch.nn.Linear(256, 4, bias=False, dtype=dtype),
    )
    lm_and_rank_head.lm_and_rank_head_triton(
        torch.empty(2, 4, 64, dtype=dtype),
        torch.empty(2, 4, vocab, dtype=dtype),
        torch.zeros(vocab, dtype=torch.int64),
        head,
        10,
        scope,
        torch.ones(2) if sharp else None,
    )
    assert all(len(stand_in.compiled) == 1 and fits(stand_in) for stand_in in stand_ins)


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [(torch.bfloat16, 4), (torch.float16, 36), (torch.bfloat16, 2000), (torch.float32, 2000)],
    ids=str,
)
def test_fp8_linear_compiles(compiler, dtype, rows):
    stand_in = compiler(fp8_linear, "_fp8_linear_kernel")
    weight = torch.empty(4096, 4096, dtype=torch.float8_e4m3fn)
    x = torch.empty(rows, 4096, dtype=dtype)
    for residual in (None, x):
        fp8_linear.fp8_linear_triton(x, weight, torch.ones(4096), residual)
    assert len(stand_in.compiled) == 2 and fits(stand_in)


@pytest.mark.parametrize("num_nodes", [12, 256])
def test_learning_compiles(compiler, num_nodes):
    stand_in = compiler(calibrate_drafts, "_learn_kernel")
    slot, path = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 9, dtype=torch.int64)
    score, heat = torch.zeros(5, num_nodes), torch.zeros(5)
    result = VerificationResult(slot, path[:, 0], slot, path, score, score.to(torch.uint8), heat)
    for own in (heat, heat[:0]):  # with requests told apart, and without
        calibrate_drafts.update_calibration_triton(
            heat[:2],
            heat[2:4],
            own,
            own,
            0,
            result,
            calibrate_drafts.LearnRates(-1.0, 1.0, 20.0, 500.0, 1.4, 10.0, 50.0),
        )
    assert len(stand_in.compiled) == 2 and fits(stand_in)


@pytest.mark.parametrize(("count", "joins"), [(577, True), (130, False)])
def test_select_compiles(compiler, count, joins):
    stand_in = compiler(select_tree, "_select_kernel")
    whole = torch.zeros(2, count, dtype=torch.int64)
    path_hash = whole if joins else None
    select_tree.select_triton(whole, whole, whole.float(), whole, path_hash, 60, 12)
    assert len(stand_in.compiled) == 1 and fits(stand_in)


def test_growth_compiles(compiler):
    starting, selecting = (
        compiler(expand, name) for name in ("_attach_and_start_kernel", "_attach_and_select_kernel")
    )
    growing = expand.Growing(expand.Limits(4, 3, 4, 4, 60), torch.zeros(4, dtype=torch.int64), 1)

    def block(rows):
        token = torch.zeros(1, rows, 4, 4, dtype=torch.int64)
        return token.float(), token, token[..., 0]

    node, _, _, _, valid = growing.attach_block(1, None, None, *block(1))
    node, _, _, _, valid = growing.attach_block(2, node, valid, *block(4))
    growing.attach_block(3, node, valid, *block(4))
    assert len(starting.compiled) == 2 and len(selecting.compiled) == 1
    assert fits(starting) and fits(selecting)


@pytest.mark.parametrize("num_nodes", [1, 64, 256])
def test_storing_compiles(compiler, num_nodes):
    stand_in = compiler(store_tree, "_store_trees_kernel")
    tree = DraftTree.empty(3, num_nodes, "cpu")
    new = replace(tree, origin=tree.token.to(torch.uint8))
    kept = store_tree.KeptTrees(
        tree.parent, tree.token, tree.logprob, tree.ancestors, new.origin, tree.size
    )
    column = torch.zeros(3, 3, dtype=torch.int64)[:, 0]
    for chain in (None, column.bool(), column):
        store_tree.store_trees_triton(column, new, kept, chain, None, tree.token)
    store_tree.store_trees_triton(tree.size, tree, kept, column, column.bool(), tree.token)
    assert len(stand_in.compiled) == 4 and fits(stand_in)


def test_first_block_compiles(compiler):
    stand_in = compiler(first_block_metadata, "_first_block_metadata_kernel")
    row, start = torch.zeros(20, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    for K in (1, 4):
        first_block_metadata.first_block_metadata_triton(row, row[1:], row, start, row[:3], K)
    assert len(stand_in.compiled) == 2 and fits(stand_in)


@pytest.mark.parametrize("num_nodes", [1, 60, 256])
def test_counting_compiles(compiler, num_nodes):
    stand_in = compiler(count_step, "_count_step_kernel")
    slot, path = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 9, dtype=torch.int64)
    score, heat = torch.zeros(5, num_nodes), torch.zeros(5)
    result = VerificationResult(slot, path[:, 0], slot, path, score, score.to(torch.uint8), heat)
    one = count_step.Drafted(path[:, 0], None, None, slot, None)
    two = count_step.Drafted(heat[:3] > 0, heat[:3] > 0, heat[:3] > 0, slot, heat[:3], slot, None)
    for drafted in (None, one, two):
        count_step.count_step_triton(path, result, drafted)
    assert len(stand_in.compiled) == 3 and fits(stand_in)


@pytest.mark.parametrize(("size", "starts", "mask_words"), [(1, 10, 1), (4, 4, 1), (8, 40, 15)])
def test_later_blocks_compile(compiler, size, starts, mask_words):
    later = compiler(later_block_metadata, "_later_block_metadata_kernel")
    row = torch.zeros(2, starts, dtype=torch.int64)
    known, table = torch.zeros(5, 3, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int32)
    rows = 1 + 3 * starts
    for last, reach in ((known[:2, 0], None), (row[:, 0], torch.zeros(2, 5, dtype=torch.int64))):
        later_block_metadata.later_block_metadata_triton(
            row,
            row,
            row.bool(),
            known[:, 1],
            known[:, 1],
            last,
            torch.zeros(rows, size, mask_words, dtype=torch.int64),
            table,
            torch.zeros(2, rows, dtype=torch.int64),
            torch.zeros(2, rows, mask_words, dtype=torch.int64),
            reach,
            3,
            16,
            4096,
        )
    assert len(later.compiled) == 2 and fits(later)


@pytest.mark.parametrize("known", [torch.int32, torch.int64], ids=["eager", "graph"])
def test_committed_tokens_compile(compiler, known):
    stand_in = compiler(committed_tokens, "_committed_tokens_kernel")
    table, path = torch.zeros(3, 3, dtype=known), torch.zeros(3, 13, dtype=torch.int64)
    rows, text = torch.zeros(39, dtype=torch.int64), torch.zeros(5, 100, dtype=torch.int32)
    req_idx = table[0] if known == torch.int32 else table[:, 0]
    of_paths = rows[:3], rows[:3], path, torch.zeros(3, dtype=torch.int32)
    start = torch.zeros(4, dtype=torch.int32)
    step = committed_tokens.StepRows(
        *of_paths, rows, rows, start, rows, rows, req_idx, text, torch.zeros(5), rows, rows
    )
    found = committed_tokens.committed_tokens_triton(step, 180)
    assert [len(x) for x in found] == [39, 39, 39, 39, 39, 3, 3]
    assert len(stand_in.compiled) == 1 and fits(stand_in)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_store_kv_compiles(compiler, dtype, cache_dtype):
    stand_in = compiler(store_kv, "_store_kv_kernel")
    scales = (ONE, ONE) if cache_dtype == torch.float8_e4m3fn else ()
    for heads in (8, 32):
        cache = torch.empty(4, 16, heads, 256, dtype=cache_dtype).transpose(1, 2)
        key = torch.empty(3, heads, 128, dtype=dtype)
        entry = torch.zeros(3, 3, dtype=torch.int64)[:, 0]
        store_kv.store_kv_triton(cache, entry, key, key, *scales)
    assert len(stand_in.compiled) == 2 and fits(stand_in)


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.bfloat16, 128), (torch.float16, 96), (torch.float32, 128)], ids=str
)
def test_rope_compiles(compiler, dtype, size):
    stand_in = compiler(rope, "_rotate_pair_kernel")
    both = torch.empty(3, 5, 48, size, dtype=dtype)  # as a product leaves them
    query, key = both[..., :32, :], both[..., 32:40, :]
    keep = torch.zeros(3, 3, dtype=torch.int64)[:, 0]
    norms = [torch.nn.RMSNorm(size, 1e-6, dtype=dtype)] * 2
    angles = rope.Rope(keep, torch.empty(size), None)
    rope.rotate_pair_triton(query, key, angles)
    rope.rotate_pair_triton(query, key, angles, keep, norms)
    rope.rotate_pair_triton(query[:2], key, angles, keep[:2], norms)
    assert len(stand_in.compiled) == 3 and fits(stand_in)
    # Quick sines are far off at far positions.
    assert not [kernel for kernel in stand_in.compiled if "sin.approx" in kernel.asm["ptx"]]


@pytest.mark.parametrize(
    ("dtype", "vocab", "width", "sharp"),
    [
        (torch.bfloat16, 32_000, 10, True),
        (torch.float32, 151_936, 32, False),
        (torch.float16, 10, 1, True),
    ],
)
def test_best_tokens_compile(compiler, dtype, vocab, width, sharp):
    found = (
        compiler(best_of_chunks, "_best_of_chunk_kernel"),
        compiler(topk_tokens, "_merge_kernel"),
    )
    logits, offset = torch.empty(2, 8, vocab, dtype=dtype), torch.zeros(vocab, dtype=torch.int64)
    topk_tokens.topk_tokens_triton(logits, offset, width, 0.5, torch.ones(2) if sharp else None)
    assert all(len(stand_in.compiled) == 1 and fits(stand_in) for stand_in in found)


@pytest.mark.parametrize(
    ("depth", "top_k", "width"), [(8, 10, 8), (8, 1, 1), (3, 10, 1), (1, 10, 10), (2, 32, 32)]
)
def test_growing_levels_compiles(compiler, depth, top_k, width):
    growing, selecting = (
        compiler(grow_level, name)
        for name in ("_attach_and_grow_kernel", "_attach_and_select_kernel")
    )
    position = torch.zeros(2, 3, dtype=torch.int64)
    limits = grow_level.LevelLimits(depth, top_k, width, 60)
    levels = grow_level.GrowingLevels(limits, position[:, 1])
    said = torch.zeros(2, 1, top_k, dtype=torch.int64)
    grown = levels.attach_level(None, None, None, said.float(), said)
    for level in range(2, depth + 1):
        said = torch.zeros(2, width, top_k, dtype=torch.int64)
        there = grown[4] if level % 2 else None
        grown = levels.attach_level(grown[0], grown[4], there, said.float(), said)
    assert len(growing.compiled) == depth - 1 and len(selecting.compiled) == 1
    assert fits(growing) and fits(selecting)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norms_compile(compiler, dtype):
    add_norm = compiler(norms, "_add_norm_kernel")
    row, query = torch.empty(3, 1, 4096, dtype=dtype), torch.empty(1, 4, 4096, dtype=dtype)
    both, norm = torch.empty(3, 4, 8192, dtype=dtype), torch.nn.RMSNorm(4096, 1e-5, dtype=dtype)
    keep = torch.zeros(2, 3, dtype=torch.int64)[:, 0]
    norms.add_norm_triton(row, query, norm)
    norms.add_norm_triton(both[..., 4096:], both[:2, :, :4096], norm, keep)
    assert len(add_norm.compiled) == 2 and fits(add_norm)
    pair = compiler(norms, "_norm_pair_kernel")
    for rows in (None, keep.contiguous()):
        norms.norm_pair_triton(
            row[0], query[0, :2] if rows is None else row[:2, 0], norm, norm, rows
        )
    assert len(pair.compiled) == 2 and fits(pair)


@pytest.mark.parametrize("num_nodes", [1, 256])
def test_verification_compiles(compiler, num_nodes):
    masked = compiler(build_tree_mask, "_build_tree_mask_kernel")
    walked = compiler(accept_path, "_accept_path_kernel")
    row, start = torch.zeros(16, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    depth = torch.zeros(5, num_nodes + 1, dtype=torch.int64)
    ancestors = torch.zeros(5, num_nodes + 1, num_nodes // 64 + 1, dtype=torch.int64)
    build_tree_mask.build_tree_mask_triton(
        build_tree_mask.BatchRows(row, start, start[:3], row[:3], start, row, row, row),
        depth,
        ancestors,
        build_tree_mask.MaskTensors(row.int(), ancestors[0], start[:3], row, row),
    )
    accept_path.accept_path_triton(
        accept_path.DrawnRows(row.int(), row, start, torch.zeros(3, 3).long()[:, 0]),
        torch.zeros(5, num_nodes, dtype=torch.int32),
        depth,
        ancestors,
        torch.zeros(5, 9).long(),
        torch.zeros(5, dtype=torch.int32),
    )
    for stand_in in (masked, walked):
        assert len(stand_in.compiled) == 1 and fits(stand_in)


def test_device_clock_compiles(compiler):
    total = torch.zeros(3, dtype=torch.int64)
    for name, launch in (("_begin", "begin_span_triton"), ("_end", "end_span_triton")):
        stand_in = compiler(device_clock, f"{name}_kernel")
        getattr(device_clock, launch)(total)
        (compiled,) = stand_in.compiled
        assert "globaltimer" in compiled.asm["ptx"] and fits(stand_in)


@pytest.mark.parametrize(
    ("num_nodes", "known"), [(1, torch.int64), (60, torch.int32), (256, torch.int64)], ids=str
)
def test_survival_compiles(compiler, num_nodes, known):
    offer = compiler(write_survival, "_write_survival_kernel")
    counts, heat = torch.zeros(2, 32), torch.zeros(5)
    table = torch.zeros(3, 3, dtype=known)
    slot = table[0] if known == torch.int32 else table[:, 0]
    score, steps = torch.zeros(5, num_nodes), torch.zeros(4, num_nodes)
    write_survival.write_survival_triton(
        slot, score, heat[:3], counts, counts, counts[0], 4.0, 4, steps
    )
    assert len(offer.compiled) == 1 and fits(offer)


@pytest.mark.parametrize(
    ("width", "branches", "depth"), [(1024, 8, 16), (32_768, 1, 1), (1 << 20, 32, 8)]
)
def test_following_compiles(compiler, width, branches, depth):
    found = compiler(occurrences, "_occurrences_kernel")
    followed = compiler(continuations, "_follow_kernel")
    table, known = torch.zeros(1, width, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int64)
    texts = occurrences.Texts(table, known[:, 0], known[0], known[:, 1])
    how = continuations.Following(1, 8, branches, depth, 60, 0.32, 1.2, 4096, 1024)
    assert continuations.follow_triton(texts, how).token.shape == (1, 60)
    assert len(found.compiled) == len(followed.compiled) == 1 and fits(found) and fits(followed)


@pytest.mark.parametrize(("num_nodes", "flag"), [(1, True), (60, False), (256, True)])
def test_merging_compiles(compiler, num_nodes, flag):
    merging = compiler(merge_trees, "_merge_kernel")
    tree = vars(DraftTree.empty(3, num_nodes, "cpu"))
    merge_trees.merge_trees_triton(tree, tree, flag, num_nodes, 12)
    assert len(merging.compiled) == 1 and fits(merging)


@pytest.mark.parametrize("num_nodes", [1, 256])
def test_reallocation_compiles(compiler, num_nodes):
    stand_in = compiler(reallocate_drafts, "_reallocate_drafts_kernel")
    starts, slot = torch.zeros(9, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    reallocate_drafts.reallocate_drafts_triton(
        torch.zeros(5, num_nodes), slot, torch.zeros(2, 3, dtype=torch.int32), 1, 1, starts, starts
    )
    assert len(stand_in.compiled) == 1 and fits(stand_in)


@pytest.mark.parametrize(
    ("num_nodes", "known", "dtype"),
    [
        (1, torch.int64, torch.float32),
        (60, torch.int32, torch.bfloat16),
        (256, torch.int64, torch.bfloat16),
    ],
    ids=str,
)
def test_record_step_compiles(compiler, dtype, known, num_nodes):
    stand_in = compiler(record_step, "_record_step_kernel")
    slabs = SlabTensors.empty(2, 256, 4096, 5, dtype)
    table, rows = torch.zeros(3, 3, dtype=known), torch.zeros(39, dtype=torch.int64)
    slot = table[0] if known == torch.int32 else table[:, 0]
    accepted, path = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 13, dtype=torch.int64)
    origin, states = torch.zeros(5, num_nodes, dtype=torch.uint8), torch.zeros(7, 4096, dtype=dtype)
    record_step.record_step_triton(
        slabs,
        StepToRecord(
            rows,
            rows,
            rows,
            rows,
            rows,
            rows[:3],
            (states,) * 3,
            states,
            VerificationResult(slot, rows[:3], accepted, path, None, origin, None),
            origin.int(),
        ),
    )
    assert len(stand_in.compiled) == 1 and fits(stand_in)


@pytest.mark.parametrize("width", [3, 8192])
def test_masking_holes_compiles(compiler, width):
    stand_in = compiler(mask_holes, "_mask_holes_kernel")
    row, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, width, dtype=torch.int32)
    mask_holes.mask_holes_triton(torch.zeros(9).long(), table, row, row, 16, row, row)
    assert len(stand_in.compiled) == 1 and fits(stand_in)
