"""The demo around its engines: processes that take turns, the table, near-ties."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "examples/tiny_pair/target"

# Counts instead of thinking: three steps of two tokens each, of which one was drafted.
FAKE_VLLM = """
from types import SimpleNamespace as Of
class SamplingParams:
    def __init__(self, **options): self.__dict__.update(options)
class LLM:
    def __init__(self, model, **options):
        if model == "missing": raise ValueError("there is no such model")
        self.model, self.count, self.left, self.llm_engine = model, 0, 0, self
    def get_tokenizer(self): return self
    def apply_chat_template(self, messages, **options):
        print("this must not reach the pipe")
        return [len(messages[0]["content"])]
    def get_metrics(self):
        return [Of(name="vllm:spec_decode_num_drafts", value=self.count),
                Of(name="vllm:spec_decode_num_accepted_tokens", value=self.count)]
    def add_request(self, name, prompt, params):
        assert (params.temperature, params.output_kind) == (0, "delta")
        self.left = 3
    def has_unfinished_requests(self): return self.left > 0
    def step(self):
        self.left -= 1; self.count += 1
        return [Of(outputs=[Of(token_ids=[self.left, 7], text=f"{self.model}{self.left} ")])]
"""


def load(name):
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(ROOT / "examples"))


demo, demo_engine, near_ties = (load(n) for n in ("demo", "demo_engine", "near_ties"))
Answer = demo_engine.Answer


@pytest.fixture
def start(tmp_path):
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(FAKE_VLLM)
    (package / "sampling_params.py").write_text("class RequestOutputKind: DELTA = 'delta'\n")
    started = []

    def go(model):
        environment = {"PYTHONPATH": str(tmp_path), "HOME": None}
        started.append(demo_engine.Engine({"model": model}, environment))
        return started[-1]

    yield go
    for engine in started:
        engine.close()


def state_of(engine) -> str:
    stat = Path(f"/proc/{engine._process.pid}/stat").read_text()
    return stat.rsplit(")", 1)[1].split()[0]


def until(condition) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_engines_answer_in_turns_and_rest_between(start):
    engines = [start("a"), start("b")]
    for engine in engines:
        engine.wait()
    said: list[str] = []
    for engine in (*engines, engines[0]):
        answer = engine.ask("hello", 9, said.append)
        assert (answer.prompt, answer.ids) == ([5], [2, 7, 1, 7, 0, 7])
        assert (answer.drafts, answer.accepted) == (3, 3)
        assert answer.wall > 0
        assert until(lambda: all(state_of(engine) == "T" for engine in engines))
    assert "".join(said) == "a2 a1 a0 b2 b1 b0 a2 a1 a0 "
    engines[0].close()
    assert engines[0]._process.returncode == -signal.SIGKILL


def test_an_engine_that_cannot_start_says_why(start):
    with pytest.raises(demo_engine.EngineFailed, match="ended with code 1: ValueError: there is"):
        start("missing").wait()


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is Linux's to tell")
def test_a_resting_engine_does_not_outlive_a_killed_demo(start, tmp_path):
    start("a")  # its fake is there now
    code = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "examples")!r})
from demo_engine import Engine
engine = Engine({{"model": "a"}}, {{"PYTHONPATH": {str(tmp_path)!r}}})
engine.wait()
print(engine._process.pid, flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        parent.kill()

    def gone():
        stat = Path(f"/proc/{child}/stat")
        return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"

    assert until(gone)


def answer_of(ids, wall=1.0, drafts=0, accepted=0):
    return Answer([1, 2], ids, wall, 2 * wall, drafts, accepted)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The command with engines that say `plain` and `drafted`, answer by answer."""
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")

    def go(plain, drafted, **options):
        engines = [Scripted(plain), Scripted(drafted)]
        asked = {}
        monkeypatch.setattr(demo, "make_target", lambda folder: TARGET)
        monkeypatch.setattr(demo, "start", lambda *given: asked.update(given=given) or engines)
        with pytest.raises(typer.Exit) as left:
            demo.main(**{"drafter": str(drafter), "nodes": 16, "blocks": None, "max_tokens": 8,
                         "dtype": "float32", "eager": False, **options})  # fmt: skip
        assert all(engine.closed for engine in engines) or "given" not in asked
        return left.value.exit_code, asked.get("given")

    return go


class Scripted:
    def __init__(self, answers):
        self.answers, self.closed = iter(answers), False

    def ask(self, message, max_tokens, said):
        said(f"[{message[:5]}]")
        return next(self.answers)

    def close(self):
        self.closed = True


FOUR = [[number] * 5 for number in range(10, 14)]


def test_the_table(run, capsys):
    plain = [answer_of(ids, wall=0.5) for ids in FOUR]
    drafted = [answer_of(ids, wall=0.25, drafts=2, accepted=3) for ids in FOUR]
    code, (target, speculative, dtype, eager) = run(plain, drafted)
    assert (code, target, dtype, eager) == (0, TARGET, "float32", False)
    assert speculative["num_speculative_tokens"] == 16 and "num_blocks" not in speculative
    lines = capsys.readouterr().out.splitlines()
    assert "vLLM                          10.0          200.0                         1.00" in lines
    assert "vLLM + SpecBlock (16)         20.0          100.0                         2.50" in lines
    assert "speed-up: 2.00 x by the clock, 2.00 x by processor time" in lines
    assert "identical: yes (4 of 4 answers, 20 tokens in all)" in lines
    assert sum("[vLLM 0.5 s, with drafts 0.2 s: the same answer]" in line for line in lines) == 4
    # The drafted answer is shown, the plain one is not.
    assert sum(line.startswith("[Write]") for line in lines) == 1


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
    expected = (values[0] - values[1]) / near_ties.bfloat16_step(values[0])
    code, _ = run(plain, drafted, dtype="bfloat16")
    assert code == (expected > 1)
    shown = capsys.readouterr().out
    assert "token 3: " in shown and f"{expected:.2f} of bfloat16's step" in shown
    # Any other token is not nearly as good.
    assert run(plain, [answer_of([*ids, 2000, 4])], dtype="bfloat16")[0] == 1


@pytest.mark.parametrize("value", [0.37, 1.0, 1.99, 2.0, 17.3, -130.0])
def test_a_step_is_where_torch_rounds(value):
    there = torch.tensor(abs(value)).to(torch.bfloat16)
    after = torch.nextafter(there, torch.tensor(1e9, dtype=torch.bfloat16))
    assert near_ties.bfloat16_step(value) == (after - there).item()


def test_where_answers_part():
    assert near_ties.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert near_ties.first_difference([1, 2], [1, 2, 3]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drafter": "no/such/folder"}, "there is no drafter in no/such/folder: examples/smollm2"),
        ({"dtype": "float16"}, "--dtype is float32 or bfloat16, not float16."),
    ],
)
def test_mistakes_are_one_sentence_and_start_nothing(run, capsys, options, said):
    code, given = run([], [], **options)
    assert (code, given) == (1, None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: ") and said in line


def test_options_become_vllms(run):
    answers = [answer_of(ids) for ids in FOUR]
    assert run(answers, answers, drafter="ngram", nodes=9)[1][1] == {
        "method": "specblock", "num_speculative_tokens": 9, "head": "ngram"
    }  # fmt: skip
    assert run(answers, answers, blocks=3)[1][1]["num_blocks"] == 3


def test_a_missing_target_is_one_sentence(run, capsys, monkeypatch):
    def offline(folder):
        raise demo.TargetError("pip could not download it.")

    with monkeypatch.context() as patch:
        patch.setattr(demo, "draft_options", lambda *given: {})
        patch.setattr(demo, "make_target", offline)
        with pytest.raises(typer.Exit):
            demo.main(str(TARGET), 1, None, 1, "float32", False)
    assert capsys.readouterr().err == "Error: pip could not download it.\n"
