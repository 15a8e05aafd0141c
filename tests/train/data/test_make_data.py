from __future__ import annotations

import json

import pytest
import torch
from support.chat import (
    BOS,
    CHATML,
    END,
    FORGETFUL,
    IDS,
    TOKENS,
    Answers,
    answer_to,
    ids_of,
    make_target,
    text_of,
)

from vllm_specblock.train.config import DataOptions, TrainError, parse
from vllm_specblock.train.data import shards
from vllm_specblock.train.data.make_data import make_data


def chat_line(*questions):
    return {"data": [turn for question in questions for turn in (question, "old")]}


LINES = [
    chat_line("a b", "and now", "more"),
    {"text": "some text, of its own."},
    {"prompt": "say"},
    "{broken",
    chat_line("what"),
    {"prompt": "x" * 300},
    *(chat_line(f"number {i}", "go on") for i in range(6)),
]
LONG = LINES.index({"prompt": "x" * 300})
VOCAB = len(TOKENS)


@pytest.fixture
def run(tmp_path):
    """Make data from LINES or others; options are tested ones' defaults but for the changes."""
    source = tmp_path / "in.jsonl"

    def go(out="out", lines=LINES, template=CHATML, answerer=None, vocab=VOCAB, **options):
        text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        source.write_text("\n".join(text) + "\n")
        target = make_target(tmp_path / "target", template, vocab)
        parsed = parse(
            DataOptions,
            **{
                "target": target,
                "input": (source,),
                "out": tmp_path / out,
                "max_length": 200,
                "max_new_tokens": 8,
                "shard_size": 3,
                **options,
            },
        )
        answerer = Answers() if answerer is None else answerer
        return make_data(parsed, lambda: answerer)

    go.folder, go.source = tmp_path, source
    return go


def expected_dialogue(questions, temperature=0.0, most=200, new=8, seeds=()):
    """A ChatML conversation as letters, answered one by one: ids and mask."""
    ids, loss_mask, seeds = [], [], iter(seeds)
    for question in questions:
        asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        if ids and ids[-1] != IDS[END]:
            asked = END + "\n" + asked
        elif ids:
            asked = "\n" + asked
        asked = ids_of(asked)
        if len(ids) + len(asked) >= most:
            break
        ids, loss_mask = ids + asked, loss_mask + [False] * len(asked)
        answer = answer_to(ids, temperature, min(new, most - len(ids)), next(seeds, 0))
        ids, loss_mask = ids + answer, loss_mask + [True] * len(answer)
    return ids, loss_mask


def test_every_user_turn_is_answered_anew(run, capsys):
    made, counts = run()
    texts = list(shards.read(run.folder / "out"))
    usable = [line for line in LINES if isinstance(line, dict)]
    del usable[usable.index(LINES[LONG])]
    assert len(texts) == len(usable) == 10
    for line, text in zip(usable, texts):
        if "text" in line:
            assert text_of(text.tokens.tolist()) == BOS + line["text"] + END
            assert text.loss_mask.all()
            continue
        questions = line["data"][::2] if "data" in line else [line["prompt"]]
        ids, loss_mask = expected_dialogue(questions)
        assert text_of(text.tokens.tolist()) == text_of(ids)
        assert text.loss_mask.tolist() == loss_mask
    shown = capsys.readouterr().err
    assert f"{run.source}:4: it is not JSON" in shown
    assert f"{run.source}:{LONG + 1}: its question has " in shown
    index = shards.read_index(run.folder / "out")
    assert index == made
    loss_mask = torch.cat([text.tokens[text.loss_mask] for text in texts]).tolist()
    assert [loss_mask.count(i) for i in range(len(TOKENS))] == counts.tolist()
    assert (index["sequences"], index["skipped"], index["cut"], index["shards"]) == (10, 2, 0, 4)
    assert index["counted"] == len(loss_mask)
    assert index["tokens"] == sum(len(text.tokens) for text in texts)
    assert index["vocab_size"] == len(TOKENS)


def test_temperatures_take_turns_and_every_answer_has_its_seed(run):
    answers = Answers()
    lines = [chat_line("a", "b") for _ in range(4)]
    run(lines=lines, answerer=answers, temperature=(0.0, 0.7), seed=5)
    assert len(set(answers.seeds)) == 8
    texts = [text.tokens.tolist() for text in shards.read(run.folder / "out")]
    by_turn = dict(zip(["00", "10", "20", "01", "11", "21", "30", "31"], answers.seeds))
    for number, ids in enumerate(texts):
        seeds = [by_turn[f"{number}0"], by_turn[f"{number}1"]]
        temperature = (0.0, 0.7)[number % 2]
        assert ids == expected_dialogue(["a", "b"], temperature, seeds=seeds)[0]
    assert texts[0] == texts[2] and texts[1] != texts[3]
    other = Answers()
    run("other", lines=lines, answerer=other, seed=6)
    assert not set(other.seeds) & set(answers.seeds)


@pytest.mark.parametrize("most", [25, 26, 70])
def test_sequences_end_at_the_longest_length(run, most):
    questions = ["hello", "again", "more"]  # the first is 24 tokens
    run(lines=[chat_line(*questions), {"text": "0123456789" * 10}], max_length=most)
    first, *segments = (t.tokens.tolist() for t in shards.read(run.folder / "out"))
    assert first == expected_dialogue(questions, most=most)[0]
    assert len(first) <= most
    assert {len(segment) for segment in segments[:-1]} == {most} and len(segments[-1]) == 102 % most
    assert "".join(map(text_of, segments)) == BOS + "0123456789" * 10 + END


def test_a_template_that_forgets_ends_the_conversation(run):
    class Thinking(Answers):
        def generate(self, prompts, temperatures, max_tokens, seeds):
            return [ids_of("<t></t>b" + END) for _ in prompts]

    lines = [chat_line("a", "b"), chat_line("c")]
    made, _ = run(lines=lines, template=FORGETFUL, answerer=Thinking())
    assert made["cut"] == 1
    first, second = (text_of(t.tokens.tolist()) for t in shards.read(run.folder / "out"))
    assert first == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<t></t>b<|im_end|>"
    assert second == first.replace("\na<", "\nc<")


@pytest.mark.parametrize("how", [{"raw": True}, {"template": None}])
def test_raw(run, how):
    answer = text_of(answer_to(ids_of("<s>go "), 0.0, 8, 0))
    run(lines=[{"prompt": "go "}, {"text": "t"}], **how)
    first = next(iter(shards.read(run.folder / "out")))
    assert text_of(first.tokens.tolist()) == "<s>go " + answer
    assert text_of(first.tokens[first.loss_mask].tolist()) == answer


def test_a_folder_of_another_run_is_refused(run):
    run()
    for changes, said in (
        ({"temperature": (1.0,)}, r"was begun with temperature = \[0.0\], not \[1.0\]"),
        ({"lines": LINES[:-1]}, "was begun with different input"),
    ):
        with pytest.raises(TrainError, match=said) as caught:
            run(**changes)
        assert "\n" not in str(caught.value)
    making = run.folder / "out" / "making.json"
    for damaged in (b"", b"[1]", b"\xff", b'{"options": {}}'):
        making.write_bytes(damaged)
        with pytest.raises(TrainError, match=r"making\.json is damaged.* with options, input: "):
            run()
    making.unlink()
    with pytest.raises(TrainError, match="holds other data already"):
        run()
    run("fresh", draft_vocab_size=10)
    run("fresh", draft_vocab_size=20, engine={"max_num_seqs": 2})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"input": ("no.jsonl",)}, "There is no file no.jsonl"),
        ({"target": "no/such/target"}, "no/such/target has no tokenizer"),
        ({"template": None}, "in.jsonl:1 is a conversation, but the target's tokenizer has no"),
        ({"max_length": 5000}, "has 4,096 positions, but max_length is 5,000"),
        ({"lines": ["{"]}, r"None of the lines in .* \(1 are broken\)"),
        ({"lines": [{"prompt": "x" * 300}]}, "No line gave a sequence"),
        ({"answers": "keep"}, "There is no option answers"),
        ({"temperature": (-1.0,)}, "Option temperature"),
        ({"vocab": 10}, "No line gave a sequence"),
    ],
)
def test_errors_are_one_sentence_and_come_before_any_weight(run, changes, said):
    with pytest.raises(TrainError, match=said) as caught:
        run(**changes)
    assert "\n" not in str(caught.value)
