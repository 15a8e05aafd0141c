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
from dataclasses import dataclass
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
    "adapt_judged_gain_millitokens": "Their sum of thousandths of a token that the version in use "
    "is better by than the drafter as delivered.",
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

_ATTRIBUTE = "specblock_metrics"
_exposed: DrafterMetrics | None = None


@dataclass(eq=False)
class DrafterMetrics:
    """A prometheus collector over the files of one deployment's engines."""

    stem: str  # the files' path up to "-<engine>.db"

    def files(self) -> list[str]:
        return glob.glob(glob.escape(self.stem) + "-*.db")

    def describe(self) -> list[Metric]:
        return [CounterMetricFamily(PREFIX + name, text) for name, text in HELP.items()]

    def collect(self) -> Iterable[Metric]:
        return MultiProcessCollector.merge(self.files())


def announce(config: Any) -> None:
    """Show the metrics of one deployment in this process, instead of an earlier one's.

    They are removed with `config`, vLLM's SpeculativeConfig, which carries the path to the engines.
    """
    global _exposed
    shared = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    folder = shared or tempfile.mkdtemp(prefix="specblock-metrics-")
    collector = DrafterMetrics(os.path.join(folder, f"counter_specblock-{uuid.uuid4().hex}"))
    if _exposed is not None:
        REGISTRY.unregister(_exposed)
    REGISTRY.register(collector)
    _exposed = collector
    setattr(config, _ATTRIBUTE, collector.stem)
    weakref.finalize(config, _withdraw, collector, None if shared else folder, os.getpid())


def _withdraw(collector: DrafterMetrics, folder: str | None, owner: int) -> None:
    global _exposed
    if os.getpid() != owner:  # a fork's copy of the config
        return
    if _exposed is collector:
        REGISTRY.unregister(collector)
        _exposed = None
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in collector.files():
        os.unlink(path)


def make_sink(vllm_config: Any, rank: int) -> Callable[[Counts], None] | None:
    """Return what takes the counts of an engine; None: metrics are off, or another rank writes."""
    stem = getattr(vllm_config.speculative_config, _ATTRIBUTE, None)
    if stem is None or rank != 0:
        return None
    if not os.path.isdir(os.path.dirname(stem)):
        logger.warning(
            "Drafter metrics are unavailable: the engine runs on %s, not on the server's machine.",
            socket.gethostname(),
        )
        return None
    engine = str(vllm_config.parallel_config.data_parallel_index)
    labels = {"model_name": str(vllm_config.model_config.served_model_name), "engine": engine}
    return Sink(f"{stem}-{engine}.db", labels)


class Sink:
    """Writes counts to the file `path`."""

    def __init__(self, path: str, labels: dict[str, str]) -> None:
        self.path, self.labels = path, labels
        self.keys: dict[tuple[str, int], str] = {}
        self.file: MmapedDict | None = None

    def __call__(self, counts: Counts) -> None:
        if self.file is None:
            self.file = self._create(counts)
        for key, count in counts.items():
            self.file.write_value(self.keys[key], count, 0.0)

    def _create(self, counts: Counts) -> MmapedDict:
        for name, drafter in counts:
            labels = self.labels | ({"head": str(drafter)} if drafter else {})
            names = PREFIX + name, f"{PREFIX}{name}_total", [*labels], [*labels.values()]
            self.keys[name, drafter] = mmap_key(*names, HELP[name])
        # Under its name only when complete: a reader may come at any time.
        making = f"{self.path}.new"
        file = MmapedDict(making)
        for key in self.keys.values():
            file.write_value(key, 0, 0.0)
        os.replace(making, self.path)
        return file
