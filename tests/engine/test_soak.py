"""A minute under fire: `benchmarks/soak.py` for an hour is the same with more windows."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from lib.soak_phases import PHASES
from lib.soak_run import Findings, run_phase

REQUESTS = 60


@pytest.mark.skipif(
    shutil.which("vllm", path=str(Path(sys.executable).parent)) is None,
    reason="the vllm command is not installed",
)
def test_mixed_traffic_gets_plain_vllms_answers(tmp_path):
    seen: list[int] = []
    found = run_phase(
        PHASES["whole trees"],
        nodes=16,
        seed=1,
        clients=16,
        window=REQUESTS,
        enough=lambda found, seconds: found.requests >= REQUESTS,
        folder=tmp_path,
        seen=lambda found: seen.append(found.windows),
    )
    assert not found.wrong(), found.differences
    assert isinstance(found, Findings) and seen == [1]
    assert found.finished > REQUESTS // 2 and found.cut and found.refused
    assert found.finished + found.cut + found.refused == REQUESTS
    assert found.compared_tokens > 500
    assert found.counters["plain"]["accepted_nodes"] == 0 < found.counters["drafts"]["preemptions"]
