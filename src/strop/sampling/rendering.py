"""Messages to tokens and back: which renderer a model gets, and the one that strop adds.

Renderers come from the `renderers` package (protocol in `renderers.base`); `ChatMLRenderer` is for models whose chat
template is plain ChatML without tool calls, the start model among them. Sampled tokens are never rendered again: a
turn is added by `bridge_to_next_turn`. Recording calls is `strop.sampling.conversation`'s job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from renderers.base import (
    MODEL_RENDERER_MAP,
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    Renderer,
    ToolCallParseStatus,
    build_training_sample,
    create_renderer,
    extract_message_tool_names,
)
from renderers.configs import DefaultRendererConfig, config_from_name

from strop.errors import BatchError, ModelError
from strop.rollouts import Message, ToolSpec
from strop.sampling.encoding import text_functions

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_RESULT, _RESULT_END = "<tool_response>", "</tool_response>"
#: (token ids, index of their message or -1, whether the model samples them)
_Span = tuple[Sequence[int], int, bool]


class ChatMLRenderer:
    """Plain ChatML, with Hermes-style tool calls added.

    Plain chats come out as the model's own template writes them. A template of this kind knows no tools, so they are
    announced in the system message, in few words; a call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`
    in the assistant's turn, and results come back in a user turn as `<tool_response>…</tool_response>`.

    Chat markers inside a message (a tool's output that contains `<|im_end|>`) are encoded as text, never as the
    control token. An assistant's turn is encoded apart from its header, as sampling does it, so the tokens of a
    prompt are always a prefix of the tokens of the longer conversation.

    Args:
        tokenizer: a transformers tokenizer, or whatever satisfies `renderers.base.Tokenizer`.
        default_system: system message of conversations that bring none; None adds none.

    Raises:
        ModelError: the tokenizer lacks `<|im_start|>` or `<|im_end|>` as single tokens.
    """

    is_prefix_stable = True
    #: `bridge_to_next_turn` looks at nothing before the last turn, so a caller may pass that turn alone.
    bridges_from_last_turn = True
    #: A reply is its content, letter by letter, until the first of these; a tool call as JSON (`name`, `arguments`)
    #: stands between the two.
    call_marks = (_CALL, _CALL_END)

    def __init__(self, tokenizer: Any, default_system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._default_system = default_system
        self._encode_plain, self._decode = text_functions(tokenizer)
        markers = _marker_strings(tokenizer)
        for marker in ("<|im_start|>", "<|im_end|>"):
            if len(self._encode_plain(marker)) != 1:
                raise ModelError(f"The tokenizer has no token {marker}, so its model can't be used with ChatML.")
        self._markers = re.compile("|".join(re.escape(marker) for marker in markers))
        (self._start,), (self._end,) = self._encode_plain("<|im_start|>"), self._encode_plain("<|im_end|>")
        self._stops = [self._end]
        if "<|endoftext|>" in markers:
            self._stops.append(self._encode_plain("<|endoftext|>")[0])
        self._newline = tuple(self._encode_plain("\n"))
        self._header = (self._start, *self._encode_plain("assistant\n"))
        self._encode_cached = lru_cache(maxsize=2048)(self._encode_text)

    def render(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Tokens of a conversation, with the message that each belongs to and whether the model samples it."""
        tokens: list[int] = []
        indices: list[int] = []
        sampled: list[bool] = []
        for ids, index, is_sampled in self._conversation(messages, tools, add_generation_prompt):
            tokens += ids
            indices += [index] * len(ids)
            sampled += [is_sampled] * len(ids)
        return _rendered(tokens, indices, sampled, messages)

    def render_ids(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Tokens of a conversation."""
        tokens: list[int] = []
        for ids, _, _ in self._conversation(messages, tools, add_generation_prompt):
            tokens += ids
        return tokens

    def parse_response(
        self, token_ids: list[int], *, tools: list[ToolSpec] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """What a completion says: text, and every attempt at a tool call, the malformed ones with their status."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self._stops:
            end -= 1
        text = self._decode(token_ids[:end])
        outside: list[str] = []
        calls: list[ParsedToolCall] = []
        at = 0
        while (start := text.find(_CALL, at)) >= 0:
            outside.append(text[at:start])
            close = text.find(_CALL_END, start)
            if close < 0:
                raw = text[start + len(_CALL) :]
                calls.append(ParsedToolCall(raw=raw, status=ToolCallParseStatus.UNCLOSED_BLOCK))
                at = len(text)
            else:
                calls.append(_parse_call(text[start + len(_CALL) : close]))
                at = close + len(_CALL_END)
        outside.append(text[at:])
        return ParsedResponse(content="".join(outside).strip() if calls else text, tool_calls=calls)

    def get_stop_token_ids(self) -> list[int]:
        """Tokens that end a turn."""
        return list(self._stops)

    def call_opening(self, name: str | None = None) -> list[int]:
        """Tokens that begin a turn which has to be a tool call, of the tool `name` if it is given."""
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ' if name is not None else ""
        return self._encode_plain(_CALL + head)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """The next prompt: everything so far, kept token by token, then `new_messages` and the assistant's header.

        A completion that was cut off is closed first. None if `new_messages` holds an assistant's turn (its tokens
        would not be the sampled ones) or nothing.
        """
        if not previous_prompt_ids or not new_messages or any(m.get("role") == "assistant" for m in new_messages):
            return None
        tokens = [*previous_prompt_ids, *previous_completion_ids]
        indices = [-1] * len(tokens)
        # Stopped by the limit, by a string or by another stop token: the turn still has to end as the model knows it.
        open_turn = not previous_completion_ids or previous_completion_ids[-1] != self._end
        opening: _Span = ((self._end, *self._newline) if open_turn else self._newline, -1, False)
        for ids, index, _ in [opening, *self._turns(new_messages, 0), (self._header, -1, False)]:
            tokens += ids
            indices += [index] * len(ids)
        return _rendered(tokens, indices, [False] * len(tokens), new_messages)

    def _conversation(
        self, messages: list[Message], tools: list[ToolSpec] | None, add_generation_prompt: bool
    ) -> Iterator[_Span]:
        """Spans of a whole conversation."""
        if not messages:
            raise ValueError("there are no messages to render")
        own_system = messages[0].get("role") in ("system", "developer")
        system = _text(messages[0], 0) if own_system else self._default_system
        if tools:
            system = "\n\n".join(part for part in (system, describe_tools(tools)) if part)
        if system is not None:
            yield self._turn("system", system), 0 if own_system else -1, False
        yield from self._turns(messages, 1 if own_system else 0)
        if add_generation_prompt:
            yield self._header, -1, False

    def _turns(self, messages: Sequence[Message], first: int) -> Iterator[_Span]:
        """Spans of the messages from `first` on; neighbouring tool results share one user turn."""
        index = first
        while index < len(messages):
            role = messages[index].get("role")
            if role == "assistant":
                yield self._header, index, False
                yield (*self._encode(_assistant_text(messages[index], index)), self._end), index, True
                yield self._newline, index, False
            elif role == "tool":
                results = [_text(messages[index], index)]
                while index + 1 < len(messages) and messages[index + 1].get("role") == "tool":
                    index += 1
                    results.append(_text(messages[index], index))
                yield (
                    self._turn("user", "\n".join(f"{_RESULT}{result}{_RESULT_END}" for result in results)),
                    index,
                    False,
                )
            elif role in ("system", "developer", "user"):
                yield self._turn("user" if role == "user" else "system", _text(messages[index], index)), index, False
            else:
                raise ValueError(f"message {index} has the role {role!r}; known are system, user, assistant and tool")
            index += 1

    def _turn(self, role: str, text: str) -> tuple[int, ...]:
        return (self._start, *self._encode(f"{role}\n{text}"), self._end, *self._newline)

    def _encode(self, text: str) -> tuple[int, ...]:
        # A group shares its prompt, and an environment its tools: most short texts were encoded a moment ago.
        return self._encode_cached(text) if len(text) < 4000 else self._encode_text(text)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        """Tokens of text that is never a control token: a marker is cut in two before it is encoded."""
        ids: list[int] = []
        at = 0
        for marker in self._markers.finditer(text):
            ids += self._encode_plain(text[at : marker.start() + 1])
            at = marker.start() + 1
        return (*ids, *self._encode_plain(text[at:]))


def describe_tools(tools: Iterable[ToolSpec]) -> str:
    """The paragraph that announces tools to a model whose template has no place for them: a line for each tool.

    Short on purpose: small models read it before every attempt, and JSON schemas cost about five times the tokens.
    """
    lines = [_signature(tool.get("function", tool)) for tool in tools]
    form = f'{_CALL}{{"name": ..., "arguments": {{...}}}}{_CALL_END}'
    return "\n".join(["Tools:", *lines, f"Call a tool with {form}"])


def training_example(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    trained: Sequence[bool] | None = None,
) -> tuple[list[int], list[bool]]:
    """A conversation as supervised training data: its tokens, and which of them the model should learn to sample.

    Trained are the assistant's turns, their end-of-turn token included; headers and all other turns are context.

    Args:
        renderer: renders for the model that is trained.
        messages: the whole conversation.
        tools: what the assistant may call in it.
        trained: for each message, whether it is to be learnt if it is the assistant's; None for all of them.

    Returns:
        token ids and, of the same length, the mask.

    Raises:
        BatchError: no token would be trained, or the template rewrites earlier turns when later ones are added, so
            that the rendered conversation isn't what the model would have seen.
    """
    conversation, specs = list(messages), list(tools) or None
    learnt = [True] * len(conversation) if trained is None else list(trained)
    if renderer.is_prefix_stable:
        sample = build_training_sample(renderer, conversation, tools=specs, message_loss_mask=learnt)
        tokens, mask = list(sample.token_ids), [bool(token) for token in sample.loss_mask]
    else:
        tokens, mask = _mask_by_prefixes(renderer, conversation, specs, learnt)
    if not any(mask):
        raise BatchError(
            "A training conversation has no assistant turn to learn, so nothing in it would be trained on."
        )
    return tokens, mask


def _mask_by_prefixes(
    renderer: Renderer, messages: list[Message], tools: list[ToolSpec] | None, learnt: Sequence[bool]
) -> tuple[list[int], list[bool]]:
    """The mask, found by rendering the prompt and the whole of every assistant turn that is learnt."""
    tokens: list[int] = renderer.render_ids(messages, tools=tools)
    mask = [False] * len(tokens)
    stops = set(renderer.get_stop_token_ids())
    for index, message in enumerate(messages):
        if message.get("role") != "assistant" or not learnt[index]:
            continue
        prompt = renderer.render_ids(messages[:index], tools=tools, add_generation_prompt=True)
        turn = renderer.render_ids(messages[: index + 1], tools=tools)
        if tokens[: len(turn)] != turn or turn[: len(prompt)] != prompt:
            raise BatchError(
                f"The chat template rewrites message {index} (assistant) once the conversation goes on. "
                "Give one training conversation per assistant turn, each ending with it."
            )
        ends = [at for at in range(len(prompt), len(turn)) if turn[at] in stops]
        until = ends[-1] + 1 if ends else len(turn)
        mask[len(prompt) : until] = [True] * (until - len(prompt))
    return tokens, mask


def renderer_for(
    tokenizer: Any, model_name: str, *, name: str | None = None, options: Mapping[str, object] | None = None
) -> Renderer:
    """The renderer of a model.

    Args:
        tokenizer: the model's transformers tokenizer.
        model_name: hub name or folder. A hub name that `renderers` knows gets its renderer for that model; a model
            with a plain ChatML template gets `ChatMLRenderer`; any other is rendered by its own chat template,
            which can't extend a turn, so that every turn of a conversation opens a new root.
        name: "chatml", or a name of `renderers` ("qwen3", "glm5", …), for a folder or fine-tune of a known model.
        options: template options of a known model, for example {"enable_thinking": False}.

    Raises:
        ModelError: the name or an option is unknown, or the model has no chat template.
    """
    known = name or MODEL_RENDERER_MAP.get(model_name)
    if known is None or known == "chatml":
        if options:
            raise ModelError(f"The renderer of {model_name} has no options, but got {', '.join(sorted(options))}.")
        if known == "chatml":
            return ChatMLRenderer(tokenizer, _default_system(tokenizer) or None)
        return _renderer_by_template(tokenizer, model_name)
    try:
        return create_renderer(tokenizer, config_from_name(known), chat_template_kwargs=options)
    except Exception as error:  # the package raises whatever a wrong name, option or tokenizer runs into
        raise ModelError(f"The renderer {known!r} can't be used for {model_name}: {error}") from error


def _renderer_by_template(tokenizer: Any, model_name: str) -> Renderer:
    """`ChatMLRenderer` if it writes what the model's template writes; else the template itself."""
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            f"{model_name} has no chat template, so messages can't be turned into its tokens. "
            'Use an instruction-tuned model, or set the renderer to "chatml".'
        )
    default = _default_system(tokenizer)
    if default is not None:
        renderer = ChatMLRenderer(tokenizer, default or None)
        if _agrees(renderer, tokenizer):
            return renderer
    parser = "qwen3" if _CALL in _marker_strings(tokenizer) else None
    return create_renderer(tokenizer, DefaultRendererConfig(tool_parser=parser))


def _agrees(renderer: ChatMLRenderer, tokenizer: Any) -> bool:
    """Whether the model's template writes plain chats as `renderer` does, and takes no notice of tools."""
    user, system = {"role": "user", "content": "How are you?"}, {"role": "system", "content": "Be brief."}
    said = {"role": "assistant", "content": "Well, thanks."}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    for messages in ([user], [system, user], [user, said, user], [system, user, said]):
        for opened in (False, True):
            ours = renderer.render_ids(messages, add_generation_prompt=opened)
            for tools in (None, [tool]):
                theirs = tokenizer.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=opened, tokenize=True, return_dict=False
                )
                if ours != theirs:
                    return False
    return True


def _default_system(tokenizer: Any) -> str | None:
    """The system message that a ChatML template adds by itself; "" for none, None if the template isn't ChatML."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    found = re.fullmatch(
        r"(?:<\|im_start\|>system\n(?P<system>.*)<\|im_end\|>\n)?<\|im_start\|>user\nHi<\|im_end\|>\n", text, re.DOTALL
    )
    return (found["system"] or "") if found else None


def _marker_strings(tokenizer: Any) -> list[str]:
    """Every string that the tokenizer turns into one added token, longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return sorted({str(token) for token in added.values()} | {"<|im_start|>", "<|im_end|>"}, key=len, reverse=True)


def _rendered(
    tokens: list[int], indices: list[int], sampled: list[bool], messages: Sequence[Message]
) -> RenderedTokens:
    return RenderedTokens(
        token_ids=tokens,
        message_indices=indices,
        sampled_mask=sampled,
        message_roles=[str(message.get("role") or "") for message in messages],
        message_tool_names=extract_message_tool_names(list(messages)),
    )


def _parse_call(block: str) -> ParsedToolCall:
    """A closed `<tool_call>` block, whatever is in it."""
    raw = block.strip()
    try:
        call = json.loads(raw)
    except (ValueError, RecursionError):
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.INVALID_JSON)
    if not isinstance(call, dict):
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.MALFORMED_STRUCTURE)
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not name:
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.MISSING_NAME)
    if not isinstance(arguments, dict):
        return ParsedToolCall(raw=raw, name=name, status=ToolCallParseStatus.MALFORMED_STRUCTURE)
    return ParsedToolCall(raw=raw, name=name, arguments=arguments)


def _assistant_text(message: Message, index: int) -> str:
    """What the assistant would have sampled to say `message`."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        if call.get("problem"):  # malformed: `arguments` holds the whole block as it was written
            calls.append(f"{_CALL}{arguments}{_CALL_END}")
            continue
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function["name"], ensure_ascii=False)
        calls.append(f'{_CALL}{{"name": {name}, "arguments": {written}}}{_CALL_END}')
    return "\n".join(part for part in (_text(message, index), *calls) if part)


def _text(message: Message, index: int) -> str:
    """The text of a message whose content is a string, a list of text parts, or nothing."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part["text"]) for part in content)
    raise ValueError(f"message {index} holds more than text, and this model reads text only")


def _signature(function: Mapping[str, Any]) -> str:
    """One line for a tool: `name(argument: type, optional?: type): description`."""
    schema = function.get("parameters") or {}
    required = schema.get("required", ())
    arguments = [
        f"{name}{'' if name in required else '?'}{_kind(parameter)}"
        for name, parameter in schema.get("properties", {}).items()
    ]
    description = function.get("description")
    return f"{function['name']}({', '.join(arguments)})" + (f": {description}" if description else "")


def _kind(schema: Mapping[str, Any]) -> str:
    """The type of an argument, as it follows its name: nothing for a string, the schema itself for a nested one."""
    if "enum" in schema:
        kind = ": " + "|".join(str(value) for value in schema["enum"])
    elif schema.keys() <= {"type", "description"} and isinstance(schema.get("type", ""), str):
        kind = f": {schema['type']}" if schema.get("type", "string") != "string" else ""
    else:
        kind = ": " + json.dumps({key: value for key, value in schema.items() if key != "description"})
    return kind + (f" ({schema['description']})" if schema.get("description") else "")
