"""The kernels compile for a GPU, which needs Triton's compiler but no GPU.

The interpreter accepts much that the compiler refuses, so a machine without a GPU would otherwise
find out last.
"""

from __future__ import annotations

import pytest
import torch

CAPABILITY = 90
SHARED_LIMIT = 99 * 1024  # bytes a block may use on the smallest GPUs of the last generations


class Compile:
    """Stands in for a kernel: compiles it for the arguments that it is launched with."""

    def __init__(self, kernel):
        self.kernel, self.compiled = kernel, []

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *positional, num_warps=4, num_stages=3, **named):
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.compiler import compile as triton_compile
        from triton.runtime.jit import mangle_type

        arguments = dict(zip(self.kernel.arg_names, positional)) | named
        signature, constants = {}, {}
        for parameter in self.kernel.params:
            value = arguments[parameter.name]
            if parameter.is_constexpr or (type(value) is int and value == 1):
                signature[parameter.name] = "constexpr"
                constants[parameter.name] = value
            else:
                signature[parameter.name] = mangle_type(value)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        source = ASTSource(self.kernel, signature, constants)
        target = GPUTarget("cuda", CAPABILITY, 32)
        self.compiled.append(triton_compile(source, target=target, options=options))


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Swaps a module's kernel for a `Compile`, in a private copy of the module."""
    triton = pytest.importorskip("triton")
    backends = pytest.importorskip("triton.backends").backends
    if "nvidia" not in backends:
        pytest.skip("this Triton cannot compile for NVIDIA GPUs")
    if not isinstance(triton.language.max, triton.runtime.jit.JITFunction):
        pytest.skip("Triton was imported with its interpreter switched on")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from vllm_specblock.triton_kernels import commit, layer_shift, tree_attention

    def swap(module, name):
        kernel = getattr(module, name)
        if not isinstance(kernel, triton.runtime.jit.JITFunction):
            pytest.skip("the kernels were imported with the interpreter switched on")
        stand_in = Compile(kernel)
        monkeypatch.setattr(module, name, stand_in)
        return stand_in

    swap.layer_shift, swap.tree_attention, swap.commit = layer_shift, tree_attention, commit
    return swap


def fits(stand_in) -> bool:
    return all(c.metadata.shared <= SHARED_LIMIT for c in stand_in.compiled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_layer_shift_compiles(compiler, dtype):
    stand_in = compiler(compiler.layer_shift, "_layer_shift_kernel")
    weight = torch.empty(64, 128, dtype=dtype)
    for rows in (2, 64):
        compiler.layer_shift.layer_shift_triton(torch.empty(rows, 5, 64, dtype=dtype), weight)
    assert len(stand_in.compiled) == 2 and fits(stand_in)


@pytest.mark.parametrize(
    ("dtype", "head_size", "queries"),
    [(torch.bfloat16, 128, 8), (torch.bfloat16, 96, 300), (torch.float32, 64, 16)],
    ids=str,
)
def test_tree_attention_compiles(compiler, dtype, head_size, queries):
    stand_in = compiler(compiler.tree_attention, "_tree_attention_kernel")
    tokens, rows = 2 * queries, torch.int32
    compiler.tree_attention.tree_attention_triton(
        torch.empty(tokens, 4, head_size, dtype=dtype),
        torch.empty(8, 2, 16, 2 * head_size, dtype=dtype),
        torch.zeros(2, 4, dtype=rows),
        torch.zeros(3, dtype=rows),
        queries,
        torch.zeros(2, dtype=rows),
        64,
        torch.zeros(tokens, dtype=rows),
        torch.zeros(tokens, 2, dtype=torch.int64),
        torch.zeros(2, dtype=rows),
        0.1,
        torch.empty(tokens, 4, head_size, dtype=dtype),
    )
    assert len(stand_in.compiled) == 1 and fits(stand_in)


def test_move_kv_compiles(compiler):
    stand_in = compiler(compiler.commit, "_move_kv_kernel")
    caches = [torch.empty(4, 2, 16, 256, dtype=torch.bfloat16) for _ in range(2)]
    slot = torch.zeros(2, 12, dtype=torch.int64)
    compiler.commit.move_kv_triton(compiler.commit.KVCacheSet(caches), slot, slot, slot.bool())
    assert len(stand_in.compiled) == 1 and fits(stand_in)
