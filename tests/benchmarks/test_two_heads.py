"""What the benchmark of two heads asks for, keeps and prints; no engine runs here."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import two_heads
from engine_process import Answer, EngineFailed, Request, Task, grown, read_counters, run
from lib.options import chosen
from lib.spec_configs import POLICIES
from typer.testing import CliRunner

from vllm_specblock.engine.metrics.acceptance import STEPS, TOKENS

HOW = {"num_blocks": 2, "num_starts": 4, "confidence": "sum"}


def cli(*arguments):
    import typer

    app = typer.Typer()
    app.command()(two_heads.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def all_engines():
    return two_heads.engines("one", "two", "eagle", [30, 60], [7, 3], HOW)


def test_every_engine_is_there_once_per_budget(all_engines):
    assert next(iter(all_engines)) == two_heads.PLAIN and all_engines[two_heads.PLAIN] is None
    of_budget = [name for name in all_engines if name.endswith("@ 30")]
    assert len(of_budget) == 3 + len(POLICIES)
    assert len(all_engines) == 1 + 2 + 2 * len(of_budget)
    told_apart = {json.dumps(keys, sort_keys=True) for keys in all_engines.values()}
    assert len(told_apart) == len(all_engines)


def test_only_keeps_plain_vllm(all_engines):
    kept = chosen(all_engines, "head 1; trie, split @ 60")
    assert list(kept) == [
        "vLLM",
        "head 1 (code) @ 30",
        "head 1 (code) @ 60",
        "merge trie, split @ 60",
    ]
    with pytest.raises(SystemExit, match=r"'hed 1' is in no engine's name; there are: vLLM;"):
        chosen(all_engines, "hed 1")


def test_dry_run_starts_nothing(monkeypatch):
    monkeypatch.setattr(two_heads, "run", lambda request: pytest.fail("an engine was started"))
    result = cli("--dry-run", "--budgets", "12", "--only", "merge")
    assert result.exit_code == 0 and "merge disjoint @ 12: {" in result.output


def fake_run(calls, wrong=(), failing=()):
    """Stands in for an engine: two tokens per step, and other ids where it is `wrong`."""

    def run(request):
        name = json.dumps(request.speculative)
        calls.append(request)
        if any(part in name for part in failing):
            raise EngineFailed("The engine ended with code 1: no such head")
        for place, task in enumerate(request.tasks):
            bad = any(part in name for part in wrong) and place == 3
            ids = [
                [index, place, 7 if bad and index == 1 else 5]
                for index, _ in enumerate(task.prompts)
            ]
            counters = {TOKENS: 10, STEPS: 4 if request.speculative else 10}
            yield Answer(ids, 0.5 if request.speculative else 1.0, counters)

    return run


@pytest.fixture
def prompts_folder(tmp_path):
    for name in two_heads.SLICES:
        lines = [json.dumps({"prompt": f"{name} {i}"}) + "\n" for i in range(3)]
        (tmp_path / f"{name}_held_out.jsonl").write_text("".join(lines))
    return tmp_path


def go(folder, *more):
    given = f"--prompts-from {folder} --out {folder}/r.json --prompts 2 --budgets 8 --chains 3"
    return cli(*given.split(), "--only", "head; route @", *more)


def test_the_table_and_a_killed_run_that_goes_on(prompts_folder, monkeypatch):
    calls = []
    monkeypatch.setattr(two_heads, "run", fake_run(calls, failing=["tables"]))
    first = go(prompts_folder)
    assert first.exit_code == 1 and "no such head" in first.output
    asked = [task.prompts for task in calls[0].tasks]
    assert asked == [["code 0", "code 1"]] * 2 + [["tables 0", "tables 1"]] * 2
    monkeypatch.setattr(two_heads, "run", fake_run(calls))
    before = len(calls)
    second = go(prompts_folder)
    assert second.exit_code == 0, second.output
    # What was measured is not measured again: what had failed is.
    assert {"tables" in json.dumps(call.speculative) for call in calls[before:]} == {True}
    row = "| head 1 (code) @ 8 |" + " τ 2.50, 12/s (2.00 ×) |" * 4 + " 0 of 8 |"
    assert row in second.output
    assert "| vLLM |" + " τ 1.00, 6/s (1.00 ×) |" * 4 + " – |" in second.output


def test_an_output_that_differs_is_counted_and_fails(prompts_folder, monkeypatch):
    monkeypatch.setattr(two_heads, "run", fake_run([], wrong=["second_drafter"]))
    result = go(prompts_folder)
    assert result.exit_code == 1
    (row,) = [line for line in result.output.splitlines() if line.startswith("| route")]
    assert row.endswith("| 1 of 8 |")


def test_vllms_own_chain_may_differ_where_it_samples():
    def results(engine, name):
        return {engine: {name: {"different": 2}}}

    chain = f"{two_heads.CHAIN} @ 7"
    assert two_heads.must_not_differ(results(chain, "code, T = 1")) == 0
    assert two_heads.must_not_differ(results(chain, "code, T = 0")) == 2
    assert two_heads.must_not_differ(results("route @ 7", "code, T = 1")) == 2


def test_counters_are_told_apart_by_head():
    def counter(name, value, **labels):
        return SimpleNamespace(name=name, value=value, labels=labels)

    def histogram(name, count):
        return SimpleNamespace(name=name, count=count, labels={})

    before = read_counters(
        [counter(TOKENS, 3), counter("vllm:prompt_tokens", 9), histogram(STEPS, 2)]
    )
    after = read_counters(
        [
            counter(TOKENS, 8),
            histogram(STEPS, 6),
            histogram("vllm:request_queue_time_seconds", 6),
            counter("specblock:drafted", 2, head="1"),
            counter("specblock:drafted", 5, head="2"),
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[1, 2]),
        ]
    )
    assert grown(before, after) == {
        TOKENS: 5,
        STEPS: 4,
        "specblock:drafted{head=1}": 2,
        "specblock:drafted{head=2}": 5,
    }


def script(tmp_path, text):
    path = tmp_path / "engine.py"
    path.write_text(text)
    return path


def test_an_engine_in_a_process_of_its_own(tmp_path):
    request = Request("m", {"x": 1}, [Task(["a"], 0.0, 4)], {"dtype": "float32"})
    echo = script(
        tmp_path,
        (
            "import json, sys\n"
            "r = json.load(sys.stdin)\n"
            "assert r['speculative'] == {'x': 1} and r['tasks'][0]['prompts'] == ['a']\n"
            "print('loading')\n"
            "counters = {'vllm:generation_tokens': 2}\n"
            "answer = {'ids': [[1, 2]], 'seconds': 0.5, 'counters': counters}\n"
            "print('engine_process:' + json.dumps(answer))\n"
        ),
    )
    (answer,) = run(request, echo)
    assert answer.ids == [[1, 2]] and answer.tau == 1.0
    assert answer.summary(None)["tokens_per_second"] == 4.0


@pytest.mark.parametrize(
    "text, said",
    [
        ("import sys; sys.stdin.read(); sys.exit('no such model')", "code 1: no such model"),
        ("import sys; sys.stdin.read(); print('silent')", "code 0: silent"),
    ],
)
def test_an_engine_that_fails_says_why(tmp_path, text, said):
    with pytest.raises(EngineFailed, match=said):
        list(run(Request("m", None, [Task(["a"], 0.0, 4)]), script(tmp_path, text)))
