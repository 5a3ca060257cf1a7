"""Grammars that callers write, in Lark's notation or GBNF: checked before the matcher reads them.

They run within the limits of all grammars (`engine.contract.grammars`), which lets through what costs before
a limit is met: counted repeats, which are unrolled, and rules within rules, which end the matcher's stack.
Both are bounded here, by a look at the text's words; how long it is was bounded where the request was read.
What reaches outside of a grammar is refused by name: directives other than `%ignore` and `%import common`,
other grammars, tokens by name or number, which are the model's own marks, and schemas, which have fields of
their own in a request.
"""

from __future__ import annotations

import re
from typing import Final

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from shared.apis.patterns import UNROLLED_LEN_MAX, unrolled_len
from shared.wire.errors import InvalidRequest

RULES_MAX: Final = 300
"""Rules of one grammar. The matcher's stack ends at some 1,000 that lead to one another."""
NESTING_MAX: Final = 24
"""Parentheses within each other."""

_WORD: Final = re.compile(
    r"""
    (?P<blank>[ \t\r]+ | (?://|\#)[^\n]*) | (?P<line>\n)
    | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?![/*])(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<directive>%[a-z]+)
    | (?P<token><[^>\n]*>)
    | (?P<count>
        \{\s*(?P<least>\d*)\s*(?:,\s*(?P<most>\d*)\s*)?\} | ~\s*(?P<from>\d+)(?:\s*\.\.\s*(?P<to>\d+))?
      )
    | (?P<name>[?!]*[A-Za-z_][\w-]*)
    | (?P<other>.)
    """,
    re.VERBOSE,
)
_BEFORE_RULES: Final = ""
"""The name of what stands before the first rule, and may be ignored between all."""
_LARK: Final = re.compile(r"^\s*(?:%llguidance\b|[?!]*start\b[^:\n]*:(?!:))", re.MULTILINE)


def checked_grammar(source: str, param: str) -> str:
    """The grammar in Lark's notation. Raises InvalidRequest."""
    if _LARK.search(source) is None:
        source = _from_gbnf(source, param)
    _Look(param).at(source)
    return source


def _from_gbnf(source: str, param: str) -> str:
    level = 0
    for char in source:  # also in its texts: the reader calls itself for each
        level = max(0, level + (char == "(") - (char == ")"))
        if level > NESTING_MAX:
            message = f"{param} has more than {NESTING_MAX} parentheses within each other."
            raise InvalidRequest(message, param=param)
    try:
        return gbnf_to_lark(source).removeprefix("%llguidance {}")
    except GbnfToLarkError as error:
        raise InvalidRequest(f"{param} is neither Lark nor GBNF: {error}", param=param) from None
    except Exception:  # it raises that where a rule is missing, or given twice
        raise InvalidRequest(f"{param} is neither Lark nor GBNF.", param=param) from None


class _Look:
    """One look at a grammar's words."""

    def __init__(self, param: str) -> None:
        self._param: Final = param
        self._sizes: dict[str, int] = {}
        """The size of each rule when its repeats are unrolled, once it is known."""
        self._bodies: dict[str, list[re.Match[str]]] = {}

    def at(self, source: str) -> None:
        words = [word for word in _WORD.finditer(source) if word["blank"] is None]
        body = self._bodies[_BEFORE_RULES] = []
        for at, word in enumerate(words):
            self._refuse_outside(word, words[at + 1 : at + 2])
            begins = at == 0 or words[at - 1]["line"] is not None
            if begins and word["name"] and _is_head(words, at):
                body = self._bodies.setdefault(word["name"].lstrip("?!"), [])
            body.append(word)
        if len(self._bodies) - 1 > RULES_MAX:  # without what stands before them
            self._refuse(f"has more than {RULES_MAX} rules")
        for name in self._bodies:
            self._size(name, ())

    def _refuse(self, what: str) -> None:
        raise InvalidRequest(f"{self._param} {what}.", param=self._param)

    def _refuse_outside(self, word: re.Match[str], following: list[re.Match[str]]) -> None:
        if (directive := word["directive"]) and directive not in ("%ignore", "%import"):
            self._refuse(f"uses {directive}, which is not supported")
        if word["token"]:
            self._refuse("names a token, which is not supported")
        if word["other"] == "@":
            self._refuse("names another grammar, which is not supported")
        if word["other"] == ":" and following and following[0]["other"] == ":":
            self._refuse("has a rule with a parameter, which is not supported")

    def _size(self, name: str, around: tuple[str, ...]) -> int:
        """The size of a rule when all repeats are unrolled. What leads back to itself counts once."""
        if name in self._sizes:
            return self._sizes[name]
        if name in around or name not in self._bodies:
            return 1
        outer: list[int] = []
        total = last = 0
        for word in self._bodies[name]:
            if word["other"] == "(":
                outer.append(total)
                total = last = 0
                if len(outer) > NESTING_MAX:
                    self._refuse(f"has more than {NESTING_MAX} parentheses within each other")
            elif word["other"] == ")":
                last, total = total, total + (outer.pop() if outer else 0)
            elif word["count"]:
                times = max(1, *(int(word[of][:9] or 0) if word[of] else 0 for of in _TIMES))
                total, last = total + last * (times - 1), last * times
            elif word["name"] or word["string"] or word["regex"]:
                last = self._part(word, (*around, name))
                total += last
            if total > UNROLLED_LEN_MAX:
                self._refuse(f"has a rule longer than {UNROLLED_LEN_MAX:,} when its repeats are written out")
        self._sizes[name] = total + sum(outer)
        return self._sizes[name]

    def _part(self, word: re.Match[str], around: tuple[str, ...]) -> int:
        if word["regex"]:
            return unrolled_len(word["regex"][1:].rpartition("/")[0])
        if word["string"]:
            return len(word["string"])
        name = word["name"]
        return self._size(name, around) if name.isupper() else 1  # a rule is not copied, a terminal is


_TIMES: Final = ("least", "most", "from", "to")


def _is_head(words: list[re.Match[str]], at: int) -> bool:
    """True if the name at `at` is that of a rule which is written here."""
    ahead = words[at + 1 : at + 2]
    return bool(ahead) and ahead[0]["other"] in (":", "[", ".")
