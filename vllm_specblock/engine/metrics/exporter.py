"""Export of the counters to `/metrics` and `LLM.get_metrics`.

The model's process writes a file of prometheus_client's multi-process mode, and a collector in the
frontend reads it; with several API servers vLLM does. A stat logger plugin would turn statistics on
for every model, and `LLM` does not load one.
"""

from __future__ import annotations

import glob
import logging
import os
import shutil
import socket
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_specblock.engine.metrics.counters import Counts

logger = logging.getLogger("vllm.specblock")

PREFIX = "vllm:specblock_"
"""`LLM.get_metrics` shows only what starts with "vllm:"."""

LEARNING = {
    "adapt_recorded_tokens": "Answered tokens that were recorded to learn from.",
    "adapt_recorded_requests": "Requests of which something was recorded; resumed ones once more.",
    "adapt_unrecorded_requests": "Requests not recorded: no free memory.",
    "adapt_opted_out_requests": "Requests not recorded: they opted out.",
    "adapt_updates_heads": "Updates of the drafter's heads.",
    "adapt_updates_full": "Updates of all of the drafter.",
    "adapt_update_microseconds_heads": "Time of the trainer in updates of heads.",
    "adapt_update_microseconds_full": "Time of the trainer in updates of all.",
    "adapt_versions_offered": "Versions that the trainer offered to the engine.",
    "adapt_versions_refused_checksum": "Versions refused: incomplete, or made for another drafter.",
    "adapt_versions_refused_not_finite": "Versions that held NaN or infinite numbers.",
    "adapt_versions_refused_not_better": "Versions that the judge found no better.",
    "adapt_versions_refused_weights": "Updates after which weights were not finite.",
    "adapt_swaps": "Versions that the engine took.",
    "adapt_swap_microseconds": "Time of swaps.",
    "adapt_rollbacks": "Returns to an earlier version.",
    "adapt_trainer_restarts": "Trainers that died and were started again.",
    "adapt_judged_requests": "Requests on which versions were judged.",
    "adapt_judged_gain_millitokens": "Sum over these requests: thousandths of a token a step that "
    "the version in use gains over the delivered drafter.",
    "adapt_dropped_records": "Records that the trainer did not keep.",
}
"""Exported only with `adapt`."""

HELP = LEARNING | {
    "drafted_trees": "Trees of at least one node that the drafter drafted.",
    "drafted_nodes": "Nodes of the trees that the drafter drafted.",
    "calibration_thousandths": "Sum over the drafted trees of thousandths of β, by which the "
    "drafter's logits were multiplied.",
    "chosen_trees": "Verified trees whose first node the drafter drafted.",
    "verified_nodes": "Verified nodes that the drafter drafted.",
    "accepted_nodes": "Accepted nodes that the drafter drafted.",
    "tree_nodes": "Verified nodes, each once.",
    "shared_nodes": "Verified nodes that both drafters drafted.",
    "shared_accepted_nodes": "Accepted nodes that both drafters drafted.",
    "both_drafted": "Request steps in which both drafters drafted a tree.",
    "agreed": "Request steps in which both drafters' trees begin with the same token.",
    "second_skipped": "Request steps in which the second drafter was skipped.",
    "drafting_nanoseconds": "Time of the drafters in steps without prompts.",
    "drafting_steps": "Steps without prompts in which trees were drafted.",
}


class DrafterMetrics:
    """A prometheus collector over the files of the newest deployment's engines."""

    pattern = ""  # matches the files

    def describe(self) -> list[Metric]:
        return [CounterMetricFamily(PREFIX + name, text) for name, text in HELP.items()]

    def collect(self) -> Iterable[Metric]:
        return MultiProcessCollector.merge(glob.glob(self.pattern))


_shown = DrafterMetrics()
REGISTRY.register(_shown)


def announce(config: Any) -> None:
    """Show the metrics of one deployment in this process, instead of an earlier one's.

    They are removed with `config`, vLLM's SpeculativeConfig, which carries the path to the engines.
    """
    shared = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    folder = shared or tempfile.mkdtemp(prefix="specblock-metrics-")
    stem = os.path.join(folder, f"counter_specblock-{uuid.uuid4().hex}")
    config.specblock_metrics = stem
    _shown.pattern = pattern = glob.escape(stem) + "-*.db"
    weakref.finalize(config, _withdraw, pattern, None if shared else folder, os.getpid())


def _withdraw(pattern: str, folder: str | None, owner: int) -> None:
    if os.getpid() != owner:  # a fork's copy of the config
        return
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    for path in glob.glob(pattern):
        os.unlink(path)


def make_sink(vllm_config: Any, rank: int) -> Callable[[Counts], None] | None:
    """Return what takes the counts of an engine; None: metrics are off, or another rank writes."""
    stem = getattr(vllm_config.speculative_config, "specblock_metrics", None)
    if stem is None or rank != 0:
        return None
    if not os.path.isdir(os.path.dirname(stem)):
        logger.warning(
            "Drafter metrics are unavailable: the engine runs on %s, not on the server's machine.",
            socket.gethostname(),
        )
        return None
    engine = str(vllm_config.parallel_config.data_parallel_index)
    shared = {"model_name": str(vllm_config.model_config.served_model_name), "engine": engine}
    # Under its name only when it can be read: a reader may come at any time.
    path = f"{stem}-{engine}.db"
    file = MmapedDict(f"{path}.new")
    os.replace(f"{path}.new", path)

    @cache
    def key(name: str, drafter: int) -> str:
        labels = shared | ({"head": str(drafter)} if drafter else {})
        names = PREFIX + name, f"{PREFIX}{name}_total", [*labels], [*labels.values()]
        return mmap_key(*names, HELP[name])

    def sink(counts: Counts) -> None:
        for each, count in counts.items():
            file.write_value(key(*each), count, 0.0)

    return sink
