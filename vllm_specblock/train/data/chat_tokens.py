"""Conversations as the target's tokens, with a mask of the assistant's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from vllm_specblock.train.config import DataOptions, TrainError
from vllm_specblock.train.data.chat import BrokenLine, Message
from vllm_specblock.train.target.features import load_tokenizer, loaded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Kept(NamedTuple):
    """A conversation with its own answers. loss_mask: assistant ids; cut: last turns missing."""

    ids: list[int]
    loss_mask: list[bool]
    cut: bool


class ChatTokens:
    """A tokenizer and its chat template, with the ids that end an answer and further `options` of
    the template, such as `enable_thinking`. Methods raise `BrokenLine` where the template refuses
    the messages, or an id lies past the target's vocabulary."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        ends: frozenset[int],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.vocab_size, self.ends = tokenizer, vocab_size, ends
        self.options = dict(options or {})
        self._before = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self._after = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    @property
    def chat(self) -> bool:
        """Whether there is a chat template."""
        return bool(self.tokenizer.chat_template)

    def ids(self, text: str) -> list[int]:
        """Tokens of a text alone."""
        encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)
        return self._inside(encoded["input_ids"])

    def question(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens that the target reads before it answers."""
        return self._render(messages, True)

    def raw(self, text: str) -> list[int]:
        """Return text to continue, after BOS if there is one."""
        return [*self._before, *self.ids(text)]

    def document(self, text: str) -> list[int]:
        """Return a whole text between BOS and EOS, if the tokenizer has them."""
        return [*self.raw(text), *self._after]

    def said(self, answer: Sequence[int]) -> str:
        """Return an answer as in the next question's history."""
        return self.tokenizer.decode(
            answer, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def kept(self, messages: Sequence[Message]) -> Kept:
        """Return the conversation up to its last answer.

        An answer extends from the end of its question to its first end token; without end tokens,
        to the end of the rendering that stops with it. The conversation is cut at the first turn
        whose question is not a prefix of the whole.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise BrokenLine("it has no assistant turn to keep")
        whole = self._render(messages[: turns[-1] + 1], False)
        starts: list[int] = []
        for turn in turns:
            question = self.question(messages[:turn])
            if whole[: len(question)] != question:
                break
            starts.append(len(question))
        if not starts:
            # The template rewrites past turns: keep the first answer.
            question = self.question(messages[: turns[0]])
            answer = [*self.ids(messages[turns[0]]["content"]), *self._after]
            loss_mask = [False] * len(question) + [True] * len(answer)
            return Kept(question + answer, loss_mask, len(turns) > 1)
        loss_mask = [False] * len(whole)
        end = 0
        for turn, start, stop in zip(turns, starts, [*starts[1:], len(whole)]):
            end = self._end(whole, start, stop, messages[: turn + 1])
            loss_mask[start:end] = [True] * (end - start)
        return Kept(whole[:end], loss_mask[:end], len(starts) < len(turns))

    def _end(self, whole: list[int], start: int, stop: int, upto: Sequence[Message]) -> int:
        for column in range(start, stop):
            if whole[column] in self.ends:
                return column + 1
        alone = self._render(upto, False)
        same = (i for i, (a, b) in enumerate(zip(whole, alone)) if a != b)
        return max(start, next(same, min(len(whole), len(alone))))

    def _render(self, messages: Sequence[Message], ask: bool) -> list[int]:
        try:
            ids: list[int] = self.tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=ask,
                tokenize=True,
                return_dict=False,
                **self.options,
            )
        except jinja2.TemplateError as error:
            raise BrokenLine(f"the chat template refuses it: {error}") from None
        return self._inside(ids)

    def _inside(self, ids: list[int]) -> list[int]:
        if max(ids, default=0) >= self.vocab_size:
            raise BrokenLine(
                f"the tokenizer gives id {max(ids)}, past the target's last, {self.vocab_size - 1}"
            )
        return ids


def read_chat_tokens(options: DataOptions) -> ChatTokens:
    """The target's tokenizer, template and end tokens, read before any weight. Raises `TrainError`
    where one is missing, or the target has fewer positions than `max_length`."""
    from transformers import AutoConfig

    tokenizer = load_tokenizer(options.target)
    config = loaded(AutoConfig, options.target, "has no config").get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    # Scaled RoPE extends the config's limit.
    if most and options.max_length > most and rope.get("rope_type", "default") == "default":
        raise TrainError(
            f"The target {options.target} has {most:,} positions, which max_length = "
            f"{options.max_length:,} goes beyond; give at most {most}."
        )
    ends = _end_tokens(str(options.target), config) | {tokenizer.eos_token_id} - {None}
    return ChatTokens(tokenizer, config.vocab_size, frozenset(ends), options.template_options)


def _end_tokens(target: str, config: Any) -> set[int]:
    """Return the ids that end an answer, as in vLLM."""
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(target).eos_token_id
    except OSError:  # older models have no such file
        ends = getattr(config, "eos_token_id", None)
    return set(ends) if isinstance(ends, list) else {ends} - {None}
