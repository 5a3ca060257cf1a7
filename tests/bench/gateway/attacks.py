"""Attacks on a gateway and its engine, as values.

Each sends requests that once slowed, starved or overcharged another tenant, or took memory without bound,
with all that the sender's key allows. `tests/neighbours` runs them beside a victim, which must not notice;
`python -m tests.bench neighbours` measures how much the victim does notice. `tests.bench.gateway.attackers`
sends them.

An attack is bounded by its counts, never by time. One whose requests would run for long ends on cue
(`Ends.ON_CUE`).
"""

from __future__ import annotations

from functools import partial
from typing import Final

from shared.apis.embeddings import INPUTS_MAX
from tests.bench.gateway.attack import (
    CHATS,
    COMPLETION_HEAD,
    EMBEDDINGS,
    MIB,
    MODEL,
    PLAIN_ID,
    RESPONSES,
    Attack,
    Body,
    Ends,
    Law,
    Rogue,
    Who,
    chat,
    completion,
    embedding,
    encoded,
    padded,
    response,
    text,
)
from tests.bench.gateway.bodies import SHAPES, TAKEN_APART, TAKES_APART, TEXTS
from tests.bench.gateway.decision_attacks import decision_attacks
from tests.bench.gateway.victim import LONG

BIASES: Final = {str(i): 0.5 for i in range(1023)}
STOPS: Final = ["a" * 255 + chr(98 + i) for i in range(16)]


def _reservations() -> list[Attack]:
    """Requests of tenants whose quotas admit nothing, so that only the heads are looked at."""
    refused = frozenset({429})
    law = Law.RESERVATION
    shapes = ("700,000 fields", "2,000,000 prompts", "4,000,000 brackets")
    attacks = [
        Attack(f"{name}, no requests left", law, body, path, 8, 4, (Who.ZERO,), refused)
        for name, (path, body) in ((name, SHAPES[name]) for name in shapes)
    ]
    sixteen = padded(f'{COMPLETION_HEAD}, "prompt": "', "7", '"}', count=16 * MIB, between="")
    nobody = (Who.ZERO, Who.SEATLESS, Who.BROKE)
    attacks += [
        Attack("bodies of 16 MiB", law, sixteen, count=6, at_once=3, who=nobody, statuses=refused),
        Attack(
            "a text of 8 MiB, no budget",
            law,
            text("7"),
            count=8,
            at_once=4,
            who=(Who.BROKE,),
            statuses=refused,
        ),
        Attack(
            "900 heads without a body",
            law,
            completion(),
            count=900,
            at_once=300,
            who=nobody,
            statuses=refused,
            share_sent=0.0,
        ),
        Attack(
            "60 halves of 8 MiB, no seat",
            law,
            text("7"),
            count=60,
            at_once=60,
            who=(Who.SEATLESS,),
            statuses=refused,
            share_sent=0.5,
        ),
    ]
    return attacks


def _strangers() -> list[Attack]:
    """Requests with a key that the gateway does not know."""
    law, large = Law.RESERVATION, {f"x-{i}": "a" * 8000 for i in range(55)}
    return [
        Attack(
            "heads of 440 KB without a key",
            law,
            completion(),
            count=150,
            at_once=150,
            who=(Who.STRANGER,),
            statuses=frozenset({400}),
            headers=large,
        ),
        Attack(
            "large bodies without a key",
            law,
            text("7"),
            count=12,
            at_once=6,
            who=(Who.STRANGER,),
            statuses=frozenset({401}),
        ),
    ]


def _bytes() -> list[Attack]:
    """Bodies and answers that are held for long, or that take more memory than their length."""
    law, two = Law.BYTES, (Who.ATTACKER, Who.ACCOMPLICE)
    refused = frozenset({400, 503})
    return [
        Attack(
            "120 bodies of 8 MiB that do not end",
            law,
            text("7"),
            count=120,
            at_once=120,
            statuses=refused,
            ends=Ends.ON_CUE,
            share_sent=0.95,
        ),
        Attack(
            "400 heads without a body",
            law,
            completion(),
            count=400,
            at_once=400,
            who=two,
            statuses=refused,
            ends=Ends.ON_CUE,
            share_sent=0.0,
        ),
        Attack("refused texts, one after another", law, text("\U0001f600"), count=16, statuses=refused),
        Attack("emoji of 8 MiB", law, text("\U0001f600"), count=12, at_once=6, who=two, statuses=refused),
        Attack(
            "prompts of 200,000 ids",
            law,
            completion(prompt=[PLAIN_ID] * 200_000, max_tokens=1),
            count=16,
            at_once=8,
            who=two,
            statuses=refused,
        ),
    ]


def _more_bytes() -> list[Attack]:
    """More of the same: small characters, small messages, answers that are not read."""
    law, two = Law.BYTES, (Who.ATTACKER, Who.ACCOMPLICE)
    refused = frozenset({400, 503})
    return [
        Attack(
            "24 conversations of 2,048 messages",
            law,
            chat(messages=[{"role": "user", "content": "\U0001f600" * 60}] * 2048, max_tokens=1),
            path=CHATS,
            count=24,
            at_once=12,
            who=two,
            statuses=refused,
        ),
        Attack(
            "24 responses of 4,096 items",
            law,
            response(input=[{"role": "user", "content": "\U0001f600" * 60}] * 4096, max_output_tokens=1),
            path=RESPONSES,
            count=24,
            at_once=12,
            who=two,
            statuses=refused,
        ),
        Attack(
            "600 responses of 16 KiB that are kept",
            law,
            response(metadata={f"k{at}": "x" * 1024 for at in range(16)}, max_output_tokens=1),
            path=RESPONSES,
            count=600,
            at_once=32,
            statuses=frozenset({200, 503}),
        ),
        Attack(
            "answers of 4 MB that nobody reads",
            law,
            completion(n=16, max_tokens=120, logprobs=20),
            count=12,
            at_once=12,
            statuses=frozenset({200, 503}),
            ends=Ends.ON_CUE,
            reads=False,
        ),
    ]


def _loops() -> list[Attack]:
    """Requests that are small, or legal, and long to decode, to compute or to encode."""
    law, refused, may = Law.LOOPS, frozenset({400}), frozenset({200, 503})
    scored = [[PLAIN_ID + i] * 1990 for i in range(4)]
    shapes = [
        Attack(name, law, body, path, count=3, statuses=refused) for name, (path, body) in SHAPES.items()
    ]
    return [
        *shapes,
        *(
            Attack(f"a chat of 8 MiB that {name}", law, TAKEN_APART, path, 6, 3, statuses=may)
            for name, path in TAKES_APART.items()
        ),
        Attack(
            "four prompts scored 64 times",
            law,
            completion(prompt=scored, n=64, echo=True, logprobs=20, max_tokens=0),
            count=4,
            at_once=4,
            statuses=refused,
        ),
        Attack(
            "64 answers of 1,900 tokens with log-probabilities",
            law,
            completion(n=64, max_tokens=1900, logprobs=20),
            count=4,
            at_once=4,
            statuses=refused,
        ),
        Attack(
            "four prompts scored",
            law,
            completion(prompt=scored, echo=True, logprobs=20, max_tokens=0),
        ),
        Attack(
            "a prompt scored, streamed",
            law,
            completion(prompt=scored[0], echo=True, logprobs=20, max_tokens=1, stream=True),
            count=2,
            at_once=2,
        ),
        Attack(
            "16 answers of 200 tokens with log-probabilities",
            law,
            chat(n=16, max_tokens=200, logprobs=True, top_logprobs=20),
            path=CHATS,
            count=2,
            at_once=2,
        ),
    ]


def _steps() -> list[Attack]:
    """Requests that make the engine's steps long, or the ends or heads of sequences."""
    law, refused = Law.LOOPS, frozenset({400})
    return [
        Attack(
            "1,023 log-biases",
            law,
            chat(n=16, max_tokens=60, logit_bias=BIASES),
            path=CHATS,
            count=2,
            at_once=2,
        ),
        Attack(
            "16 stop strings of 256 characters",
            law,
            chat(n=16, max_tokens=100, stop=STOPS),
            path=CHATS,
            count=2,
            at_once=2,
        ),
        Attack(
            "256 choices with log-biases and stop strings",
            law,
            completion(prompt=["7 "] * 4, n=64, max_tokens=2, logit_bias=BIASES, stop=STOPS),
            count=2,
        ),
        Attack(
            "chunks of one byte",
            law,
            completion(prompt="7" * 200_000, max_tokens=1),
            count=4,
            at_once=4,
            statuses=refused,
            ends=Ends.ON_CUE,  # or on a reset: the gateway refuses the body half-way
            chunk_len=1,
        ),
        Attack(
            "300 streams that leave at once",
            law,
            chat(max_tokens=200, stream=True),
            path=CHATS,
            count=300,
            at_once=100,
            ends=Ends.AT_ONCE,
        ),
    ]


def _threads() -> list[Attack]:
    law, refused = Law.THREADS, frozenset({400, 503})
    attacks = [
        Attack(f"texts of {name}", law, body, count=3, at_once=3, statuses=refused)
        for name, body in TEXTS.items()
    ]
    prompt = partial(encoded, {"model": MODEL, "prompt": "7 " * MIB})
    attacks += [
        Attack(
            "long texts whose callers leave",
            law,
            completion(prompt="7 " * MIB, max_tokens=1),
            count=16,
            at_once=8,
            ends=Ends.AT_ONCE,
        ),
        Attack(
            "long texts to tokenize",
            law,
            prompt,
            path="/tokenize",
            count=2,
            at_once=2,
            statuses=frozenset({200, 400, 503}),
        ),
        Attack(
            "long texts to tokenize whose callers leave",
            law,
            prompt,
            path="/tokenize",
            count=16,
            at_once=8,
            ends=Ends.AT_ONCE,
        ),
        Attack(
            "250,000 ids to detokenize",
            law,
            partial(encoded, {"model": MODEL, "tokens": [PLAIN_ID] * 250_000}),
            path="/detokenize",
            count=4,
        ),
    ]
    return attacks


def _seats() -> list[Attack]:
    law, served = Law.SEATS, frozenset({200, 503})
    path = CHATS
    many = chat(n=64, max_tokens=700)
    first = chat(n=64, max_tokens=700, service_tier="priority", priority=-1000)
    four = completion(prompt=[[PLAIN_ID + i] * 20 for i in range(4)], n=64, max_tokens=700)
    return [
        Attack("64 choices on all slots", law, many, path, 3, 3, statuses=served, ends=Ends.ON_CUE),
        Attack("64 choices that ask for priority", law, first, path, 3, 3, statuses=served, ends=Ends.ON_CUE),
        Attack("four prompts of 64 choices", law, four, statuses=served, ends=Ends.ON_CUE),
        Attack(
            "64 streams on all slots",
            law,
            chat(max_tokens=700, stream=True),
            path,
            count=64,
            at_once=64,
            statuses=served,
            ends=Ends.ON_CUE,
        ),
        Attack(
            "a flood of 128 requests of 8 choices",
            law,
            chat(n=8, max_tokens=12),
            path,
            count=128,
            at_once=128,
            who=(Who.ATTACKER, Who.ACCOMPLICE),
            statuses=served,
        ),
        Attack(
            "24 prompts of 2,000 tokens",
            law,
            completion(prompt=[PLAIN_ID] * 2000, max_tokens=4, cache_salt="own"),
            count=24,
            at_once=24,
            statuses=served,
        ),
    ]


def _vectors() -> list[Attack]:
    """Many inputs, of which a step computes a few, and the answers to them."""
    law, served, path = Law.SEATS, frozenset({200, 503}), EMBEDDINGS
    short = embedding(input=[[PLAIN_ID + i % 900] for i in range(INPUTS_MAX)], encoding_format="float")
    left = embedding(input=[[PLAIN_ID + i] * 64 for i in range(400)])
    ids = embedding(input=[[PLAIN_ID + i] * 64 for i in range(400)])
    texts = embedding(input=["the water in the pipe turns the wheel " * 8] * 200)
    long = embedding(input=[[PLAIN_ID + i] * 2000 for i in range(20)])
    return [
        Attack("2,048 vectors as numbers", Law.LOOPS, short, path, count=2),
        Attack("left before its vectors are made", Law.CHARGES, left, path, ends=Ends.ON_CUE),
        Attack("400 inputs of vectors", law, ids, path, 4, 4, statuses=served, ends=Ends.ON_CUE),
        Attack("200 texts of vectors", law, texts, path, 4, 4, statuses=served, ends=Ends.ON_CUE),
        Attack("20 inputs of 2,000 tokens", law, long, path, 4, 4, statuses=served, ends=Ends.ON_CUE),
    ]


def _charges() -> list[Attack]:
    """Ways to leave with more than was paid for."""
    law, path = Law.CHARGES, CHATS
    own_deadline = {"x-request-timeout": "0.4"}
    return [
        Attack(
            "left while it streams",
            law,
            chat(n=8, max_tokens=1900, stream=True),
            path,
            count=4,
            at_once=4,
            ends=Ends.ON_CUE,
        ),
        Attack(
            "responses left while they stream",
            law,
            response(max_output_tokens=1900, stream=True),
            RESPONSES,
            count=16,
            at_once=16,
            ends=Ends.ON_CUE,
        ),
        Attack("left before it answers", law, chat(n=8, max_tokens=1900), path, 4, 4, ends=Ends.ON_CUE),
        Attack(
            "a reader that does not read",
            law,
            chat(n=8, max_tokens=1900, stream=True, logprobs=True, top_logprobs=5),
            path,
            count=4,
            at_once=4,
            ends=Ends.ON_CUE,
            reads=False,
        ),
        Attack(
            "a deadline of its own",
            law,
            chat(n=16, max_tokens=1900),
            path,
            count=2,
            at_once=2,
            statuses=frozenset({504}),
            headers=own_deadline,
        ),
    ]


def _more_charges() -> list[Attack]:
    law, path = Law.CHARGES, CHATS
    return [
        Attack(
            "64 choices on a small budget",
            law,
            chat(n=64),
            path,
            count=8,
            at_once=2,
            who=(Who.POOR,),
            statuses=frozenset({200, 429}),
        ),
        Attack(
            "prompts that are scored",
            law,
            completion(prompt=[[PLAIN_ID] * 500, [PLAIN_ID + 1] * 500], echo=True, logprobs=1, max_tokens=0),
            count=2,
        ),
        Attack(
            "prompts of 16 choices that leave at once",
            law,
            completion(prompt=[PLAIN_ID] * 300, n=16, max_tokens=100),
            count=8,
            at_once=4,
            ends=Ends.AT_ONCE,
        ),
    ]


def _pages() -> list[Attack]:
    """Prompts that look for another tenant's cached pages, or that leave no page to it."""
    law = Law.PAGES
    of_another = [{"role": "user", "content": LONG}]
    return [
        Attack(
            "another tenant's prompt",
            law,
            chat(messages=of_another, max_tokens=1),
            path=CHATS,
            count=2,
            who=(Who.ATTACKER, Who.ACCOMPLICE),
        ),
        Attack(
            "prompts that fill the KV cache",
            law,
            completion(prompt=[[PLAIN_ID + i] * 1980 for i in range(36)], max_tokens=1),
            statuses=frozenset({200, 503}),
        ),
    ]


def _haste() -> list[Attack]:
    """Deadlines of first tokens that prompts can only meet, if at all, at the cost of others' streams."""
    law = Law.HASTE
    return [
        Attack(
            "48 prompts of 2,000 tokens in haste",
            law,
            completion(prompt=[PLAIN_ID] * 2000, max_tokens=4, cache_salt="hasty", stream=True),
            count=48,
            at_once=48,
            who=(Who.HASTY,),
            statuses=frozenset({200, 503, 504}),
        ),
        Attack(
            "400 streams in haste",
            law,
            chat(max_tokens=8, stream=True),
            path=CHATS,
            count=400,
            at_once=200,
            who=(Who.HASTY,),
            statuses=frozenset({200, 503, 504}),
        ),
    ]


def _replicas() -> list[Attack]:
    """Chats with models whose replicas are rogues. They are answered where their tokens are estimated."""
    law, path = Law.REPLICAS, CHATS
    may = frozenset({200, 400, 503})
    return [
        Attack("a template of 10^15 rounds", law, chat(model=Rogue.LOOPS), path, 4, 4, statuses=may),
        Attack("a template that makes 3 GB", law, chat(model=Rogue.LENGTH), path, 24, 8, statuses=may),
        Attack("another bundle of 60 MB", law, chat(model=Rogue.BUNDLE), path, 1000, 4, statuses=may),
        Attack("another broken tokenizer", law, chat(model=Rogue.MISTAKE), path, 1000, 4, statuses=may),
    ]


def _grammars() -> list[Attack]:
    """Schemas, patterns and grammars that are long to compile, or whose masks are long to fill."""
    law, path, refused = Law.GRAMMARS, CHATS, frozenset({400})
    may = frozenset({200, 503})
    wide = {f"p{i}": {"type": "string", "maxLength": 30} for i in range(390)}
    words = [f"{i:x}" * 9 for i in range(1000)]
    chain = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1500)}
    ambiguous = 'start: a\na: a a | b\nb: "x"? | c\nc: /[a-z ]{0,40}/ b?'
    return [
        Attack("16 answers of any JSON", law, _structured(n=16, max_tokens=150, json={}), path, 4, 4),
        Attack(
            "16 answers with 390 optional properties",
            law,
            _structured(n=16, max_tokens=60, json={"type": "object", "properties": wide}),
            path,
            count=4,
            at_once=4,
            statuses=may,
        ),
        Attack(
            "one of 1,000 texts", law, _structured(n=8, choice=words), path, count=6, at_once=6, statuses=may
        ),
        Attack(
            "a pattern of repeats of repeats",
            law,
            _structured(n=8, max_tokens=100, regex="((a|aa|aaa){1,20}b?){1,20}c"),
            path,
            count=6,
            at_once=6,
            statuses=may,
        ),
        Attack(
            "a grammar of many readings",
            law,
            _structured(n=8, max_tokens=100, grammar=ambiguous),
            path,
            count=6,
            at_once=6,
            statuses=may,
        ),
        Attack(
            "1,500 references in a row",
            law,
            _structured(json={"$defs": chain | {"d1500": {}}, "$ref": "#/$defs/d0"}),
            path,
            count=6,
            at_once=6,
            statuses=refused,
        ),
    ]


def _structured(n: int = 1, max_tokens: int = 40, **outputs: object) -> Body:
    """A chat whose answer has a structure."""
    messages = [{"role": "user", "content": "Go on."}]
    asked = {"messages": messages, "n": n, "max_tokens": max_tokens, "structured_outputs": outputs}
    return partial(encoded, {"model": MODEL, "temperature": 1.5, **asked})


ATTACKS: Final = (
    *(*_reservations(), *_strangers()),
    *(*_bytes(), *_more_bytes()),
    *(*_loops(), *_steps()),
    *(*_threads(), *_grammars()),
    *_seats(),
    *_vectors(),
    *(*_charges(), *_more_charges()),
    *(*_pages(), *_haste()),
    *_replicas(),
    *decision_attacks(),
)


def against(law: Law) -> list[Attack]:
    return [attack for attack in ATTACKS if attack.law is law]
