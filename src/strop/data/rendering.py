"""Examples to tokens and masks, through the renderer of the model that is trained.

Only what the model would sample is learnt: an assistant's message with its end of turn, or the text after a prompt
with the end of text. A mask is found by rendering prefixes where the renderer can't tell (`sampling.rendering`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from strop.data.examples import Answer, Conversation, Example, Judged, Pair, PlainText, TooLong, Wrong
from strop.errors import BatchError
from strop.rollouts import Message

if TYPE_CHECKING:
    from renderers.base import Renderer

#: Thoughts that stand in the text, before what is said.
_THOUGHT = re.compile(r"^\s*<think>.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Rendered:
    """An example in tokens.

    Attributes:
        sequences: tokens, and for each whether it is learnt; two for a pair, chosen first.
        desirable: of a judged answer, whether it is good; True for anything else.
        cut: how many tokens were left out at the ends.
    """

    sequences: tuple[tuple[list[int], list[bool]], ...]
    desirable: bool = True
    cut: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(tokens) for tokens, _ in self.sequences)

    @property
    def trained(self) -> int:
        """Learnt tokens of all sequences."""
        return sum(sum(mask) for _, mask in self.sequences)


class RowRenderer:
    """Renders examples.

    Args:
        renderer: of the model that is trained; None where the model has no chat template, and only texts can be.
        tokenizer: its tokenizer.
        reasoning: whether what an assistant thought is kept or dropped.
        max_tokens: of a sequence.
        cut: whether a longer one is cut at its end, or refused.
    """

    def __init__(
        self,
        renderer: Renderer,
        tokenizer: Any,
        *,
        reasoning: Literal["keep", "drop"] = "keep",
        max_tokens: int = 1024,
        cut: bool = False,
    ) -> None:
        self.renderer, self.tokenizer = renderer, tokenizer
        self.reasoning, self.max_tokens, self.cut = reasoning, max_tokens, cut

    def __call__(self, example: Example) -> Rendered:
        """The example in tokens.

        Raises:
            Wrong: it is too long, or nothing of it would be learnt, or its messages can't be rendered.
        """
        parts: list[tuple[str, Answer]]
        match example:
            case Pair():
                parts = [("chosen", example.chosen), ("rejected", example.rejected)]
            case Judged():
                parts = [("completion", example.answer)]
            case _:
                parts = [("", example)]
        sequences, left_out = [], 0
        for field, part in parts:
            tokens, mask = self._sequence(part, field)
            if len(tokens) > self.max_tokens:
                left_out += len(tokens) - self.max_tokens
                tokens, mask = self._cut(tokens, mask, field)
            sequences.append((tokens, mask))
        return Rendered(tuple(sequences), not isinstance(example, Judged) or example.desirable, left_out)

    def _cut(self, tokens: list[int], mask: list[bool], field: str) -> tuple[list[int], list[bool]]:
        if not self.cut:
            wrong = f"it has {len(tokens)} tokens, more than max_tokens = {self.max_tokens}"
            raise TooLong(field, wrong, 'Raise it, shorten the row, or set too_long to "cut" or "drop"')
        if not any(mask[: self.max_tokens]):
            wrong = f"the first {self.max_tokens} of its {len(tokens)} tokens hold nothing to learn"
            raise Wrong(field, wrong, "Raise max_tokens, or shorten its prompt")
        return tokens[: self.max_tokens], mask[: self.max_tokens]

    def _sequence(self, part: Answer, field: str) -> tuple[list[int], list[bool]]:
        from strop.sampling.rendering import training_example

        if isinstance(part, PlainText):
            return self._plain(part, field)
        spoken = self._thoughts(part)
        try:
            return training_example(self.renderer, spoken.messages, spoken.tools, spoken.trained)
        except (BatchError, ValueError, TypeError, KeyError) as error:  # a template raises whatever it runs into
            raise Wrong(field, f"it can't be rendered ({error})", "Mend the row, or leave it out") from error
        except Exception as error:
            if type(error).__module__.startswith("jinja2"):
                raise Wrong(
                    field, f"the chat template refuses it ({error})", "Mend the row, or leave it out"
                ) from error
            raise

    def _plain(self, part: PlainText, field: str) -> tuple[list[int], list[bool]]:
        """Prompt and text are encoded apart, as they are when the model answers the prompt."""
        prompt, text = (self.tokenizer.encode(words, add_special_tokens=False) for words in (part.prompt, part.text))
        tokens = [*prompt, *text, self.tokenizer.eos_token_id]
        mask = [place >= max(len(prompt), 1) for place in range(len(tokens))]  # nothing predicts a first token
        if not text:
            raise Wrong(field, "its text has no tokens", "It should hold text")
        return tokens, mask

    def _thoughts(self, part: Conversation) -> Conversation:
        """The conversation with what was thought as the setting says, in the form that the renderer writes."""
        if self.reasoning == "drop":
            return replace(part, messages=tuple(map(_without_thoughts, part.messages)))
        if self._writes_reasoning:
            return part
        return replace(part, messages=tuple(map(_with_thoughts, part.messages)))

    @cached_property
    def _writes_reasoning(self) -> bool:
        """Whether the renderer has a place for `reasoning_content`; else thoughts go before the text."""
        asked: Message = {"role": "user", "content": "a"}
        said: Message = {"role": "assistant", "content": "b"}
        thought: Message = {**said, "reasoning_content": "c"}
        return bool(self.renderer.render_ids([asked, said]) != self.renderer.render_ids([asked, thought]))


def _without_thoughts(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    bare = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**bare, "content": _THOUGHT.sub("", bare["content"])}


def _with_thoughts(message: Message) -> Message:
    if not message.get("reasoning_content"):
        return message
    bare = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**bare, "content": f"<think>\n{message['reasoning_content']}\n</think>\n\n{bare['content']}"}
