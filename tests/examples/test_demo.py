"""The demo around its engines: processes that take turns, the table, near-ties."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM

from vllm_specblock.bench.near_ties import bfloat16_step
from vllm_specblock.bench.process import EngineProcess, end_all

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "examples/tiny_pair/target"

# Speaks as `vllm_specblock/engine/offline/answering.py` does, and counts instead of thinking.
CHILD = """
import json, sys
if json.loads(sys.stdin.readline())["model"] == "missing":
    print("there is no such model", file=sys.stderr)
    sys.exit(3)
say = lambda what: print(json.dumps(what), flush=True)
say({"runner": "none"})
for job in map(json.loads, sys.stdin):
    for number in range(3):
        say({"said": [0, [number, 7]]})
    ids = [job["prompts"][0] + [job["max_tokens"]]]
    say({"ids": ids, "wall": 0.5, "cpu": 0.25, "counters": {"vllm:inter_token_latency_seconds": 4}})
"""


def load(*names):
    """Modules of examples/, which leave nothing behind for other tests: its other folders have
    modules of the same names."""
    path, before = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return [__import__(name) for name in names]
    finally:
        sys.path[:] = path
        for name in sys.modules.keys() - before:
            if str(ROOT / "examples") in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


(demo,) = load("demo")
Answer = demo.Answer


@pytest.fixture
def start(tmp_path):
    started = []

    def go(model):
        arguments, command = {"model": model}, [sys.executable, "-c", CHILD]
        log = tmp_path / f"{len(started)}.log"
        started.append(EngineProcess("e", arguments, {}, log, command, wait=False))
        return started[-1]

    yield go
    end_all(started)


def answer_of(ids, wall=1.0, steps=4):
    return Answer([1, 2], ids, wall, 2 * wall, steps)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The command with engines that say `plain` and `drafted`, answer by answer."""
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")

    def go(plain, drafted, **options):
        plain, drafted, started, ended = iter(plain), iter(drafted), [], []

        def start(engines, *given):
            engines += [plain, drafted]
            started.extend(given)

        def ask(engine, tokenizer, message, max_tokens, listener):
            if max_tokens == 24:  # warms up
                return None
            listener.hear(0, tokenizer("class")["input_ids"])
            return next(engine)

        monkeypatch.setattr(demo, "make_target", lambda folder: TARGET)
        monkeypatch.setattr(demo, "start", start)
        monkeypatch.setattr(demo, "ask", ask)
        monkeypatch.setattr(demo, "end_all", ended.extend)
        with pytest.raises(typer.Exit) as left:
            given = {"drafter": str(drafter), "lookup": False, "nodes": 16, "blocks": 1}
            demo.main(**given | {"max_tokens": 8, "dtype": "float32", "eager": False} | options)
        assert len(ended) == (2 if started else 0)
        return left.value.exit_code, started

    return go


FOUR = [[number] * 5 for number in range(10, 14)]


def test_the_table(run, capsys):
    plain = [answer_of(ids, wall=0.5) for ids in FOUR]
    drafted = [answer_of(ids, wall=0.25, steps=2) for ids in FOUR]
    code, (target, speculative, dtype, eager) = run(plain, drafted)
    assert (code, target, dtype, eager) == (0, TARGET, "float32", False)
    assert speculative["num_speculative_tokens"] == 16 and "second_drafter" not in speculative
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]
    assert ["vLLM", "10.0", "200.0", "1.00"] in rows
    assert ["vLLM", "+", "SpecBlock", "(16)", "20.0", "100.0", "2.00"] in rows
    assert "speed-up: 2.00 x by the clock, 2.00 x by processor time" in lines
    assert "identical: yes (4 of 4 answers, 20 tokens in all)" in lines
    assert sum("[vLLM 0.5 s, with drafts 0.2 s: the same answer]" in line for line in lines) == 4
    # The drafted answer is shown, the plain one is not.
    assert sum(line == "class" for line in lines) == 4


def test_another_answer_in_float32_is_a_failure(run, capsys):
    plain = [answer_of(ids) for ids in FOUR]
    drafted = [answer_of([*ids[:2], 99, *ids[3:]]) for ids in FOUR[:1]] + plain[1:]
    assert run(plain, drafted)[0] == 1
    shown = capsys.readouterr().out
    assert "identical: no (3 of 4 answers" in shown and "ANOTHER ANSWER" in shown


def best_two(prompt):
    """The target's own best two tokens after a prompt, and how far apart they are."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    with torch.no_grad():
        values, tokens = model(torch.tensor([prompt])).logits[0, -1].topk(2)
    return tokens.tolist(), values.tolist()


def test_in_bfloat16_every_difference_is_held_against_a_step(run, capsys, monkeypatch):
    ids = [5, 6, 7]
    tokens, values = best_two([1, 2, *ids])
    plain = [answer_of([*ids, tokens[0], 3])]
    drafted = [answer_of([*ids, tokens[1], 4])]
    monkeypatch.setattr(demo, "PROMPTS", ["one"])
    expected = (values[0] - values[1]) / bfloat16_step(values[0])
    code, _ = run(plain, drafted, dtype="bfloat16")
    assert code == (expected > 1)
    shown = capsys.readouterr().out
    assert "token 3: " in shown and f"{expected:.2f} of bfloat16's step" in shown
    # Any other token is not nearly as good.
    assert run(plain, [answer_of([*ids, 2000, 4])], dtype="bfloat16")[0] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drafter": "no/such/folder"}, "there is no drafter in no/such/folder: examples/smollm2"),
        ({"dtype": "float16"}, "--dtype is float32 or bfloat16, not float16."),
    ],
)
def test_mistakes_are_one_sentence_and_start_nothing(run, capsys, options, said):
    code, given = run([], [], **options)
    assert (code, given) == (1, [])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: ") and said in line
