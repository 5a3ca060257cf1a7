"""Which format a model's answers have, and what a format may say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from engine.api.formats.families import FAMILIES, family_of
from engine.api.formats.format import ArgumentsKind, Envelope
from engine.api.formats.patterns import BadPattern, Hole, rows
from engine.api.formats.reading import AUTO, FILE_LEN_MAX, read_format
from engine.api.formats.response_template import BadFormat, compiled
from tests.answer_texts import FORMATS, Answer, answer_of, read
from tests.effort import drawn

ROOT = Path(__file__).parents[4]
THINKING = {"open": "<think>", "close_pattern": r"</think>\s*"}
CALLS: dict[str, Any] = {
    "open": "<call>",
    "close": "</call>",
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}


def template(calls: object = None, **more: Any) -> dict[str, Any]:
    fields = {"content": {"close": "<|end|>"}} | ({} if calls is None else {"tool_calls": calls})
    return {"version": 1, "defaults": {"role": "assistant"}, "start_anchor": "<|a|>", "fields": fields} | more


def tagged(**content_args: Any) -> dict[str, Any]:
    return {
        "open_pattern": r"<call>\s*<f=(?P<name>[^\n>]+)>",
        "close_pattern": r"</call>\s*",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<p=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</p>"} | content_args,
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    }


# -- the choice ---------------------------------------------------------------------------------------


def chosen(choice: str = AUTO, own: object = None, chat_template: str | None = None) -> str | None:
    found = read_format(choice, own=own, chat_template=chat_template, token_ids={})
    return None if found is None else found.name


def test_the_checkpoints_own_format_comes_before_its_familys() -> None:
    hermes = "{% for call in calls %}<tool_call>{{ call }}{% endfor %}"
    assert chosen(chat_template=hermes) == "hermes"
    assert chosen(own=template(CALLS), chat_template=hermes) == "checkpoint"
    assert chosen(own=template(CALLS)) == "checkpoint"
    assert chosen() is chosen("none", template(CALLS), hermes) is None
    assert chosen("qwen3", template(CALLS), hermes) == "qwen3"


def test_what_an_own_format_does_not_say_is_its_familys() -> None:
    chat_template = "<tool_call><function=f><think>"
    own = template(CALLS)
    found = read_format(AUTO, own=own, chat_template=chat_template, token_ids={})
    assert found is not None
    assert found.call_ends_reasoning
    same = CALLS | {"open": "<tool_call>", "close": "</tool_call>"}
    assert chosen(own=template(same), chat_template="<tool_call>") == "hermes", (
        "which states white space, too"
    )


def test_a_bad_own_format_is_passed_over_only_where_the_family_is_known() -> None:
    own = template(CALLS | {"close": None, "close_pattern": "(?=<call>)"})
    with capture_logs() as lines:
        assert chosen(own=own, chat_template="<tool_call>") == "hermes"
    assert [(line["event"], line["format"]) for line in lines] == [
        ("engine.response_template_unread", "hermes")
    ]
    others: tuple[object, ...] = ([], "x", 3)
    for bad in (own, *others):
        with pytest.raises(BadFormat, match="response_template"):
            chosen(own=bad)


def test_an_operator_gives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(template(CALLS | {"open": ["", "<call>"]}, call_ends_reasoning=True)))
    assert chosen(str(path)) == "mine"
    for text, said in (
        ("{", "cannot be read"),
        ("{}", "fields"),
        (" " * FILE_LEN_MAX + "{}", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(BadFormat, match=f"{path.name}.*{said}"):
            chosen(str(path))
    with pytest.raises(BadFormat, match="hermes"):
        chosen(str(tmp_path / "none.json"))


def test_markers_that_are_tokens_are_found() -> None:
    ids = {"<think>": 1, "<tool_call>": 2, "\n": 3, "[": 4, "<|im_end|>": 5, "tool": 6}
    found = read_format("qwen3", own=None, chat_template=None, token_ids=ids)
    assert found is not None
    assert found.token_ids == {"<think>": 1, "<tool_call>": 2, "tool": 6}
    assert found.pieces("\n</think>\n\n<tool_call>\n") == ("\n</think>\n\n", 2, "\n")


def test_a_family_is_known_by_its_template_and_told_in_the_readme() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        found = family_of(" ".join(family.has))
        assert found is not None
        assert FAMILIES.index(found) <= FAMILIES.index(family)
    assert family_of("{{ messages }}") is None
    readme = (ROOT / "engine/README.md").read_text().partition("| `--answer-format` |")[2]
    assert re.findall(r"^\| `([\w.-]+)` \|", readme.partition("\n\n")[0], re.MULTILINE) == [*FORMATS]


# -- what a format says -------------------------------------------------------------------------------


def test_calls_are_found_by_what_transform_says_of_them() -> None:
    def calls(**changes: Any) -> Any:
        return compiled(template(CALLS | changes), "x", is_ours=False).calls

    assert calls().envelope == Envelope("name", "arguments")
    renamed = {"function": {"name": "{content.tool}", "arguments": "{content.args}"}}
    assert calls(transform=renamed).begin == '{"tool": "'
    each = {"function": {"name": "{name}", "arguments": "{arguments}"}}
    listed = calls(transform=each, transform_each=True)
    assert (listed.opener, listed.closer, listed.is_list) == ("<call>[", "]</call>", True)
    xml = compiled(template(tagged()), "x", is_ours=False).calls
    assert xml is not None
    assert (xml.opener, xml.middle, xml.end, xml.closer) == ("<call>\n<f=", ">", "</f>\n", "</call>")
    assert xml.arguments is ArgumentsKind.TAGGED


def test_an_own_format_reads_answers() -> None:
    data = template(tagged(), start_anchor=["<|a|>", "<|b|>"])
    data["fields"]["thinking"] = THINKING
    found = compiled(data, "x", is_ours=False)
    text = "hm</think> so <call><f=g>\n<p=a>\n1\n</p></f></call><call><f=h></f></call>"
    assert answer_of(read(found, text, "<|b|><think>")) == Answer(
        "so", "hm", [("g", '{"a": "1"}'), ("h", "{}")]
    )


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({}, "fields"),
        (template(version=2), "version"),
        (template(fields={"content": {"opens": "x"}}), "fields"),
        (template(fields={"citations": {"open": "x"}}), "fields.citations"),
        (template(fields={"thinking": THINKING, "reasoning": THINKING}), "fields.thinking"),
        (template(fields={"thinking": {"close": "</think>"}}), "fields.thinking.open"),
        (template(fields={"thinking": {"open": "<think>"}}), "fields.thinking.close"),
        (template(CALLS | {"open_pattern": "x"}), "fields.tool_calls.open"),
        (template(CALLS | {"open": None}), "fields.tool_calls.open"),
        (template(CALLS | {"open": ""}), "fields.tool_calls.open"),
        (template(CALLS | {"open": "x" * 257}), "fields.tool_calls.open"),
        (template(CALLS | {"open": ["x"] * 17}), "fields.tool_calls.open"),
        (template(CALLS | {"open": None, "open_pattern": "x(?P<id>.+)y"}), "fields.tool_calls.open_pattern"),
        (template(CALLS | {"close": None, "close_pattern": r"(\d+)+x"}), "fields.tool_calls.close_pattern"),
        (template(CALLS | {"content": "kv-lines"}), "fields.tool_calls.content"),
        (template(CALLS | {"content": "python-calls"}), "fields.tool_calls"),
        (template(CALLS | {"separator": ";"}), "fields.tool_calls"),
        (template(CALLS | {"transform": {"function": {"name": "f"}}}), "fields.tool_calls.transform"),
        (template(CALLS | {"transform": {"name": "{a.b}", "arguments": "{c}"}}), "tool_calls.transform"),
        (template(tagged(tag_pattern="<p>")), "fields.tool_calls.content_args.tag_pattern"),
        (template(tagged(tag_pattern="(?P<key>x)y")), "fields.tool_calls.content_args.tag_pattern"),
        (template(tagged() | {"content": "json", "content_args": {"unquoted_keys": True}}),
         "fields.tool_calls.content_args"),
        (template(tagged() | {"content": "json", "content_args": {"string_delims": [["a", "b"]]}}),
         "fields.tool_calls.content_args.string_delims"),
        (template(call_ends_reasoning=True), "call_ends_reasoning"),
        (template(start_anchor_pattern="x"), "start_anchor"),
    ],
)  # fmt: skip
def test_what_a_format_cannot_say_is_refused_by_its_key(data: object, key: str) -> None:
    with pytest.raises(BadFormat) as caught:
        compiled(data, "x", is_ours=False)
    assert key in str(caught.value)
    assert len(str(caught.value)) < 500


# -- patterns -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a", [("a",)]),
        (r"\[a\]\n", [("[a]\n",)]),
        (r"</x>\s*", [("</x>\n",)]),
        (r"a\s+b[ \n]*", [("a b ",)]),
        ("(?:a|bc?)", [("a",), ("bc",), ("b",)]),
        ("x{2}(ab){0,2}", [("xxabab",), ("xxab",), ("xx",)]),
        (r"<f=(?P<name>[^\]>]+?)>", [("<f=", Hole("name"), ">")]),
        (r"(?P<a>\S+)x(?P<b>.*?)y", [(Hole("a"), "x", Hole("b"), "y")]),
        ("", [()]),
    ],
)
def test_patterns_are_rows_of_texts_and_holes(pattern: str, found: list[tuple[str | Hole, ...]]) -> None:
    assert list(rows(pattern)) == found


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("a.b", "any character"),
        ("^a", "anchor"),
        ("a$", "anchor"),
        ("(a+)+b", "bound"),
        ("a{2,}", "bound"),
        ("a{65}", "bound"),
        (r"\d", r"\\d"),
        ("[abc]", "class"),
        ("(?=a)", "around"),
        ("(?<!a)b", "around"),
        (r"(?P<a>x)(?P=a)", "class"),
        ("(?P<a>(x|y)*)", "class"),
        ("(?i)a", "around"),
        ("(a", "closed"),
        ("a)", "parenthesis"),
        ("*a", "repeat"),
        ("(a|b)" * 5, "16"),
        ("(" * 9 + ")" * 9, "deep"),
        ("a" * 1025, "1024"),
        ("\\", "outside"),
    ],
)
def test_other_patterns_are_refused_by_what_is_in_them(pattern: str, named: str) -> None:
    with pytest.raises(BadPattern, match=named):
        rows(pattern)


@given(st.text(alphabet=r"\(?:P<n>[]{}*+?|ab^$.s1,-", max_size=16))
@settings(max_examples=drawn(50, whole=1000), deadline=None)
def test_any_pattern_is_read_or_refused(pattern: str) -> None:
    try:
        found = rows(pattern)
    except BadPattern:
        return
    assert len(found) <= 16
