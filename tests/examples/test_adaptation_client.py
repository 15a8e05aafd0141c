"""The client that shifts its domain: its arguments, and a line about a window."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/adaptation"))
import client

SCRAPED = """\
# HELP vllm:inter_token_latency_seconds Steps.
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf"} 30.0
vllm:inter_token_latency_seconds_count{engine="0"} 30.0
vllm:inter_token_latency_seconds_sum{engine="0"} 2.5
# HELP vllm:time_to_first_token_seconds Requests.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 12.0
vllm:time_to_first_token_seconds_count{engine="0"} 12.0
vllm:time_to_first_token_seconds_sum{engine="0"} 1.5
# HELP vllm:generation_tokens_total Tokens.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0"} 60.0
vllm:generation_tokens_total{engine="1"} 40.0
# HELP vllm:specblock_adapt_swaps_total Swaps.
# TYPE vllm:specblock_adapt_swaps_total counter
vllm:specblock_adapt_swaps_total{engine="0"} 3.0
# HELP vllm:num_requests_running Gauge.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 7.0
"""


def test_a_window_is_the_difference_of_two_scrapes():
    before = client.Counters({client.STEPS: 10.0, client.REQUESTS: 2.0, client.TOKENS: 50.0})
    after = client.Counters.parsed(SCRAPED)
    assert "vllm:num_requests_running" not in after.values
    line = client.line("maths", 16, before, after, 2.0)
    assert line.split() == [
        *("maths", "16", "requests", "τ", "2.00", "25.0", "tokens/s"),
        *("0", "updates", "heads,", "0", "updates", "full,", "3", "swaps,", "0", "rollbacks"),
    ]
    assert "τ –" in client.line("maths", 16, after, after, 2.0)
