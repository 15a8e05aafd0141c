"""The Grafana dashboard as a file; real engines are asked in `tests/engine`."""

from __future__ import annotations

import re

from support.dashboard import asked, panels


def test_every_panel_says_what_it_shows_for_the_chosen_model():
    for panel in panels():
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", "no data source of ours"
        assert panel["targets"]
        for expression in (target["expr"] for target in panel["targets"]):
            names = re.findall(r"\bvllm:\w+", expression)
            chosen = re.findall(r'\bvllm:\w+\{model_name=~"\$model"\}', expression)
            assert names and len(names) == len(chosen), expression
    assert asked()["vllm:specblock_chosen_trees_total"] == {"model_name", "head"}
