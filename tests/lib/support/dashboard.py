"""Metrics and labels that the Grafana dashboard asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.metrics.prometheus import get_prometheus_registry

DASHBOARD = Path(__file__).resolve().parents[3] / "examples/grafana/specblock.json"
_METRIC = re.compile(r"\bvllm:\w+")
_GROUPED = re.compile(r"sum by \((\w+)\) \(rate\((vllm:\w+)")


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, without the titles of its rows."""
    return [each for each in json.loads(DASHBOARD.read_text())["panels"] if each["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def asked() -> dict[str, set[str]]:
    """Sample name, e.g. "vllm:spec_decode_num_drafts_total" → labels that it must have."""
    found: dict[str, set[str]] = {}
    for expression in expressions():
        for name in _METRIC.findall(expression):
            found.setdefault(name, {"model_name"})
        for label, name in _GROUPED.findall(expression):
            found[name].add(label)
    return found


def shown(page: str) -> dict[str, set[str]]:
    """Sample name → labels that it has, of a page of `/metrics`."""
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def unanswered(page: str | None = None) -> set[str]:
    """Names that the dashboard asks for and `/metrics` (None: of this process) has not so."""
    there = shown(page or generate_latest(get_prometheus_registry()).decode())
    return {name for name, labels in asked().items() if not labels <= there.get(name, set())}


def of_adaptation(name: str) -> bool:
    """Whether only an engine with `adapt` has it."""
    return name.startswith("vllm:specblock_adapt_")
