"""A target of letters: one token per character, ChatML markers, and answers out of a hash."""

from __future__ import annotations

import json
import random
import re
import shutil
import string
from pathlib import Path

import tokenizers
from transformers import PreTrainedTokenizerFast

START, END, BOS = "<|im_start|>", "<|im_end|>", "<s>"
TOKENS = [BOS, START, END, "?", *string.ascii_letters, *string.digits, *" \n<>/:.,"]
IDS = {token: index for index, token in enumerate(TOKENS)}
_TURN = "{{ '" + START + "' + m['role'] }}\n{{ TEXT + '" + END + "' }}\n"
_QUESTION = "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
CHATML = "{% for m in messages %}" + _TURN.replace("TEXT", "m['content']") + "{% endfor %}"
CHATML += _QUESTION
# As thinking models have it: of an answer in the past only what follows the thought.
FORGETFUL = CHATML.replace("m['content']", "m['content'].split('</t>')[-1]")
PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}assistant: {% endif %}"


def make_target(folder: Path, template: str | None, vocab_size: int = len(TOKENS)) -> Path:
    """The small files of a target: config and tokenizer, no weights."""
    shutil.rmtree(folder, ignore_errors=True)
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(IDS, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=BOS,
        eos_token=END,
        unk_token="?",
        additional_special_tokens=[START],
    )
    tokenizer.chat_template = template
    folder.mkdir()
    tokenizer.save_pretrained(folder)
    config = {"model_type": "llama", "vocab_size": vocab_size, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ids_of(text: str) -> list[int]:
    """Token ids of a text with markers, found without the tokenizer."""
    markers = "|".join(map(re.escape, (START, END, BOS)))
    return [IDS[token] for token in re.findall(f"{markers}|.", text, re.DOTALL)]


def text_of(ids: list[int]) -> str:
    return "".join(TOKENS[i] for i in ids)


def answer_to(prompt: list[int], temperature: float, most: int, seed: int) -> list[int]:
    """A pretended answer of 1 to 12 letters, ended unless `most` tokens cut it."""
    draw = random.Random(f"{prompt} {temperature} {seed if temperature else None}")
    letters = [draw.choice(string.ascii_lowercase) for _ in range(draw.randint(1, 12))]
    return ids_of("".join(letters) + END)[:most]


class Answers:
    """An `Answerer` that pretends, and keeps the seeds that it was given."""

    def __init__(self):
        self.seeds: list[int] = []

    def generate(self, prompts, temperatures, max_tokens, seeds):
        self.seeds += seeds
        return [answer_to(*each) for each in zip(prompts, temperatures, max_tokens, seeds)]

    def forget(self):
        pass
