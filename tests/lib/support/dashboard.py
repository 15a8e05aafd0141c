"""Metrics and labels that the Grafana dashboard asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.metrics.prometheus import get_prometheus_registry

DASHBOARD = Path(__file__).resolve().parents[3] / "examples/grafana/specblock.json"


def asked() -> dict[str, set[str]]:
    """Sample name, e.g. "vllm:spec_decode_num_drafts_total" → labels that it must have."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    text = "\n".join(each["expr"] for panel in panels for each in panel.get("targets", ()))
    found = {name: {"model_name"} for name in re.findall(r"\bvllm:\w+", text)}
    for label, name in re.findall(r"sum by \((\w+)\) \(rate\((vllm:\w+)", text):
        found[name].add(label)
    return found


def unanswered(page: str | None = None) -> set[str]:
    """Names that the dashboard asks for and `/metrics` (None: of this process) has not so."""
    page = page or generate_latest(get_prometheus_registry()).decode()
    samples = (each for family in text_string_to_metric_families(page) for each in family.samples)
    there = {sample.name: set(sample.labels) for sample in samples}
    return {name for name, labels in asked().items() if not labels <= there.get(name, set())}
