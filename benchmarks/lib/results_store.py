"""Results of a benchmark in a file that grows with each of them: a killed run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vllm_specblock.bench.results import markdown_table as markdown_table
from vllm_specblock.train import provenance
from vllm_specblock.train.data.shards import write_json

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "runs/results"
"""Default folder of figures. Git ignores it: figures that RESULTS.md quotes are copied to
benchmarks/results/, so that no run resumes with another machine's."""


def from_root(path: Path) -> str:
    """Return `path` relative to the repository's root, if it lies below."""
    path = path.resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def write_results(path: Path, content: Any) -> None:
    """Write figures as JSON; the file is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)


class ResultsStore:
    """Results by name, and the settings they were measured with.

    Args:
        path: a JSON file; made, or gone on with.
        settings: what all results have in common; JSON's types only.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path, self.settings = path, settings
        # Of the code that is about to be measured: the tree may change while it runs.
        self.provenance = provenance.provenance()
        self.results: dict[str, Any] = {}
        if path.exists():
            known = json.loads(path.read_text(encoding="utf-8"))
            now = _circumstances(settings, self.provenance)
            then = _circumstances(known["settings"], known["provenance"])
            other = {key for key in now.keys() | then.keys() if now.get(key) != then.get(key)}
            if other:
                raise SystemExit(
                    f"{path} has results with other {', '.join(sorted(other))}: give another "
                    "--out, or delete it."
                )
            self.results = known["results"]

    def __contains__(self, name: str) -> bool:
        return name in self.results

    def add(self, name: str, result: Any) -> None:
        self.results[name] = result
        whole = {"settings": self.settings, "provenance": self.provenance, "results": self.results}
        write_results(self.path, whole)


def _circumstances(settings: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Return the settings and versions that have to be equal for results to be compared."""
    return {**settings, "revision": facts["git"]["plugin"], "versions": facts["versions"]}
