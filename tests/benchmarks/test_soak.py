"""What a soak says of its findings."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("aiohttp", reason="comes with vLLM")

from lib.soak_phases import MODEL, PHASES


@pytest.mark.parametrize("name", PHASES)
def test_both_servers_have_the_same_flags(name, tmp_path):
    phase = PHASES[name]
    plain, ours = phase.arguments(tmp_path, None), phase.arguments(tmp_path, 16)
    assert plain[0] == ours[0] == MODEL
    *same, option, drafts = ours
    assert option == "--speculative-config"
    assert json.loads(drafts)["num_speculative_tokens"] == 16
    # Of slots for adapters plain vLLM has one more.
    assert [pair for pair in zip(plain, same, strict=True) if pair[0] != pair[1]] == (
        [("3", "2")] if phase.adapters else []
    )
