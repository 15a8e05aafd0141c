"""`specblock bench` with real engines: the example pair beside plain vLLM, each in its process."""

from __future__ import annotations

import json

from support.engines import DRAFTER, EMULATED, TARGET

from vllm_specblock.bench.config import BenchConfig
from vllm_specblock.bench.results import figures_of, write_results
from vllm_specblock.bench.run import measure, prepare


def test_the_example_pair_beside_plain_vllm(tmp_path):
    questions = tmp_path / "code.jsonl"
    chats = [["def main(argv):\n", "\n\nclass Reader:\n"], ["import os\n\n"]]
    questions.write_text(
        "".join(json.dumps({"id": n, "turns": turns}) + "\n" for n, turns in enumerate(chats))
    )
    config = BenchConfig(
        target=TARGET,
        set=(f"code={questions}",),
        method=("plain-v2", "specblock"),
        drafter={"specblock": DRAFTER},
        nodes=12,
        raw=True,
        max_new_tokens=24,
        ignore_eos=True,
        rounds=1,
        dtype="float32",
        engine={"enforce_eager": True, **EMULATED},
        out=tmp_path / "out",
    )
    bench = prepare(config)
    measure(bench)
    assert not bench.failures
    figures, base = figures_of(bench)
    assert base == "plain-v2"
    plain = [each for each in figures if each.method == "plain-v2"]
    ours = [each for each in figures if each.method == "specblock"]
    for each in plain:
        assert (each.speedup, each.tau, each.draft_ms, each.outputs) == (1.0, 1.0, None, 3)
    for each in ours:
        assert (each.tokens, each.outputs, each.different) == (3 * 24, 3, 0)
        assert each.speedup > 0 and each.speedup_cpu > 0 and 1.0 < each.tau <= 9
        assert each.draft_ms > 0
    engines = bench.store.head["engines"]
    assert engines["specblock"] == {"runner": "V2", "dtype": "float32", "compiled": "NONE"}
    assert "| specblock |" in write_results(bench)[0]
