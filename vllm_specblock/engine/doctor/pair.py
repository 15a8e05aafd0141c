"""Check target and drafters as an engine's config does, and the memory that drafters take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.config import ModelConfig, ParallelConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_specblock.config import METHOD, OptionError
from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.drafters.common.linear import process_after_loading
from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.drafters.interface import CacheLayer
from vllm_specblock.drafters.registry import drafter_kind
from vllm_specblock.engine.config import validate
from vllm_specblock.engine.config.resolved_config import (
    ResolvedDrafter,
    fetch_drafter,
    resolve,
)
from vllm_specblock.engine.doctor.examine import Finding, as_line, wrong

Refused = (OptionError, CheckpointError)


def runner() -> Finding:
    """Check that this environment runs the runner that trees need."""
    try:
        validate.check_runner(EngineArgs(model=os.curdir), ParallelConfig())
    except OptionError as error:
        return wrong("runner", "not Model Runner V2", as_line(error))
    return Finding("runner", "Model Runner V2")


def pair(target: str | None, given: dict[str, Any] | None) -> Iterator[Finding]:
    """Yield findings about a target, its drafters and their memory; arguments as in `examine`."""
    if target is None:
        if given is not None:
            yield alone(given)
        return
    try:
        args = EngineArgs(model=target)  # offline, vLLM looks for a hub id's files here
        model = args.create_model_config()
    except Exception as error:  # any error of vLLM or transformers
        yield wrong("target", target, f"vLLM does not take it: {as_line(error)}")
        return
    try:
        validate.check_target(model)
        validate.check_quantization(model)
    except OptionError as error:
        yield wrong("target", target, as_line(error))
        return
    yield Finding("target", f"{target}: {model.architecture}, {_dtype(model.dtype)}")
    if given is None:
        return
    args.speculative_config = {"method": METHOD, **given}
    try:
        if given.get("method", METHOD) != METHOD:
            raise OptionError(f"'method' is {given['method']!r}, but must be {METHOD!r} here.")
        resolved = resolve(args, model, ParallelConfig())
    except Refused as error:
        yield wrong("drafter", _named(given), as_line(error))
        return
    for number, drafter in enumerate(resolved.drafters, 1):
        which = f" {number}" if resolved.combine else ""
        if drafter.folder is None:
            yield Finding(f"drafter{which}", f"{drafter.kind}, reads the requests' own text")
            continue
        layers = ", ".join(map(str, drafter.layers)) or "none"
        found = f"{drafter.folder}: {drafter.kind}, reads target layers {layers}"
        yield Finding(f"drafter{which}", found)
        yield memory(drafter, model, resolved.num_speculative_tokens, f"memory{which}")


def alone(given: dict[str, Any]) -> Finding:
    """Check a drafter without a target."""
    advice = "Give --target to hold it against one."
    if set(given) != {"model"}:
        return wrong("drafter", "not looked at", advice)
    try:
        folder = fetch_drafter(given["model"])
        kind = kind_of(folder)
        files = drafter_kind(kind).load_checkpoint_module()
        files.check_tensors(folder, files.read_config(folder))
    except Refused as error:
        return wrong("drafter", _named(given), as_line(error))
    return Finding("drafter", f"{_named(given)}: {kind}, whole", "note", advice)


def _named(given: dict[str, Any]) -> str:
    return str(given.get("model") or "without a model")


def memory(
    drafter: ResolvedDrafter, target: ModelConfig, num_speculative_tokens: int, name: str
) -> Finding:
    """Return the size of a drafter's weights and cache, beside the target's cache."""
    kind, dtype = drafter_kind(drafter.kind), target.dtype
    assert drafter.folder is not None
    model = kind.load_checkpoint_module().load(Path(drafter.folder), dtype=dtype)
    quantization = getattr(drafter.options, "quantization", None)
    if quantization is not None:
        process_after_loading(model, quantization)
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    nodes, columns = num_speculative_tokens, tuple(range(len(drafter.layers)))
    sizes = nodes, target.max_model_len, nodes, columns
    made = kind.load_class()(model, torch.nn.Identity(), drafter.options, *sizes)
    own = sum(map(entries, made.cache_layers())) * dtype.itemsize
    one = ParallelConfig()
    heads, layers = target.get_num_kv_heads(one), target.get_num_layers(one)
    beside = entries(CacheLayer(heads, target.get_head_size(), layers)) * dtype.itemsize
    found = (
        f"weights {weights / 2**20:,.1f} MiB; cache {own / 2**10:.1f} KiB per token, beside "
        f"{beside / 2**10:.1f} of the target's (in {_dtype(dtype)})"
    )
    if own <= beside:
        return Finding(name, found)
    advice = (
        "Less than half of the texts fit that fit without drafts: a drafter of fewer layers, heads "
        "or positions takes less."
    )
    return Finding(name, found, "note", advice)


def entries(layer: CacheLayer) -> int:
    """Return the numbers that a token leaves in a layer."""
    return 2 * layer.num_kv_heads * layer.head_dim * layer.entries_per_token


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
