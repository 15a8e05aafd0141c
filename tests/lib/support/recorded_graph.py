"""A CUDA graph's stand-in on a CPU: what ran under it runs again, on the same memory.

Like a graph it knows nothing but addresses: a replay sees new values only where they were
written into the tensors of the capture, and values that Python computed stay the same. It
refuses what a capture refuses: reads of device values, shapes that depend on them, and tensors
made from host values. It cannot tell a copy from host memory that is gone at the replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.host_reads import HostReadMethods, check, reads_values
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm_specblock.triton_kernels.attention import cpu_packing
from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch
from vllm_specblock.triton_kernels.feedback.record_step import record_step
from vllm_specblock.triton_kernels.ngram import continuations_numba

from vllm_specblock.commit import committed_tokens, move_path
from vllm_specblock.engine.metrics.counters import count_step
from vllm_specblock.engine.runner.tree_states import store_trees
from vllm_specblock.feedback.acceptance_estimator import write_survival

WRITING = count_step, move_path, record_step, write_survival
_FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy}


class CaptureError(RuntimeError):
    """Something that no CUDA graph could hold."""


class _Factories(HostReadMethods):
    """Differs in that it refuses to make tensors from host values, too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _FROM_HOST:
            raise CaptureError(f"{func.__name__} copies host values while a graph is captured.")
        return super().__torch_function__(func, types, args, kwargs)


def _memory(values) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(values) if torch.is_tensor(leaf)}


class RecordedGraph:
    """What torch.cuda.CUDAGraph is to a capture: `replay` is all that is called on it."""

    def __init__(self):
        self.calls: list[Callable[[], None]] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for call in self.calls:
            call()


class Recorder(TorchDispatchMode):
    """Runs operations, and notes them in a RecordedGraph."""

    def __init__(self, graph: RecordedGraph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if reads_values(func, args):
            check(str(func))  # host memory may be read: its value is the same at every replay
            return func(*args, **kwargs)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        given = _memory((args, kwargs))
        if func._schema.is_mutable:
            self.graph.calls.append(lambda: func(*args, **kwargs))
        elif not _memory(result) <= given:
            self.graph.calls.append(lambda: _again(func, args, kwargs, result))
        return result

    def attend(self, original, queries, query, kv_cache, scale, out=None, **options):
        """One attention call as a whole: its reference plans on the host, the kernel does not."""
        if out is None:
            out = torch.empty_like(query)

        def again() -> None:
            queries.plan = None
            original(queries, query, kv_cache, scale, out, **options)

        self.call(again)
        return out

    def whole(self, loop, *args) -> None:
        self.call(lambda: loop(*args))

    def made(self, loop, *args):
        """As `whole`, of a loop that returns new tensors."""
        results = None

        def again() -> None:
            nonlocal results
            found = loop(*args)
            results = found if results is None else results
            for old, fresh in zip(tree_leaves(results), tree_leaves(found)):
                old.copy_(fresh)

        self.call(again)
        return results

    def call(self, again: Callable[[], None]) -> None:
        """What torch does not see, as a whole: numba's loops take addresses."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            again()
        self.graph.calls.append(again)


def _again(func, args, kwargs, result) -> None:
    new = func(*args, **kwargs)
    tree_map(lambda old, fresh: old.copy_(fresh) if torch.is_tensor(old) else None, result, new)


@contextlib.contextmanager
def recording(graph: RecordedGraph, *args, **kwargs):
    """Stands in for `torch.cuda.graph(graph, pool, stream=…)`."""
    recorder, original = Recorder(graph), TreeAttentionBatch.attend

    def attend(queries, *args, **kwargs):
        return recorder.attend(original, queries, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeAttentionBatch, "attend", attend)
        for note, module, name in (
            (recorder.whole, cpu_packing, "store_packed"),
            (recorder.whole, cpu_packing, "move_packed"),
            *((recorder.whole, op, "reference") for op in WRITING),
            (recorder.made, committed_tokens, "reference"),
            (recorder.made, store_trees, "reference"),
            (recorder.made, continuations_numba, "follow_numba"),
        ):
            patch.setattr(module, name, partial(note, getattr(module, name)))
        with _Factories(), recorder:
            yield


def capture(engine, monkeypatch, sizes: list[int]) -> dict:
    """Capture the proposals of an engine for batches of `sizes` rows, as vLLM does on a GPU."""
    for name, value in {
        "current_platform": SimpleNamespace(get_global_graph_pool=lambda: None),
        "graph_capture": lambda device: contextlib.nullcontext(),
        "capture_pool": lambda pool, config: contextlib.nullcontext(),
        "current_stream": lambda: None,
    }.items():
        monkeypatch.setattr(cudagraph_utils, name, value)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    speculator = engine.speculator
    config = speculator.vllm_config.compilation_config
    monkeypatch.setattr(speculator, "graphs", speculator.graphs)  # comes back
    monkeypatch.setattr(config, "cudagraph_capture_sizes", sizes)
    monkeypatch.setattr(config, "max_cudagraph_capture_size", max(sizes))
    speculator.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
    speculator.capture()
    return speculator.graphs.graphs
