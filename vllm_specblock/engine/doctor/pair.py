"""Target and drafter: whether an engine would take them, and the memory that the drafter takes.

Asks what an engine asks while its config is built, in the same order, and says what it would say.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from vllm.config import ModelConfig, ParallelConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_specblock.config import METHOD, OptionError
from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.drafters.interface import CacheLayer
from vllm_specblock.drafters.registry import drafter_kind
from vllm_specblock.drafters.specblock.config import CheckpointError
from vllm_specblock.engine.config.resolved_config import (
    ResolvedDrafter,
    fetch_drafter,
    resolve_config,
)
from vllm_specblock.engine.config.validate import check_runner, check_target, check_weights
from vllm_specblock.engine.config.vllm_args import default_nodes
from vllm_specblock.engine.doctor.finding import Finding, as_line, wrong

Refused = (OptionError, CheckpointError)


def runner() -> Finding:
    """Whether this environment runs the runner that trees need."""
    try:
        check_runner(EngineArgs(), ParallelConfig())
    except OptionError as error:
        return wrong("runner", "not Model Runner V2", as_line(error))
    return Finding("runner", "Model Runner V2")


def pair(target: str | None, drafter: str | None) -> Iterator[Finding]:
    """Findings about either, and about both together.

    Args:
        target, drafter: folders or hub ids.
    """
    model = None
    if target is not None:
        try:
            model = EngineArgs(model=target).create_model_config()
        except Exception as error:  # whatever vLLM and transformers think of it
            yield wrong("target", target, f"vLLM does not take it: {as_line(error)}")
            return
        try:
            check_target(model)
        except OptionError as error:
            yield wrong("target", target, as_line(error))
            return
        yield Finding("target", f"{target}: {model.architecture}, {_dtype(model.dtype)}")
    if drafter is None:
        return
    if model is None:
        yield alone(drafter)
        return
    nodes = default_nodes()
    given = {"method": METHOD, "model": drafter, "num_speculative_tokens": nodes}
    try:
        resolved = resolve_config(given, nodes, model, {})
        check_weights(resolved)
    except Refused as error:
        yield wrong("drafter", drafter, as_line(error))
        return
    (one,) = resolved.drafters
    layers = ", ".join(map(str, one.layers)) or "none"
    yield Finding("drafter", f"{drafter}: {one.kind}, reads target layers {layers}")
    yield memory(one, model, nodes)


def alone(drafter: str) -> Finding:
    """A drafter without a target to hold it against."""
    try:
        folder = fetch_drafter(drafter)
        kind = kind_of(folder)
        files = drafter_kind(kind).load_checkpoint_module()
        files.check_tensors(folder, files.read_config(folder))
    except Refused as error:
        return wrong("drafter", drafter, as_line(error))
    return Finding(
        "drafter", f"{drafter}: {kind}, whole", "note", "Give --target to hold it against one."
    )


def memory(drafter: ResolvedDrafter, target: ModelConfig, nodes: int) -> Finding:
    """Weights and cache of a drafter, beside the target's cache; of one device that holds all."""
    kind, dtype = drafter_kind(drafter.kind), target.dtype
    assert drafter.folder is not None
    model = kind.load_checkpoint_module().load(Path(drafter.folder), dtype=dtype)
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    columns = tuple(range(len(drafter.layers)))
    made = kind.load_class()(
        model, torch.nn.Identity(), drafter.options, nodes, target.max_model_len, nodes, columns
    )
    own = sum(map(entries, made.cache_layers())) * dtype.itemsize
    one = ParallelConfig()
    heads, layers = target.get_num_kv_heads(one), target.get_num_layers(one)
    beside = entries(CacheLayer(heads, target.get_head_size(), layers)) * dtype.itemsize
    found = (
        f"weights {weights / 2**20:,.1f} MiB; cache {own / 2**10:.1f} KiB per token, beside "
        f"{beside / 2**10:.1f} of the target's (in {_dtype(dtype)})"
    )
    if own > beside:
        return Finding(
            "memory",
            found,
            "note",
            "Less than half of the texts fit that fit without drafts: a drafter of fewer layers, "
            "heads or positions takes less.",
        )
    return Finding("memory", found)


def entries(layer: CacheLayer) -> int:
    """Numbers that a token leaves in a layer."""
    return 2 * layer.num_kv_heads * layer.head_dim * layer.entries_per_token


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
