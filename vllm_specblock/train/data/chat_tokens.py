"""Questions and texts as the target's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2

from vllm_specblock.train.config import DataOptions, TrainError
from vllm_specblock.train.data.chat import BrokenLine, Message
from vllm_specblock.train.target.features import load_tokenizer, loaded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatTokens:
    """A tokenizer and its chat template, with further `options` of the template, such as
    `enable_thinking`. Methods raise `BrokenLine` where the template refuses the messages, or an id
    lies past the target's vocabulary."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
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
        try:
            ids: list[int] = self.tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **self.options,
            )
        except jinja2.TemplateError as error:
            raise BrokenLine(f"the chat template refuses it: {error}") from None
        return self._inside(ids)

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

    def _inside(self, ids: list[int]) -> list[int]:
        if max(ids, default=0) >= self.vocab_size:
            raise BrokenLine(
                f"the tokenizer gives id {max(ids)}, past the target's last, {self.vocab_size - 1}"
            )
        return ids


def read_chat_tokens(options: DataOptions) -> ChatTokens:
    """The target's tokenizer and template, read before any weight. Raises `TrainError` where one is
    missing, or the target has fewer positions than `max_length`."""
    from transformers import AutoConfig

    tokenizer = load_tokenizer(options.target)
    config = loaded(AutoConfig, options.target, "has no config").get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    # Scaled RoPE extends the config's limit.
    if most and options.max_length > most and rope.get("rope_type", "default") == "default":
        raise TrainError(
            f"The target {options.target} has {most:,} positions, but max_length is "
            f"{options.max_length:,}: give at most {most}."
        )
    return ChatTokens(tokenizer, config.vocab_size, options.template_options)
