"""Templates that were written to take time or memory: none has more of either than is stated, and those of
honest models are rendered in place."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from shared.apis.chat_messages import ChatMessage
from shared.apis.prompt import ChatPrompt
from shared.fairness.fair_threads import at_once
from shared.process.clock import SYSTEM_CLOCK
from shared.text import bounded_template
from shared.text.bounded_template import (
    DEPTH_MAX,
    LEAVES_MAX,
    RANGE_MAX,
    SHORT_S,
    SOURCE_LEN_MAX,
    Spending,
    Unbounded,
)
from shared.text.chat_template import (
    NUMBER_MAX,
    BoundedEnvironment,
    ChatTemplate,
    CompiledTemplate,
    Environment,
)
from shared.text.rendering import DOUBTFUL, Renderer, Unrenderable
from shared.text.template_takes import Takes
from shared.wire.errors import ApiError, InvalidRequest, NotInPlace
from shared.wire.shapes import BODY_LEN_MAX
from tests.shared.text.chat_templates import TEMPLATES

CHAT = ChatPrompt([ChatMessage("user", "a " * 450), ChatMessage("user", "b")])
MEMORY_MAX = 32 * 1024 * 1024
TWICE = "{% for i in range(4000) %}{% for j in range(4000) %}BODY{% endfor %}{% endfor %}"
FIVE = (
    "{% for a in M %}{% for b in M %}{% for c in M %}{% for d in M %}{% for e in M %}x" + "{% endfor %}" * 5
)
SPACE = "{% set ns = namespace(x=FIRST) %}{% for i in range(60) %}{% set ns.x = NEXT %}{% endfor %}{{ ns.x }}"


def growing(first: str, following: str) -> str:
    return SPACE.replace("FIRST", first).replace("NEXT", following)


CAUGHT = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x",
    "smaller loops": TWICE.replace("BODY", TWICE.replace("BODY", "")),
    "loops over messages": FIVE.replace("M", "(messages * 40)"),
    "a condition of a loop": "{% for i in range(4000) %}"
    + "{% for j in range(4000) if j < 0 %}{% endfor %}" * 99
    + "{% endfor %}",
    "a condition that takes long": (
        "{% for i in range(4000) if messages[0].content.split('a')|length < 0 %}{% endfor %}" * 3
    ),
    "ranges as lists": TWICE.replace("BODY", "{{ range(4000)|list|length }}"),
    "a text that is split": TWICE.replace("BODY", "{{ messages[0].content.split('a')|length }}"),
    "an endless answer": TWICE.replace("BODY", "{{ messages[0].content }}"),
    "a text that doubles": growing("'aaaa'", "ns.x ~ ns.x"),
    "a sum that doubles": growing("'aaaa'", "ns.x + ns.x"),
    "a list that doubles": growing("['aaaa']", "ns.x + ns.x"),
    "a tree that doubles": growing("['aaaa']", "[ns.x, ns.x]"),
    "one statement after another": "{% set x = 'aaaaaaaa' %}" + "{% set x = x ~ x %}" * 40,
    "a macro of a macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{{ "
    + "f(" * 40
    + "'aaaa'"
    + ")" * 40
    + " }}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a macro's long text": "{% macro f() %}"
    + "{% for i in range(1800) %}"
    + "z" * 30_000
    + "{% endfor %}"
    + "{% endmacro %}{{ f() }}",
    "a macro's short text": "{% macro f() %}" + TWICE.replace("BODY", "z" * 60) + "{% endmacro %}{{ f() }}",
    "a block's text": "{% set x %}"
    + TWICE.replace("BODY", "{{ messages[0].content }}")
    + "{% endset %}{{ x }}",
    "a number that doubles": TWICE.replace("BODY", "{% set ns.x = ns.x + ns.x %}").join(
        ["{% set ns = namespace(x=1) %}", ""]
    ),
}
"""Templates of parts that are known, which are stopped."""
UNKNOWN = (
    "{{ 2 ** 100000000 }}",
    "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% for a in messages recursive %}{{ a.content }}{% endfor %}",
    "x" * (SOURCE_LEN_MAX + 1),
    "{{ 'a'|center(3000000000) }}",
    "{{ ('%3000000000d' % 1)|length }}",
    "{{ (messages[0].content % 1)|length }}",
    "{{ '{:3000000000}'.format(1) }}",
    "{{ 'a'.zfill(3000000000) }}",
    "{{ 'a'['center'](3000000000) }}",
    "{% set f = 'a'.center %}{{ f(3000000000) }}",
    "{{ ['a']|map('center', 3000000000)|list }}",
    "{{ 'a'|indent(3000000000) }}",
    "{{ 'a'" + "|replace('a', 'aaaaaaaaaaaaaaaaaaaa')" * 10 + " }}",
    "{{ 'a'" + "|replace('a', 'aa')" * LEAVES_MAX.bit_length() + " }}",
    f"{{{{ range({RANGE_MAX + 1})|length }}}}",
    "{% if true %}" * (DEPTH_MAX + 1) + "x" + "{% endif %}" * (DEPTH_MAX + 1),
    "{{ range(4000)|join('" + "x" * 1000 + "') }}",
    "{{ lipsum(n=100000000) }}",
    "{% if false %}{% macro lipsum(n) %}{% endmacro %}{% endif %}{{ lipsum(n=100000000) }}",
    "{{ strftime_now('%1000000000Y') }}",
    "{{ messages|slice(1000000000)|list }}",
    "{{ messages|tojson(indent=1000000000) }}",
    "{% set a = namespace(x=1) %}{% set b = namespace(x=1) %}{% set b.x = [a, a] %}{{ b.x }}",
    "{% include 'x' %}",
    "{{ messages|kept }}{{ -1000000000|spent }}",
)


@pytest.mark.parametrize("name", CAUGHT)
def test_what_is_rendered_in_place_has_little_time_and_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes on by 10 ms whenever it is read, so that the answer is the same anywhere."""
    reads: list[None] = []

    def clock() -> float:
        reads.append(None)
        return len(reads) / 100

    monkeypatch.setattr(time, "thread_time", clock)
    template = ChatTemplate(CAUGHT[name], {}, takes=Takes())
    tracemalloc.start()
    try:
        with pytest.raises(NotInPlace):
            template.render(CHAT)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_MAX
    finally:
        tracemalloc.stop()
    assert len(reads) <= 2 + SHORT_S * 100
    with pytest.raises(NotInPlace):
        template.render(ChatPrompt([ChatMessage("user", "It is not tried again.")]))


@pytest.mark.parametrize("source", UNKNOWN, ids=range(len(UNKNOWN)))
def test_what_has_unknown_parts_is_never_compiled_in_place(source: str) -> None:
    with pytest.raises(NotInPlace):
        ChatTemplate(source, {}).render(CHAT)


@pytest.mark.parametrize("product", [f"'a' * {2 * BODY_LEN_MAX + 1}", f"{NUMBER_MAX + 1} * 1"])
def test_no_template_multiplies_what_is_larger_than_any_chat(product: str) -> None:
    """Wherever it is rendered."""
    source = f"{{% set x = {product} %}}{{{{ messages[0].content }}}}"
    template = CompiledTemplate(source, {}, Environment(SYSTEM_CLOCK))
    with pytest.raises(Unrenderable):
        template.render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_models_have_the_same_text_with_their_steps_counted(name: str) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    messages = [{"role": role, "content": f" {role} é"} for role in ("system", "user", "assistant", "user")]
    try:
        bounded = CompiledTemplate(TEMPLATES[name], special, BoundedEnvironment(SYSTEM_CLOCK, special))
    except Unbounded:
        assert name == "odds", "it has what no model's template has"
        return
    free = CompiledTemplate(TEMPLATES[name], special, Environment(SYSTEM_CLOCK))
    assert bounded.render(messages) == free.render(messages)


def test_a_short_chat_of_a_model_is_rendered_without_a_call_that_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def called(*_: object) -> None:
        raise AssertionError

    for name in ("start", "refill", "keep"):
        monkeypatch.setattr(Spending, name, called)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    for name in ("ChatML", "Llama 3", "Mistral"):
        assert ChatTemplate(TEMPLATES[name], special, takes=Takes()).render(
            ChatPrompt([ChatMessage("system", "Be brief."), ChatMessage("user", "Hello!")])
        )


def test_a_chat_of_middle_length_that_needs_too_much_in_place_has_its_time_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says nothing about the template, which renders short chats in place as before."""
    template = ChatTemplate(
        "{% for i in range(30) %}{{ messages[0].content.split('a')|length }}{% endfor %}", {}
    )
    long = ChatPrompt([ChatMessage("user", "a" * 50_000)])
    renderer = Renderer()
    for name in ("THREAD_S", "IN_PLACE_S"):
        monkeypatch.setattr(bounded_template, name, 0.0)
    try:
        assert at_once(template.slices(long, renderer)) == "50001" * 30
        assert renderer.pid is not None
    finally:
        renderer.close()
    assert template.render(ChatPrompt([ChatMessage("user", "a")])) == "2" * 30


def test_what_is_not_rendered_in_place_is_rendered_by_the_process_for_doubtful_templates() -> None:
    template = ChatTemplate("{{ messages[0].content|center(9) }}", {})
    assert at_once(template.slices(ChatPrompt([ChatMessage("user", "abc")]))) == "   abc   "
    assert DOUBTFUL.pid is not None
    with pytest.raises(InvalidRequest, match="too long for the model's chat template"):
        at_once(ChatTemplate("{{ 'a'|center(3000000000) }}", {}).slices(CHAT))


@pytest.mark.parametrize(
    "source",
    [
        "{{ '('" + "(" * 20000,
        "{% if 1 %}" * 500 + "x" + "{% endif %}" * 500,
        "{% for %}",
        "{{ 9" + "9" * 5000,
    ],
)
def test_what_is_no_template_is_an_error_of_a_kind_that_is_known(source: str) -> None:
    with pytest.raises((ValueError, ApiError)):
        at_once(ChatTemplate(source, {}).slices(CHAT))
