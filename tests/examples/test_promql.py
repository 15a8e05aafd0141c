"""The queries' own arithmetic, on scrapes whose answers are known."""

from __future__ import annotations

import math

import pytest
from support.promql import Scrapes, samples

BEFORE = """
vllm:trees_total{head="1",model_name="a"} 10
vllm:trees_total{head="2",model_name="a"} 30
vllm:trees_total{head="1",model_name="b"} 7
vllm:nodes_total{head="1",model_name="a"} 100
vllm:nodes_total{head="2",model_name="a"} 100
vllm:time_bucket{le="0.1",model_name="a"} 0
vllm:time_bucket{le="1",model_name="a"} 0
vllm:time_bucket{le="+Inf",model_name="a"} 0
"""
AFTER = """
vllm:trees_total{head="1",model_name="a"} 20
vllm:trees_total{head="2",model_name="a"} 60
vllm:trees_total{head="1",model_name="b"} 1007
vllm:nodes_total{head="1",model_name="a"} 150
vllm:nodes_total{head="2",model_name="a"} 100
vllm:time_bucket{le="0.1",model_name="a"} 5
vllm:time_bucket{le="1",model_name="a"} 9
vllm:time_bucket{le="+Inf",model_name="a"} 10
vllm:new_total{model_name="a"} 3
"""


def rate(name: str) -> str:
    return f'rate(vllm:{name}_total{{model_name=~"$model"}}[$__rate_interval])'


@pytest.fixture
def scrapes():
    return Scrapes(samples(BEFORE), samples(AFTER), seconds=10.0, model="a")


def by_head(vector) -> dict[str, float]:
    return {dict(labels)["head"]: value for labels, value in vector.items()}


def test_rates_of_one_model(scrapes):
    assert by_head(scrapes.query(f"sum by (head) ({rate('trees')})")) == {"1": 1.0, "2": 3.0}
    assert [*scrapes.query(f"1 + 2 * sum ({rate('trees')}) / 4").values()] == [3.0]
    assert [*scrapes.query(f"(1 + 2) * sum ({rate('trees')})").values()] == [12.0]


def test_quotients_are_matched_by_label(scrapes):
    nodes, trees = (f"sum by (head) ({rate(name)})" for name in ("nodes", "trees"))
    assert by_head(scrapes.query(f"{nodes} / {trees}")) == {"1": 5.0, "2": 0.0}
    whole = scrapes.query(f"({nodes} > 0) / on () group_left () sum ({rate('trees')})")
    assert by_head(whole) == {"1": 1.25}
    assert scrapes.query(f"{nodes} / sum ({rate('trees')})") == {}, "labels do not fit"
    assert all(map(math.isnan, scrapes.query(f"{trees} / ({nodes} * 0)").values()))


def test_what_was_not_there_before_has_no_rate(scrapes):
    assert scrapes.query(rate("new")) == {}
    assert [*scrapes.query('max (vllm:new_total{model_name=~"$model"})').values()] == [3.0]


def test_quantiles_of_a_histogram(scrapes):
    of = 'sum by (le) (rate(vllm:time_bucket{model_name=~"$model"}[$__rate_interval]))'
    for quantile, bound in ((0.5, 0.1), (0.9, 1.0), (0.95, math.inf)):
        assert [*scrapes.query(f"histogram_quantile({quantile}, {of})").values()] == [bound]


@pytest.mark.parametrize("wrong", ["sum (", "avg (vllm:x{})", "1 +", "1 2", "vllm:x{a!='b'}"])
def test_what_is_not_known_is_said(scrapes, wrong):
    with pytest.raises(ValueError):
        scrapes.query(wrong)
