"""Templates that may be rendered in place: what they can cost is known, or counted as they run.

A replica's template is code of somebody who is not trusted with our threads. A template is *bounded* where it
is short and made of parts that are known here, none of which does more than go once over a text that it is
given. All others are rendered by a process of their own (`shared.text.rendering`), as are chats for which a
bounded template needs too much: so what is not known here costs time, and never a wrong answer.

Theory. Two things can make such a template expensive, and each passes a counter:

- *repetition*: every body of a loop, a branch or a macro takes its size off `Spending.left`. That is written
  into the compiled code in place, without a call. At zero the clock is read.
- *growth*: a text that is put together from others, and is kept in a variable, a macro's argument or a
  block's buffer, is weighed (`Spending.keep`), and so is what becomes indented JSON, which is the longer the
  deeper it is nested. One expression alone makes `LEAVES_MAX` times as much of it at most.

Most templates of models keep no such text for a short chat, so that for them neither costs a call. Counting
in place was chosen over a process for all: that takes 50 us, a thread and a turn for each chat, and this
nothing that can be measured.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.runtime import Context

SOURCE_LEN_MAX: Final = 32 * 1024
"""Characters of the longest template that is compiled in place. The longest of the models known to us has
20,000. To compile this takes a quarter of a second at most, in steps of 60 ms at most."""
LEAVES_MAX: Final = 64
"""The most texts that one expression puts together."""
DEPTH_MAX: Final = 60
SHORT_S: Final = 0.02
"""The CPU time for a short chat, in seconds. It is rendered on event loops."""
IN_PLACE_S: Final = 0.25
"""The CPU time for the longest chat that is rendered in place, in seconds. A shorter one has its share."""
THREAD_S: Final = 0.05
"""The least of it, for what is not rendered on an event loop, in seconds: forty tools take half as much."""
LONGEST_LEN: Final = 256 * 1024
"""Characters of the longest chat that is rendered in place: each step of its template takes 6 ms at most."""
STEPS: Final = 2048
"""Steps between two looks at the clock, where no text is longer than `STEP_LEN`; where one is, fewer. A step
goes once over a text."""
STEP_LEN: Final = 1024
KEPT_MAX: Final = 4
"""All that a rendering keeps has at most so many times the characters of its chat and `ROOM_LEN`."""
ROOM_LEN: Final = 128 * 1024
DATA_LEN_MAX: Final = 64
"""Characters of the template's own text that a buffer takes without being counted."""
RANGE_MAX: Final = 4096
KEEP: Final = "kept"
SPEND: Final = "spent"
WEIGH: Final = "weighed"

NUMBERS: Final = frozenset({"length", "count", "int", "float", "abs"})
"""Filters whose results are numbers."""
FILTERS: Final = {
    **dict.fromkeys((*NUMBERS, "trim", "list", "first", "last", "items", "dictsort", "sort", "unique"), 1),
    **dict.fromkeys(("reverse", "safe", "min", "max", "default", "d"), 1),
    **dict.fromkeys(("upper", "lower", "title", "capitalize"), 3),  # ß, ŉ, ΐ
    **dict.fromkeys(("string", "e", "escape"), 8),
    "tojson": 16,
}
"""Filters that go over what they are given once, and how much longer their result may be."""
CHOOSING: Final = frozenset({"select", "reject", "selectattr", "rejectattr", "map"})
"""Filters that are given the name of another filter or test."""
METHODS: Final = {
    **dict.fromkeys(("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition"), 1),
    **dict.fromkeys(("rpartition", "startswith", "endswith", "removeprefix", "removesuffix", "find"), 1),
    **dict.fromkeys(("rfind", "index", "count", "get", "keys", "values", "items", "copy"), 1),
    **dict.fromkeys(("isdigit", "isalpha", "isalnum", "isspace", "isupper", "islower"), 1),
    **dict.fromkeys(("upper", "lower", "title", "capitalize"), 3),
}
TESTS: Final = frozenset(
    (
        *("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "boolean"),
        *("true", "false", "integer", "float", "callable", "sameas", "even", "odd", "lower", "upper"),
        *("eq", "equalto", "==", "ne", "!=", "in", "lt", "<", "gt", ">", "le", "<=", "ge", ">="),
    )
)
LOOP_NUMBERS: Final = frozenset({"index", "index0", "revindex", "revindex0", "length", "depth", "depth0"})
_DATE: Final = re.compile(r"(?:[^%]|%-?[A-Za-z%]){0,100}")
_KNOWN: Final = (
    *(nodes.Getattr, nodes.Getitem, nodes.Concat, nodes.List, nodes.Tuple, nodes.Dict, nodes.CondExpr),
    *(nodes.BinExpr, nodes.UnaryExpr, nodes.Compare, nodes.Test),
)
UNNAMED: Final = frozenset({"namespace", "loop", "self", "super", "caller", "varargs", "kwargs"})
"""Names that stand for what may not be passed around."""


class Unbounded(Exception):
    """The template, or what it does with a chat, has no bound that is known here."""


class Spending(Context):
    """The variables of one rendering, and what it has used. Without `start`, it is of a short chat."""

    left = STEPS
    """Steps until the clock is read. The compiled template counts it down."""
    time_s = SHORT_S
    _due_s: float | None = None
    _longest = STEP_LEN
    """Characters of the longest text."""
    _kept_len = 0
    _room = KEPT_MAX * (STEP_LEN + ROOM_LEN)

    def start(self, chat_len: int) -> None:
        """Begin the rendering of a chat that may be long."""
        self.time_s = max(THREAD_S, IN_PLACE_S * min(1.0, chat_len / LONGEST_LEN))
        self._longest = max(STEP_LEN, chat_len)
        self._room = KEPT_MAX * (chat_len + ROOM_LEN)
        self.left = self._steps()

    def derived(self, locals: dict[str, Any] | None = None) -> Spending:  # noqa: A002  Jinja's name
        """The context for a function that is called in a loop, which Jinja would make anew with the loop's
        variables. None of the functions asks for those, and what they use is counted here."""
        return self

    def _steps(self) -> int:
        return max(1, STEPS * STEP_LEN // self._longest)

    def refill(self) -> None:
        """Read the clock. Raises Unbounded."""
        now_s = time.thread_time()
        if self._due_s is None:
            self._due_s = now_s + self.time_s
        elif now_s >= self._due_s:
            raise Unbounded("it takes too long")
        self.left = self._steps()

    def keep(self, length: int) -> None:
        """Note that a text of this length is kept. Raises Unbounded."""
        self._kept_len += length
        if self._kept_len > self._room:
            raise Unbounded("it keeps too much")
        if self._kept_len > self._longest:  # a buffer may hold all of it
            self._longest = self._kept_len
            self.left = min(self.left, self._steps())


@pass_context
def kept(context: Spending, value: Any) -> Any:
    """The filter around each value that is kept."""
    context.keep(len(value) if type(value) is str else _weight(value, context))
    return value


@pass_context
def weighed(context: Spending, value: Any, indent: int) -> Any:
    """The filter around a value that becomes JSON with so many spaces to each level."""
    weight, stack = 0, [(value, indent)]
    while stack:
        one, spaces = stack.pop()
        inner = [*one.values()] if isinstance(one, dict) else one if isinstance(one, list | tuple) else ()
        weight += (len(inner) + 1) * spaces
        stack += [(each, spaces + indent) for each in inner]
        context.left -= 1
        if context.left < 0:
            context.refill()
    context.keep(weight)
    return value


@pass_context
def spent(context: Spending, steps: int) -> bool:
    """The filter in the condition of a loop, which is asked for each of its items. Returns True."""
    context.left -= steps
    if context.left < 0:
        context.refill()
    return True


def _weight(value: object, context: Spending) -> int:
    """The characters of a text that shows all of a value, or somewhat more."""
    weight, stack = 0, [value]
    while stack:
        one = stack.pop()
        weight += 8 * len(one) if isinstance(one, str) else 16
        if isinstance(one, int):
            weight += one.bit_length() >> 1
        if isinstance(one, dict):
            stack += (*one.keys(), *one.values())
        elif isinstance(one, list | tuple):
            stack += one
        context.left -= 1
        if context.left < 0:
            context.refill()
    return weight


@pass_context
def bounded_range(context: Spending, *args: int) -> range:
    """The global function `range`."""
    made = range(*args)
    if len(made) > RANGE_MAX:
        raise Unbounded("a range that is longer than chats have messages")
    spent(context, len(made) >> 3)
    return made


class StepCounter(CodeGenerator):
    """The compiler, which writes out in place what a body takes off the steps that are left."""

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:  # noqa: N802  Jinja's name
        assert isinstance(node.node, nodes.Const)  # templates have no such statement: `do` is not switched on
        self.writeline(f"context.left -= {node.node.value}")
        self.writeline("if context.left < 0:")
        self.indent()
        self.writeline("context.refill()")
        self.outdent()


def bound(template: nodes.Template, given: Collection[str]) -> None:
    """Write the counters into a template. `given` are the names of variables that others than the template
    set. Raises Unbounded where it has parts that are not known here."""
    _Bounds(template, given).write()


class _Bounds:
    def __init__(self, template: nodes.Template, given: Collection[str]) -> None:
        self._template = template
        self._macros = {macro.name for macro in template.find_all(nodes.Macro)}
        if self._macros & DEFAULT_NAMESPACE.keys():
            raise Unbounded("a macro has the name of a function")
        self._values: dict[object, list[nodes.Node | None]] = {}
        """All that each variable, and each field of a namespace, is set to. None for what is not known."""
        assigns = template.find_all(nodes.Assign)
        self._spaces = {_name(one.target) for one in assigns if _namespace(one) is not None}
        for key, value in self._assigned():
            self._values.setdefault(key, []).append(value)
        self._numbers: set[object] = set(self._values).difference(given)
        while wrong := {key for key in self._numbers if not all(map(self._is_number, self._values[key]))}:
            self._numbers -= wrong

    def write(self) -> None:
        self._template.body = self._body(self._template.body, buffered=False, depth=0)

    # -- numbers ----------------------------------------------------------------------------------

    def _assigned(self) -> Iterator[tuple[object, nodes.Node | None]]:
        for assign in self._template.find_all(nodes.Assign):
            match assign.target:
                case nodes.Name(name=name):
                    yield name, assign.node
                case nodes.NSRef(name=name, attr=attr):
                    yield (name, attr), assign.node
                case _:
                    yield from ((name.name, None) for name in assign.target.find_all(nodes.Name))
            if (call := _namespace(assign)) is not None:
                yield from (((_name(assign.target), one.key), one.value) for one in call.kwargs)
        for loop in self._template.find_all(nodes.For):
            counts = isinstance(loop.iter, nodes.Call) and _name(loop.iter.node) == "range"
            if isinstance(loop.target, nodes.Name):
                yield loop.target.name, nodes.Const(0) if counts else None
            else:
                yield from ((name.name, None) for name in loop.target.find_all(nodes.Name))
        for block in self._template.find_all(nodes.AssignBlock):
            yield from ((name.name, None) for name in _names(block.target))
        for macro in self._template.find_all(nodes.Macro):
            yield from ((argument.name, None) for argument in macro.args)

    def _is_number(self, node: nodes.Node | None) -> bool:
        match node:
            case nodes.Const(value=value):
                return isinstance(value, int | float)
            case nodes.Name(name=name):
                return name in self._numbers
            case nodes.Getattr(node=nodes.Name(name=name), attr=attr):
                return (name, attr) in self._numbers or (name == "loop" and attr in LOOP_NUMBERS)
            case nodes.Filter(name=name):
                return name in NUMBERS
            case nodes.Compare() | nodes.Test() | nodes.Not():
                return True
            case nodes.BinExpr(left=left, right=right) if not isinstance(node, nodes.And | nodes.Or):
                return self._is_number(left) and self._is_number(right)
            case nodes.UnaryExpr(node=inner):
                return self._is_number(inner)
            case nodes.CondExpr(expr1=first, expr2=second):
                return self._is_number(first) and self._is_number(second)
        return False

    # -- statements -------------------------------------------------------------------------------

    def _body(self, body: list[nodes.Node], *, buffered: bool, depth: int) -> list[nodes.Node]:
        """The statements with counters. The first one takes the size of those that follow, as far as they are
        in no body of their own."""
        if depth > DEPTH_MAX:
            raise Unbounded("it is nested too deeply")
        steps = 1 + sum(self._statement(node, buffered=buffered, depth=depth + 1) for node in body)
        return [nodes.ExprStmt(nodes.Const(steps), lineno=1), *body]

    def _statement(self, node: nodes.Node, *, buffered: bool, depth: int) -> int:
        """Bound a statement. Returns its size."""
        match node:
            case nodes.Output():
                return self._output(node, buffered=buffered)
            case nodes.If():
                return self._if(node, buffered=buffered, depth=depth)
            case nodes.For(recursive=False):
                node.body = self._body(node.body, buffered=buffered, depth=depth)
                node.else_ = self._body(node.else_, buffered=buffered, depth=depth) if node.else_ else []
                steps = self._expr(node.iter).steps
                if node.test is not None:
                    asked = self._expr(node.test).steps
                    counter = nodes.Filter(nodes.Const(asked), SPEND, [], [], None, None, lineno=1)
                    node.test = nodes.And(counter, node.test, lineno=1)
                return steps + 1
            case nodes.Macro():
                if not all(isinstance(value, nodes.Const) for value in node.defaults):
                    raise Unbounded("a macro's default is no constant")
                node.body = self._body(node.body, buffered=True, depth=depth)
                return 1
            case nodes.Assign():
                return self._assign(node)
            case nodes.AssignBlock(filter=None):
                node.body = self._body(node.body, buffered=True, depth=depth)
                return 1
            case nodes.Break() | nodes.Continue():
                return 1
        raise Unbounded(f"the statement {type(node).__name__} is not known")

    def _if(self, node: nodes.If, *, buffered: bool, depth: int) -> int:
        steps = self._expr(node.test).steps
        node.body = self._body(node.body, buffered=buffered, depth=depth)
        for branch in node.elif_:
            steps += self._if(branch, buffered=buffered, depth=depth)
        if node.else_:
            node.else_ = self._body(node.else_, buffered=buffered, depth=depth)
        return steps

    def _output(self, node: nodes.Output, *, buffered: bool) -> int:
        steps = 1
        for at, shown in enumerate(node.nodes):
            if isinstance(shown, nodes.TemplateData):
                steps += len(shown.data) // DATA_LEN_MAX + 1
                if buffered and len(shown.data) > DATA_LEN_MAX:
                    node.nodes[at] = _keep(nodes.Const(shown.data, lineno=shown.lineno))
                continue
            steps += self._expr(shown).steps
            if buffered and not isinstance(shown, nodes.Const) and not self._is_number(shown):
                node.nodes[at] = _keep(shown)
        return steps

    def _assign(self, node: nodes.Assign) -> int:
        if (call := _namespace(node)) is not None:
            if call.args or call.dyn_args is not None or call.dyn_kwargs is not None:
                raise Unbounded("a namespace that is made of something")
            return 1 + sum(self._kept_argument(one) for one in call.kwargs)
        cost = self._expr(node.node)
        if cost.leaves > 1:
            node.node = _keep(node.node)  # type: ignore[arg-type]  # typed too widely
        return cost.steps + 1

    # -- expressions ------------------------------------------------------------------------------

    def _expr(self, node: nodes.Node, depth: int = 0) -> _Cost:
        if depth > DEPTH_MAX:
            raise Unbounded("it is nested too deeply")
        match node:
            case nodes.Name(name=name) if name in self._spaces or name in UNNAMED:
                raise Unbounded(f"{name} is passed around")
            case nodes.Const() | nodes.Name():
                return _Cost(1, 1)
            case nodes.Getattr(node=nodes.Name(name=name)) if name in self._spaces or name == "loop":
                return _Cost(1, 1)
            case nodes.Filter():
                return self._filter(node, depth)
            case nodes.Call():
                return self._call(node, depth)
            case nodes.Mod(left=left) if not self._is_number(left):
                raise Unbounded("% may format a text")
            case nodes.Test(name=name):
                _known(name, TESTS)
                _arguments(node)
        if not isinstance(node, _KNOWN) or isinstance(node, nodes.Pow):
            raise Unbounded(f"the expression {type(node).__name__} is not known")
        return self._compound(node, depth)

    def _compound(self, node: nodes.Node, depth: int) -> _Cost:
        costs = [self._expr(part, depth + 1) for part in _parts(node)]
        if isinstance(node, nodes.List | nodes.Tuple | nodes.Dict):
            return _sum(costs, more=1)
        joins = isinstance(node, nodes.Add) and not (
            self._is_number(node.left) or self._is_number(node.right)
        )
        return _sum(costs) if joins or isinstance(node, nodes.Concat) else _most(costs)

    def _filter(self, node: nodes.Filter, depth: int) -> _Cost:
        if node.node is None:
            raise Unbounded("a filter of a block")
        costs = [self._expr(part, depth + 1) for part in (node.node, *_arguments(node))]
        times = _filter_growth(node)
        if node.name == "tojson" and (indent := _indent(node)):
            node.node = nodes.Filter(
                node.node, WEIGH, [nodes.Const(indent)], [], None, None, lineno=node.lineno
            )
        return _most(costs, times)

    def _call(self, node: nodes.Call, depth: int) -> _Cost:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise Unbounded("arguments of a number that is not known")
        called = node.node
        if isinstance(called, nodes.Getattr):
            parts = (called.node, *node.args, *(one.value for one in node.kwargs))
            return _most(
                [self._expr(part, depth + 1) for part in parts], times=_method_growth(called, node.args)
            )
        name = _name(called)
        if name is None or name in self._values:
            raise Unbounded("a function that is not known")
        if name not in self._macros:
            if name == "strftime_now" and not _is_date(node.args):
                raise Unbounded("a date of a form that is not known")
            if name not in ("range", "raise_exception", "strftime_now"):
                raise Unbounded(f"the function {name} is not known")
        for at, argument in enumerate(node.args):
            node.args[at] = self._kept(argument, depth)
        steps = sum(self._kept_argument(one, depth) for one in node.kwargs)
        return _Cost(1, 2 + steps + len(node.args) * 2)

    def _kept(self, node: nodes.Expr, depth: int) -> nodes.Expr:
        return _keep(node) if self._expr(node, depth + 1).leaves > 1 else node

    def _kept_argument(self, argument: nodes.Keyword, depth: int = 0) -> int:
        cost = self._expr(argument.value, depth + 1)
        if cost.leaves > 1:
            argument.value = _keep(argument.value)
        return cost.steps


class _Cost:
    """The cost of an expression."""

    __slots__ = ("leaves", "steps")

    def __init__(self, leaves: int, steps: int) -> None:
        if leaves > LEAVES_MAX:
            raise Unbounded("an expression that puts too much together")
        self.leaves = leaves
        """How much longer its value may be than any text that is kept."""
        self.steps = steps
        """How often it goes over such a text."""


def _sum(costs: list[_Cost], more: int = 0) -> _Cost:
    leaves = more + sum(cost.leaves for cost in costs)
    return _Cost(leaves, sum(cost.steps for cost in costs) + leaves)


def _most(costs: list[_Cost], times: int = 1) -> _Cost:
    """The cost of what makes at most `times` the longest of these."""
    leaves = times * max(cost.leaves for cost in costs)
    return _Cost(leaves, sum(cost.steps for cost in costs) + leaves)


def _parts(node: nodes.Node) -> Iterator[nodes.Node]:
    """The expressions in an expression."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Slice | nodes.Operand | nodes.Pair | nodes.Keyword):
            yield from child.iter_child_nodes()
        else:
            yield child


def _keep(node: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, KEEP, [], [], None, None, lineno=node.lineno)


def _name(node: nodes.Node) -> str | None:
    return node.name if isinstance(node, nodes.Name) else None


def _names(node: nodes.Node) -> Iterable[nodes.Name]:
    return [node] if isinstance(node, nodes.Name) else node.find_all(nodes.Name)


def _namespace(assign: nodes.Assign) -> nodes.Call | None:
    """The call that makes the namespace which is assigned. None for any other value."""
    call = assign.node
    if isinstance(call, nodes.Call) and _name(call.node) == "namespace" and _name(assign.target) is not None:
        return call
    return None


def _is_date(args: list[nodes.Expr]) -> bool:
    match args:
        case [nodes.Const(value=str(format_))]:
            return _DATE.fullmatch(format_) is not None
    return False


def _arguments(node: nodes.Filter | nodes.Test) -> list[nodes.Expr]:
    """The arguments."""
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        raise Unbounded("arguments of a number that is not known")
    return [*node.args, *(one.value for one in node.kwargs)]


def _filter_growth(node: nodes.Filter) -> int:
    """How much longer a filter makes its text at most. Raises Unbounded."""
    values = [_constant(one) for one in node.args]
    named = {str(one.key): _constant(one.value) for one in node.kwargs}
    if node.name in CHOOSING:
        if set(named) - {"attribute", "default"} or (node.name == "map" and named and values):
            raise Unbounded(f"the filter {node.name} has arguments that are not known")
        at = 1 if node.name.endswith("attr") else 0
        chosen = values[at] if len(values) > at else "=="
        if node.name == "map":
            return 1 if named else FILTERS[_known(chosen, FILTERS)]
        _known(chosen, TESTS)
        return 1
    match node.name, values, named:
        case "replace", [str(old), str(new)], {}:
            return _replaced(old, new)
        case "join", [] | [str()], _ if named.keys() <= {"d", "attribute"}:
            between = values[0] if values else named.get("d", "")
            return 1 + len(between) if isinstance(between, str) else 1 + LEAVES_MAX
        case "tojson", _, _ if all(_is_small(one) for one in (*values, *named.values())):
            return FILTERS["tojson"]
        case "default" | "d", _, _:
            return 1
        case "int" | "float" | "string" | "tojson" | "escape" | "e", [_, *_], _:
            raise Unbounded(f"the filter {node.name} has arguments")
        case name, _, _ if name in FILTERS and name != "tojson":
            return FILTERS[name]
    raise Unbounded(f"the filter {node.name} is not known")


def _method_growth(called: nodes.Getattr, args: list[nodes.Expr]) -> int:
    """How much longer a method makes its text at most. Raises Unbounded."""
    match called.attr, args:
        case "replace", [nodes.Const(value=str(old)), nodes.Const(value=str(new)), *_]:
            return _replaced(old, new)
        case "join", [_] if isinstance(called.node, nodes.Const) and isinstance(called.node.value, str):
            return 1 + len(called.node.value)
        case name, _ if name in METHODS:
            return METHODS[name]
    raise Unbounded(f"the method {called.attr} is not known")


def _replaced(old: str, new: str) -> int:
    return 1 + len(new) if not old else max(1, -(-len(new) // len(old)))


def _indent(node: nodes.Filter) -> int:
    """The most spaces that a filter `tojson` may write for each level."""
    values = [*node.args[1:2], *(one.value for one in node.kwargs if one.key == "indent")]
    numbers = (getattr(one, "value", None) for one in values)
    return max((int(number) for number in numbers if isinstance(number, int)), default=0)


def _constant(node: nodes.Node) -> Any:
    """The value of a constant, or of a tuple of them. None for anything else."""
    if isinstance(node, nodes.Tuple):
        return tuple(map(_constant, node.items))
    return node.value if isinstance(node, nodes.Const) else None


def _is_small(value: object) -> bool:
    """True for a constant that does not make JSON longer than `FILTERS` says: a flag, an indent that is
    weighed, or separators."""
    if isinstance(value, tuple):
        return all(isinstance(one, str) and len(one) <= len(": ") for one in value)
    return value in (True, False) or (isinstance(value, int) and 0 <= value <= 4)


def _known(name: object, those: Iterable[str]) -> str:
    if not isinstance(name, str) or name not in those:
        raise Unbounded(f"{name!r} is not known")
    return name
