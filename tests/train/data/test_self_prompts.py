"""Prompts that the target makes up itself: what it is given, what is kept, what a kill loses."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal

import pytest
from support.chat import CHATML, END, PLAIN, Answers, ids_of, make_target, text_of

from vllm_specblock.train.config import TrainError, parse
from vllm_specblock.train.data import shards
from vllm_specblock.train.data.make_data import make_data
from vllm_specblock.train.data.options import DataOptions

HEAD = "<|im_start|>user\n"
# A template that ends a user's turn with a control token that does not end an answer.
BRACKETS = "{% for m in messages %}<s>{{ m['content'] }}<|im_start|>{% endfor %}"

# One that writes nothing behind a user's message: the head of the answer ends the turn.
BARE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
BARE += "{% if add_generation_prompt %}<|im_start|>{% endif %}"


class MakesUp(Answers):
    """Answers, and makes a message up where the prompt is only the head of a user's turn.

    `messages` are taken by the sampling's seed; a message without an end runs into the limit.
    """

    def __init__(self, head=HEAD, messages=None):
        super().__init__()
        self.head, self.messages, self.stops = head, messages, None

    def generate(self, prompts, temperatures, max_tokens, seeds, stops=()):
        if text_of(prompts[0]) != self.head:
            return super().generate(prompts, temperatures, max_tokens, seeds)
        assert all(prompt == prompts[0] for prompt in prompts)
        assert set(temperatures) == {1.0} and len(set(seeds)) == len(seeds)
        self.stops = tuple(stops)
        self.calls.append(prompts)
        messages = self.messages or [f"say {number}{END}" for number in range(1000)]
        said = [ids_of(random.Random(seed).choice(messages)) for seed in seeds]
        return [ids[:most] for ids, most in zip(said, max_tokens)]


@pytest.fixture
def run(tmp_path):
    def go(out="out", template=CHATML, answerer=None, lines=None, **options):
        if lines is not None:
            source = tmp_path / "in.jsonl"
            source.write_text("".join(json.dumps(line) + "\n" for line in lines))
            options["input"] = (source,)
        parsed = parse(
            DataOptions,
            **{
                "target": make_target(tmp_path / "target", template),
                "out": tmp_path / out,
                "self_prompts": 10,
                "max_length": 200,
                "max_new_tokens": 8,
                "shard_size": 4,
                **options,
            },
        )
        answerer = MakesUp() if answerer is None else answerer
        return make_data(parsed, lambda: answerer)

    go.folder = tmp_path
    return go


def prompts_in(folder):
    lines = (folder / "self_prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def test_the_target_asks_and_answers(run):
    answers = MakesUp()
    made = run(answerer=answers)
    kept = prompts_in(run.folder / "out")
    assert len(kept) > 5 and all(prompt.startswith("say ") for prompt in kept)
    texts = list(shards.read(run.folder / "out"))
    assert len(texts) == len(kept) == made.index["sequences"]
    for prompt, (tokens, loss_mask) in zip(kept, texts):
        asked = f"{HEAD}{prompt}{END}\n<|im_start|>assistant\n"
        assert text_of(tokens[~loss_mask].tolist()) == asked
        assert loss_mask.any() and loss_mask[len(ids_of(asked)) :].all()
    # Ten prompts in parts of four, then the answers, a shard at a time.
    assert [len(call) for call in answers.calls[:3]] == [4, 4, 2]
    assert [len(call) for call in answers.calls[3:5]] == [4, 4]
    assert not list((run.folder / "out").glob("self_prompts-*"))
    run("other", seed=1)
    assert prompts_in(run.folder / "other") != kept


def test_empty_equal_and_endless_ones_are_dropped(run, capsys):
    messages = [f"  once{END}", f" \n{END}", "x" * 300, f"two\nlines{END}"]
    run(answerer=MakesUp(messages=messages), self_prompts=40, shard_size=40)
    assert sorted(prompts_in(run.folder / "out")) == ["once", "two\nlines"]
    assert "2 of 40 made-up prompts are kept" in capsys.readouterr().err
    with pytest.raises(TrainError, match="made up no prompt that can be used: none of 3 is"):
        run("none", answerer=MakesUp(messages=messages[1:3]), self_prompts=3)


@pytest.mark.parametrize(
    ("template", "head", "messages", "stops"),
    [
        # The end token of an answer ends the turn, too: nothing more to say to the engine.
        (CHATML, HEAD, [f"hm{END}"], (ids_of(END)[0],)),
        (BRACKETS, "<s>", ["hm<|im_start|>"], (ids_of("<|im_start|>")[0],)),
        (BARE, "<s>", ["hm<|im_start|>"], (ids_of("<|im_start|>")[0],)),
        # Plain text has no token to stop at, and is looked for in what was said.
        (PLAIN, "user:", [" hm\nassistant: and so on", f" hm{END}"], ()),
    ],
)
def test_a_turn_ends_as_the_template_says(run, template, head, messages, stops):
    answers = MakesUp(head, messages)
    run(template=template, answerer=answers)
    assert prompts_in(run.folder / "out") == ["hm"]
    assert answers.stops == stops


def test_they_follow_the_lines_of_the_input(run):
    lines = [{"prompt": "first"}, {"prompt": "second"}, {"prompt": "third"}]
    run(lines=lines, limit=2)
    texts = [text_of(text.tokens.tolist()) for text in shards.read(run.folder / "out")]
    kept = prompts_in(run.folder / "out")
    asked = [text.removeprefix(HEAD).split(END)[0] for text in texts]
    assert asked == ["first", "second", *kept]


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if "making" not in path.name}


@pytest.mark.parametrize("calls", [2, 5])
def test_killed_and_started_again_it_ends_with_the_same_bytes(run, calls):
    class Deadly(MakesUp):
        def generate(self, *asked):
            if len(self.calls) == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().generate(*asked)

    run("whole")
    process = multiprocessing.get_context("fork").Process(
        target=run, args=("killed",), kwargs={"answerer": Deadly()}
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    killed = run.folder / "killed"
    if calls == 2:
        assert len(list(killed.glob("self_prompts-*"))) == 2
    else:
        assert prompts_in(killed) and len(list(killed.glob("shard-*"))) == 2
    with pytest.raises(TrainError, match="was begun with self_prompts = 10, not 12"):
        run("killed", self_prompts=12)
    again = MakesUp()
    run("killed", answerer=again)
    assert len(again.calls) < 6
    assert files_of(killed) == files_of(run.folder / "whole")
    last = MakesUp()
    run("killed", answerer=last)
    assert not last.calls and files_of(killed) == files_of(run.folder / "whole")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"self_prompts": 0}, "give --input, --self-prompts or both"),
        ({"template": None}, "tokenizer has no chat template: give prompts with --input"),
        ({"template": "{{ messages[0]['content'] }}"}, "cannot see where a user's turn begins"),
        ({"template": "{{ raise_exception('no') }}"}, "cannot begin a user's turn: the chat tem"),
        ({"max_length": 6}, "leaves no room for a prompt behind the 6 tokens"),
        ({"answers": "keep"}, "without an answer; drop --answers keep"),
        ({"raw_prompts": True}, "drop --raw-prompts"),
    ],
)
def test_errors_are_one_sentence_and_come_before_any_weight(run, changes, said):
    class Never(Answers):
        def forget(self):
            raise AssertionError("the engine was asked")

    with pytest.raises(TrainError, match=said) as caught:
        run(answerer=Never(), **changes)
    assert "\n" not in str(caught.value)


def test_a_folder_older_than_the_option_goes_on(run):
    run(lines=[{"prompt": "a"}], self_prompts=0)
    begun = json.loads((run.folder / "out" / "making.json").read_text())
    assert "self_prompts" not in begun["options"]
