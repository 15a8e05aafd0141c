"""The Grafana dashboard as a file; real engines are asked in `tests/engine`."""

from __future__ import annotations

import re

import pytest
from support.dashboard import asked, expressions, panels


def test_every_panel_says_what_it_shows():
    found = panels()
    assert len({panel["id"] for panel in found}) == len(found)
    for panel in found:
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", "no data source of ours"
        assert panel["targets"]


def test_panels_do_not_cover_each_other():
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24 and not cells & mine, panel["title"]
        cells |= mine


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_asks_for_one_model(expression):
    """Parentheses close, and every metric has the selector of the chosen model."""
    depth = 0
    for character in expression:
        depth += (character == "(") - (character == ")")
        assert depth >= 0
    assert depth == 0
    names = re.findall(r"\bvllm:\w+", expression)
    assert names and len(names) == len(
        re.findall(r'\bvllm:\w+\{model_name=~"\$model"\}', expression)
    )


def test_labels_that_are_asked_for():
    labels = asked()
    assert labels["vllm:specblock_chosen_trees_total"] == {"model_name", "head"}
    assert labels["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == {
        "model_name",
        "position",
    }
