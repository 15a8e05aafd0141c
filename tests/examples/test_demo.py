"""The demo around its engines: what it starts, what it concludes, near-ties."""

from __future__ import annotations

import sys

import pytest
import torch
import typer
from support.scripts import ROOT, TARGET, load_script
from transformers import AutoModelForCausalLM

from vllm_specblock.bench.live import Answer

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [*sys.path])  # it adds folders
    demo = load_script(ROOT / "examples/demo.py")
    del sys.modules["target"]  # there is another one in examples/tiny_pair


def answer_of(ids, seconds=1.0):
    answer = Answer("", lambda ids: " ".join(map(str, ids)))
    answer.hear(ids)
    answer.seconds = seconds
    return answer


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The command with engines that answer `plain` and `drafted`, prompt by prompt."""
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")

    def go(plain, drafted, **options):
        started = []
        pairs = [([1, 2], *each) for each in zip(plain, drafted)]
        monkeypatch.setattr(demo, "make_target", lambda folder: TARGET)
        monkeypatch.setattr(demo, "start_engines", lambda engines, *given: started.extend(given))
        monkeypatch.setattr(demo, "answer_all", lambda *given: pairs)
        with pytest.raises(typer.Exit) as left:
            given = {"drafter": str(drafter), "max_tokens": 8, "dtype": "float32", "eager": False}
            demo.main(**given | options)
        return left.value.exit_code, started

    return go


FOUR = [[number] * 5 for number in range(10, 14)]


def test_speed_ups_and_identical_answers(run, capsys):
    plain = [answer_of(ids, 1.0) for ids in FOUR]
    drafted = [answer_of(ids, seconds) for ids, seconds in zip(FOUR, (0.25, 0.5, 0.25, 1.0))]
    code, (target, methods, _, dtype, eager, _) = run(plain, drafted)
    assert (code, target, dtype, eager) == (0, TARGET, "float32", False)
    assert methods["plain"] is None
    drafts = methods["drafts"]
    assert drafts["second_drafter"] == {"kind": "ngram"} and drafts["draft_policy"] == "merge"
    lines = capsys.readouterr().out.splitlines()
    kinds = "Edit this code 4.00, Extract JSON 2.00, Answer from this document 4.00, Chat 1.00"
    assert f"speed-up 2.00 ({kinds})" in lines and "identical answers: 4 of 4" in lines
    assert run(plain, drafted, drafter="ngram")[1][1]["drafts"] == {
        "method": "specblock",
        "kind": "ngram",
    }


def test_another_answer_in_float32_is_a_failure(run, capsys):
    plain = [answer_of(ids) for ids in FOUR]
    drafted = [answer_of([*ids[:2], 99, *ids[3:]]) for ids in FOUR[:1]] + plain[1:]
    assert run(plain, drafted)[0] == 1
    assert "identical answers: 3 of 4" in capsys.readouterr().out


def test_in_bfloat16_answers_part_at_ties_only(run, capsys):
    """Of many texts, the one whose best two tokens are closest; its tenth best is no tie."""
    draw = torch.Generator().manual_seed(0)
    texts = torch.randint(2000, (256, 4), generator=draw)
    texts = torch.cat([torch.tensor([[1, 2]]).expand(256, -1), texts], 1)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    with torch.no_grad():
        logits, tokens = model(texts).logits[:, -1].topk(10)
    row = int((logits[:, 0] - logits[:, 1]).argmin())
    ids, (best, second, *_, tenth) = texts[row, 2:].tolist(), tokens[row].tolist()
    plain = [answer_of([*ids, best, 3])]
    for token, fails in (second, 0), (tenth, 1):
        assert run(plain, [answer_of([*ids, token, 4])], dtype="bfloat16")[0] == fails
        assert "token 4: " in (shown := capsys.readouterr().out) and "error is 0.0" in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drafter": "ngram"}, "pip could not download it."),
        ({"drafter": "no/such/folder"}, "there is no drafter in no/such/folder: examples/smollm2"),
        ({"dtype": "float16"}, "--dtype is float32 or bfloat16, not float16."),
    ],
)
def test_mistakes_are_one_sentence_and_start_nothing(capsys, monkeypatch, options, said):
    def offline(folder):
        raise demo.TargetError("pip could not download it.")

    monkeypatch.setattr(demo, "make_target", offline)
    monkeypatch.setattr(demo, "start_engines", None)
    given = {"max_tokens": 1, "dtype": "float32", "eager": False}
    with pytest.raises(typer.Exit) as left:
        demo.main(**given | options)
    assert left.value.exit_code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: ") and said in line
