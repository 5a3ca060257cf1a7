"""A model's chat template: the form in which it is given a chat, and its rendering in a sandbox, to the
letter as transformers renders it.

Templates come from the model directory alone, never from a client. Still they are code of another author, and
a gateway has them from any replica. So they run in Jinja's immutable sandbox, they see nothing but plain
data, and the rendered chat is bounded, as is any string or list made by multiplication.

Rules:

1. A chat is rendered in place where its template is *bounded* (`shared.text.bounded_template`): that costs no
   more than the template's own work, and stops after `SHORT_S` where the chat is short, after `IN_PLACE_S`
   where it is long.
2. Everything else is rendered by processes of their own (`shared.text.rendering`), where time and memory are
   bounded by the kernel: long chats of bounded templates by one, and by another one all chats of the others,
   and those that needed too much. So no template delays the chats of another that is bounded.
3. A template that needs too much for a short chat is not rendered in place again: no honest one does.
4. Event loops render plain chats alone, which are texts. With tools, calls or variables of the request a chat
   is a tree of its caller's own, for which a template may need more than its length says.
5. A template is given chats in the form that it takes. Which that is, small chats show that it renders as any
   other (`shared.text.template_probes`): once, where the tokenizer's files are read.

A template is given OpenAI's shapes, as transformers passes them on (`TemplateInput`):

6. One meaning has one form. Content in parts is their texts, one behind the other, which is what templates
   make of parts; a template that takes nothing but parts is given that text as one. Content that is null,
   empty or left out is what the template takes for none in a message that is calls alone, else an empty text.
   `tool_calls` that is empty is left out, and so is reasoning; where there is reasoning, it is there under
   each of its names.
7. Arguments of past calls are objects, since templates write them as JSON or go through them. They print as
   they were written (`shared.text.call_arguments`).
8. What a template does not take is changed as `shared.text.template_takes` has it.
9. What a template does not read is not dropped in silence: tools and calls are refused where it has no word
   of them, and so is a variable that is not among those that its operator lets requests set.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
import msgspec
from jinja2 import meta, nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.apis.chat_form import argument_slices, long_arguments
from shared.apis.chat_messages import ChatMessage, FunctionToolCall, RefusalPart, TextPart, ToolCall
from shared.apis.prompt import ChatPrompt
from shared.apis.tools import FunctionTool, Tool
from shared.fairness.fair_threads import Slices, at_once
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.text.bounded_template import (
    KEEP,
    SOURCE_LEN_MAX,
    SPEND,
    UNNAMED,
    WEIGH,
    Spending,
    StepCounter,
    Unbounded,
    bound,
    bounded_range,
    kept,
    spent,
    weighed,
)
from shared.text.call_arguments import arguments_of, plain_arguments_of, written_json
from shared.text.model_files import shown
from shared.text.rendering import APART_LEN, DOUBTFUL, RENDERER, TOO_MUCH, Chat, Renderer, Unrenderable
from shared.text.template_probes import PROBE_LEN, takes_of
from shared.text.template_takes import EFFORT, Message, Takes, nearest, taken, without_text
from shared.wire.errors import InvalidRequest, NotInPlace, TooMuch
from shared.wire.shapes import BODY_LEN_MAX

RENDERED_LEN_MAX: Final = 2 * BODY_LEN_MAX
"""Characters of a rendered chat: a body at its limit, and as much again for what the template adds."""
MESSAGE_LEN_MAX: Final = 200
"""Characters of a template's own error message that reach the client."""

NUMBER_MAX: Final = 2**64
"""The largest factor of a product of numbers."""

THINKING: Final = "enable_thinking"
"""The variable by which most templates are told whether the model is to think."""
TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""transformers' mark at the end of a message that is to be continued, which some templates look for."""

SLICE_LEN: Final = 256 * 1024
"""Characters of the arguments that are decoded in one slice, which takes some milliseconds."""

NO_DEFAULTS: Final[Mapping[str, Any]] = {}
RESERVED: Final = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "conversation", "tokenize", "raise_exception", "strftime_now"),
        *DEFAULT_NAMESPACE,
        *UNNAMED,
    )
)
"""The names of variables that are the chat itself, or are not data: no request and no operator sets them."""

log = logs.get(__name__)

_FAILURES: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""The exceptions that a template's code can raise, beside Jinja's own, on messages that it does not
expect."""


class ChatTemplate:
    """A template that any number of threads may use. Raises ValueError when it is not valid Jinja, or has
    variables that nobody may set."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        clock: Clock = SYSTEM_CLOCK,
        arguments: Collection[str] = (),
        defaults: Mapping[str, Any] = NO_DEFAULTS,
        takes: Takes | None = None,
    ) -> None:
        """`special_tokens` maps names as templates know them (`bos_token`) to their text. `arguments` are the
        variables that requests may set, and `defaults` values for some of the template's. `takes` is the form
        of chats that was found before; None to find it out."""
        check_names((*arguments, *defaults), special_tokens)
        self._source, self._special_tokens, self._clock = source, special_tokens, clock
        self._defaults = dict(defaults)
        self._compiled: CompiledTemplate | None = None
        """The template that is rendered in place. None where none is."""
        self._apart = RENDERER
        """The process for long chats."""
        if len(source) > SOURCE_LEN_MAX:
            self._leave_place("it is long")
        else:
            environment = BoundedEnvironment(clock, {*special_tokens, *defaults, *arguments})
            try:
                self._compiled = CompiledTemplate(source, special_tokens | self._defaults, environment)
            except Unbounded as reason:
                self._leave_place(str(reason))
        self._input = TemplateInput.of(source, Takes() if takes is None else takes, frozenset(arguments))
        if takes is None:
            knows_calls = self._input.knows_calls
            found = takes_of(self._probe, clock, knows_calls=knows_calls, arguments=arguments)
            self._input = self._input.taking(found)

    @property
    def takes(self) -> Takes:
        return self._input.takes

    def _probe(self, chat: ChatPrompt, takes: Takes) -> str:
        """The text of a small chat, put into a form. Raises Unrenderable, TooMuch and Overloaded."""
        given = self._input.taking(takes)
        messages = given.formed(at_once(given.message_slices(chat)), chat)
        variables = given.variables(chat)
        if self._compiled is None:
            return at_once(self._rendered(messages, variables, PROBE_LEN, None))
        try:
            return self._compiled.render(messages, PROBE_LEN, variables)
        except Unbounded as reason:
            raise TooMuch(TOO_MUCH, param="messages", detail=str(reason)) from None

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt of a short chat that is plain, in place. Raises InvalidRequest where the template
        refuses, and NotInPlace where the chat is to be rendered elsewhere (`slices`)."""
        compiled = self._compiled
        if compiled is None or prompt.tools or prompt.arguments or prompt.wishes or prompt.continues_final:
            raise NotInPlace(TOO_MUCH, param="messages")
        for message in prompt.messages:
            if message.tool_calls or not prompt.opens_answer:
                raise NotInPlace(TOO_MUCH, param="messages")
        plain = self._input.messages(prompt)
        formed = plain if self._input.takes_all else self._input.formed(plain, prompt)
        try:
            return compiled.render(formed)
        except Unbounded as reason:
            self._leave_place(str(reason))
            raise NotInPlace(TOO_MUCH, param="messages") from None
        except Unrenderable as error:
            raise _told(error, prompt, plain, formed) from None

    def slices(self, prompt: ChatPrompt, renderer: Renderer | None = None) -> Slices[str]:
        """The prompt of any chat, as a job: what is not rendered in place is rendered by another process,
        `renderer` where that is given. Raises InvalidRequest where the template refuses, and Overloaded."""
        yield from argument_slices(long_arguments(prompt))
        plain = yield from self._input.message_slices(prompt)
        formed, length = self._input.formed(plain, prompt), _measured(prompt)
        variables = self._input.variables(prompt)
        try:
            text = yield from self._rendered(formed, variables, length, renderer)
        except Unrenderable as error:
            raise _told(error, prompt, plain, formed) from None
        return _continued(text, formed[-1], prompt.continues_param) if prompt.continues_final else text

    def _rendered(
        self, messages: list[Message], variables: dict[str, Any], length: int, renderer: Renderer | None
    ) -> Slices[str]:
        compiled = self._compiled
        if compiled is not None and length <= APART_LEN:
            try:
                return compiled.render(messages, length, variables)
            except Unbounded:
                pass  # of a chat that is long or has tools, which says nothing about the template
        variables = self._defaults | variables
        chat = Chat(self._source, self._special_tokens, messages, variables, self._clock.wall())
        try:
            return (yield from (renderer or self._apart).slices(chat, length))
        except TooMuch:
            self._apart = DOUBTFUL
            raise

    def _leave_place(self, reason: str) -> None:
        """Render nothing in place from now on."""
        self._compiled, self._apart = None, DOUBTFUL
        log.info("template.rendered_apart", reason=reason)


def _told(
    error: Unrenderable, prompt: ChatPrompt, plain: list[Message], formed: list[Message]
) -> InvalidRequest:
    """The error for the caller, which names the message that the template was at when it failed."""
    at = (
        None
        if error.at is None
        else next((index for index, one in enumerate(plain) if one is formed[error.at]), None)
    )
    param = prompt.param if at is None else prompt.place(at)
    return InvalidRequest(error.problem, param=param, detail=error.detail)


# -- what it is given -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """The variables that one template is given of a chat."""

    takes: Takes
    takes_all: bool
    """True if the template takes every chat as it is."""
    knows_tools: bool
    knows_calls: bool
    arguments: Collection[str]
    """The variables that a request may set."""

    @classmethod
    def of(cls, source: str, takes: Takes, arguments: Collection[str]) -> TemplateInput:
        return cls(takes, _takes_all(takes), "tools" in source, "tool_calls" in source, arguments)

    def taking(self, takes: Takes) -> TemplateInput:
        """The input of the same template if it takes this."""
        return replace(self, takes=takes, takes_all=_takes_all(takes))

    def messages(self, prompt: ChatPrompt) -> list[Message]:
        """The messages of a chat without calls, one for each of the prompt's. Raises InvalidRequest."""
        return [self._message(one) for one in prompt.messages]

    def message_slices(self, prompt: ChatPrompt) -> Slices[list[Message]]:
        """The messages of any chat, one for each of the prompt's, in slices. Raises InvalidRequest."""
        plain: list[Message] = []
        length = 0
        for index, one in enumerate(prompt.messages):
            message = self._message(one)
            plain.append(message)
            if one.tool_calls:
                length += self._add_calls(message, one.tool_calls, prompt, index)
                if length > SLICE_LEN:
                    length = 0
                    yield
        return plain

    def formed(self, plain: list[Message], prompt: ChatPrompt) -> list[Message]:
        """The messages in the form that the template takes. Those that are changed are changed in place.
        Raises InvalidRequest."""
        formed = plain if self.takes_all else taken(plain, self.takes)
        if prompt.continues_final:
            _mark(formed[-1], prompt.continues_param)
        if not self.takes.text:
            for message in formed:
                if isinstance(text := message.get("content"), str):
                    message["content"] = [{"type": "text", "text": text}]
        return formed

    def variables(self, prompt: ChatPrompt) -> dict[str, Any]:
        """The variables beside the messages that are not the same for all chats. Raises InvalidRequest."""
        wishes = {name: value for name, value in prompt.wishes.items() if name in self.arguments}
        arguments = self._with_effort({**wishes, **prompt.arguments})
        for name in arguments:
            if name not in self.arguments:
                where = prompt.effort_param if name == EFFORT else f"chat_template_kwargs.{name}"
                raise InvalidRequest(f"{where} is not supported by this model's chat template.", param=where)
        if prompt.tools and not self.knows_tools:
            raise InvalidRequest("This model's chat template knows no tools.", param="tools")
        return {
            **arguments,
            "tools": [_tool(tool, index) for index, tool in enumerate(prompt.tools)] or None,
            "add_generation_prompt": prompt.opens_answer and not prompt.continues_final,
        }

    def _with_effort(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The variables, with the effort as the template takes it. Where it takes no effort, or not that of
        `none`, it may know whether to think; `none` asks a template for nothing that knows not even that."""
        if EFFORT not in arguments:
            return arguments
        asked, efforts = arguments[EFFORT], self.takes.efforts
        thinks = asked != "none"
        if EFFORT in self.arguments and (thinks or not efforts or THINKING not in self.arguments):
            return {**arguments, EFFORT: nearest(asked, efforts)}
        others = {name: value for name, value in arguments.items() if name != EFFORT}
        if THINKING in self.arguments:
            return {THINKING: thinks, **others}
        return arguments if thinks else others

    def _message(self, message: ChatMessage) -> Message:
        """The message, keys in the order that they have in transformers, which gives reasoning a second name,
        `thinking`. For a template that does not know the role `developer`, it is `system`."""
        reasoning = message.reasoning_content or message.reasoning
        plain: Message = {"thinking": reasoning} if reasoning else {}
        is_unknown = message.role == "developer" and not self.takes.developer
        plain["role"] = "system" if is_unknown else message.role
        plain["content"] = message.content if type(message.content) is str else _content(message)
        if message.name is not None:
            plain["name"] = message.name
        if reasoning:
            plain["reasoning_content"] = plain["reasoning"] = reasoning
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        return plain

    def _add_calls(self, message: Message, calls: list[ToolCall], prompt: ChatPrompt, index: int) -> int:
        """Add its calls to a message. Returns the characters of their arguments."""
        if not self.knows_calls:
            where = prompt.place(index, ".tool_calls")
            raise InvalidRequest("This model's chat template knows no calls of tools.", param=where)
        length, made = 0, []
        for at, call in enumerate(calls):
            if isinstance(call, FunctionToolCall):
                where = prompt.place(index, f".tool_calls[{at}].function.arguments")
                made.append(self._call(call, where))
                length += len(call.function.arguments)
            else:
                custom = {"name": call.custom.name, "input": call.custom.input}
                made.append({"id": call.id, "type": "custom", "custom": custom})
        message["tool_calls"] = made
        if not message["content"]:
            without_text(message, self.takes)
        return length

    def _call(self, call: FunctionToolCall, where: str) -> dict[str, Any]:
        text = call.function.arguments or "{}"
        decode = arguments_of if self.takes.written else plain_arguments_of
        try:
            arguments = decode(text)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            raise InvalidRequest(f"{where} must be a JSON object, as text.", param=where) from None
        function = {
            "name": call.function.name,
            "arguments": arguments if self.takes.objects else written_json(arguments),
        }
        return {"id": call.id, "type": "function", "function": function}


def _takes_all(takes: Takes) -> bool:
    return takes.text and takes.any_order and takes.any_calls


def _content(message: ChatMessage) -> str:
    """The text of a content that is no text. That of an assistant which refused is the refusal."""
    content = message.content
    if not isinstance(content, list):
        return content if isinstance(content, str) else message.refusal or ""
    return "".join(
        [
            part.text if isinstance(part, TextPart) else part.refusal
            for part in content
            if isinstance(part, TextPart | RefusalPart)
        ]
    )


def _continued(text: str, final: Message, where: str) -> str:
    """A chat, rendered with its last message marked, up to where that is to be continued. Raises
    InvalidRequest where the template does not write it as it is, which names the field that asks for it."""
    content = final["content"]
    said: str = content if isinstance(content, str) else content[0]["text"]
    tag = TAG.strip()
    if tag not in text or said.removesuffix(TAG).strip() not in text:
        message = "The last message cannot be continued: the chat template does not write it as it is."
        raise InvalidRequest(message, param=where)
    end = text.rindex(tag)
    return text[:end] if text.startswith(TAG, end) else text[:end].rstrip()


def _mark(final: Message, where: str) -> None:
    """Mark the end of the message that is to be continued. Raises InvalidRequest where it has no text, which
    names the field that asks for it."""
    if final.get("content") is None:
        message = "The last message cannot be continued: it has no content."
        raise InvalidRequest(message, param=where)
    final["content"] += TAG


def _tool(tool: Tool, index: int) -> dict[str, Any]:
    kind, spec = ("function", tool.function) if isinstance(tool, FunctionTool) else ("custom", tool.custom)
    plain: dict[str, Any] = {}
    for name in spec.__struct_fields__:
        value = getattr(spec, name)
        if isinstance(value, msgspec.Raw):
            value = _decoded(value, f"tools[{index}].{kind}.{name}")
        if value is not None and value is not msgspec.UNSET:
            plain[name] = value
    return {"type": kind, kind: plain}


def _decoded(value: msgspec.Raw, where: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        message = f"{where} cannot be read as JSON, or is nested too deeply."
        raise InvalidRequest(message, param=where) from None


def _measured(prompt: ChatPrompt) -> int:
    """The characters of all that a template may print of a chat."""
    length = 0
    for message in prompt.messages:
        length += sum(map(len, message.printable))
    for tool in prompt.tools:
        spec = tool.function if isinstance(tool, FunctionTool) else tool.custom
        values = (getattr(spec, name) for name in spec.__struct_fields__)
        length += sum(len(value) for value in values if isinstance(value, str | msgspec.Raw))
    given = prompt.arguments or prompt.wishes
    return length + _arguments_len({**prompt.wishes, **prompt.arguments}) if given else length


def _arguments_len(arguments: Mapping[str, Any]) -> int:
    try:
        return len(msgspec.json.encode(arguments))
    except RecursionError:
        where = "chat_template_kwargs"
        raise InvalidRequest(f"{where} is nested too deeply.", param=where) from None


# -- the sandbox ----------------------------------------------------------------------------------


class CompiledTemplate:
    """A template compiled for this process. Raises ValueError when it is not valid Jinja, and Unbounded where
    `environment` is of bounded templates and this one is not."""

    def __init__(self, source: str, given: Mapping[str, Any], environment: jinja2.Environment) -> None:
        """`given` are variables of every rendering."""
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self._given = {
            **self._template.globals,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **given,
        }
        """The variables of every rendering, beside the messages. The template's own `generate` would collect
        them from two dicts each time, and pass every block through a generator of its own; its `new_context`
        would note for each rendering which of them are globals, which `include` alone asks."""

    def render(
        self, messages: list[Message], length: int | None = None, variables: Mapping[str, Any] = NO_DEFAULTS
    ) -> str:
        """The prompt of messages as templates expect them. They and `variables` have so many characters; None
        for a short chat, which has no variables. Raises Unrenderable, and Unbounded where that was to be."""
        blocks: list[str] = []
        room = RENDERED_LEN_MAX
        try:
            template = self._template
            context = Spending(template.environment, self._given, template.name, template.blocks)
            context.vars.update(variables, messages=messages)
            if length is not None:
                context.start(length)
            for block in self._template.root_render_func(context):
                blocks.append(block)
                room -= len(block)
                if room < 0:
                    raise Unrenderable("The chat is too long.")
        except _Refused as error:
            problem = f"The model's chat template refuses these messages: {error}"
            raise Unrenderable(problem[:MESSAGE_LEN_MAX], at=_failed_at(error, messages)) from None
        except (jinja2.TemplateError, *_FAILURES) as error:
            what = "these messages with these tools" if variables.get("tools") else "these messages"
            raise Unrenderable(
                f"The model's chat template cannot render {what}.",
                f"the chat template raised {type(error).__name__}",
                _failed_at(error, messages),
            ) from None
        return "".join(blocks)


def _failed_at(error: BaseException, messages: list[Message]) -> int | None:
    """The number of the message that the template was at: the innermost of its variables that is one. None
    where none is."""
    numbers = {id(message): number for number, message in enumerate(messages)}
    found = [
        (name, numbers[id(value)])
        for frame, _ in traceback.walk_tb(error.__traceback__)
        for name, value in frame.f_locals.items()
        if name.startswith("l_") and id(value) in numbers
    ]
    return max(found)[1] if found else None


class _Refused(jinja2.TemplateError):
    """The error of a template that called `raise_exception`."""


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox of templates, with what transformers gives them."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, clock: Clock) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now(clock)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.exceptions.SecurityError("powers are not for chat templates")
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and len(sequence) * times > RENDERED_LEN_MAX:
                raise OverflowError("a product that is larger than any chat")
            if isinstance(sequence, int) and abs(sequence) > NUMBER_MAX:
                raise OverflowError("a factor that is larger than any chat")
        return super().call_binop(context, operator, left, right)


class BoundedEnvironment(Environment):
    """The environment of bounded templates: it counts what they do. Its `from_string` raises Unbounded."""

    code_generator_class = StepCounter

    def __init__(self, clock: Clock, given: Collection[str]) -> None:
        """`given` are the names of variables that are not the template's own."""
        super().__init__(clock)
        self._names_given = given
        self.filters |= {KEEP: kept, SPEND: spent, WEIGH: weighed}
        self.globals["range"] = bounded_range

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        bound(template, self._names_given)
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple):
                context.keep(8 * len(sequence) * max(0, times))
        return super().call_binop(context, operator, left, right)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`, without the escapes of HTML that Jinja's own writes and no model has seen in
    training. What remembers how it was written is printed so, unless the template asks for another form."""
    if not (ensure_ascii or indent or separators or sort_keys):
        return written_json(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(clock: Clock) -> Callable[[str], str]:
    """The global function `strftime_now`: local time, as in transformers."""
    return lambda format_: datetime.fromtimestamp(clock.wall()).strftime(format_)


def check_names(names: Iterable[str], special_tokens: Collection[str]) -> None:
    """Raises ValueError where some of these names are no variables that may be set."""
    for name in names:
        if not name.isidentifier() or name.startswith("_") or name in RESERVED or name in special_tokens:
            raise ValueError(f"{shown(name)} is no variable of a chat template that may be set")


def variables_read(source: str, special_tokens: Collection[str]) -> tuple[str, ...]:
    """The variables of a template that may be set for it, sorted. Empty for one that is not valid Jinja."""
    try:
        names = _variables_of(Environment(SYSTEM_CLOCK).parse(source))
    except (jinja2.TemplateError, RecursionError):
        return ()
    may_be_set = (name for name in names if not name.startswith("_"))
    return tuple(sorted(name for name in may_be_set if name not in RESERVED and name not in special_tokens))


def _variables_of(template: nodes.Template) -> frozenset[str]:
    """The variables that are meant to be set from outside: those that the template reads before it sets them
    itself, if it ever does, as in `{% if not date_string is defined %}{% set date_string = "26 Jul 2024" %}`.
    Raises TemplateError for a template that does not compile."""
    undeclared = meta.find_undeclared_variables(template)
    first: dict[str, str] = {}
    for name in _in_order(template):
        first.setdefault(name.name, name.ctx)
    return frozenset(name for name in undeclared if first[name] == "load")


def _in_order(node: nodes.Node) -> Iterator[nodes.Name]:
    """The names in a node, as they come up when it is rendered."""
    if isinstance(node, nodes.Name):
        yield node
    children = list(node.iter_child_nodes())
    if isinstance(node, nodes.Assign):
        children.reverse()  # its value comes before its target
    for child in children:
        yield from _in_order(child)
