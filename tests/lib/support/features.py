"""Features of a target, extracted in a process of its own: its KV connector is process-wide."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def features_of(target: Path, layers: tuple[int, int, int], tokens: list[int], scratch: Path):
    """States [T, layers · H] as nested lists."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_extract, target, layers, tokens, scratch).result()


def _extract(target, layers, tokens, scratch):
    import torch

    from vllm_specblock.engine.offline.target import FeatureExtractor

    engine = {"enforce_eager": True, "max_num_seqs": 4, "distributed_executor_backend": "uni"}
    engine |= {"kv_cache_memory_bytes": 64 << 20, "gpu_memory_utilization": 0.3}
    extractor = FeatureExtractor(target, layers, 128, "float32", scratch, engine)
    ((states, _),) = extractor([torch.tensor(tokens)])
    return states.tolist()
