"""Replicas that do to a gateway what they can, as if they had been broken into: each by a path of its own, as
the only replica of a model of that name.

    loops      its template has loops of 10^15 rounds for all but a greeting
    length     its template makes a text of 3 GB
    bundle     its tokenizer has 60 MB, most of them white space, and each answer names another
    mistake    its tokenizer cannot be loaded, and each answer names another

`bundle` and `mistake` say nothing of themselves before the first chat, so that what they say is fetched
during the attack. Run as `python -m tests.bench.gateway.rogue_engine`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
from pathlib import Path
from typing import Final

import msgspec

from engine.api.http.http2_server import Http2Server, ServerRequest, ServerResponder
from engine.api.http.sniff import SniffingProtocol
from shared.apis.chat import AssistantMessage, ChatChoice, ChatCompletion
from shared.apis.generation import PromptTokensDetails, Usage
from shared.apis.models import Model, ModelList
from shared.process.loops import loop_factory
from shared.text.tokenizer import TokenizerBundle
from shared.wire.http import ClientGone
from shared.wire.ids import TOKENIZER_HEADER
from shared.wire.shapes import BODY_LEN_MAX
from tests.bench.gateway.attack import Rogue
from tests.bench.gateway.paced_engine import Http1Connection, PacedEngine, Ticker

CREATED: Final = 1_700_000_000
CONTEXT_LEN: Final = 4096
BODY_DEADLINE_S: Final = 60.0
WHITE_LEN: Final = 60_000_000
_LOOP: Final = "{% for i in range(99999) %}"
_LOOPS: Final = (
    "{% if messages[0].content != 'Hello.' %}" + 3 * _LOOP + 3 * "{% endfor %}" + "{% endif %}{{ 'x' }}"
)
_LENGTH: Final = "{{ messages[0].content|center(3000000000) }}"
_PLAIN: Final = "{% for message in messages %}{{ message.content }}{% endfor %}"


class RogueReplica:
    """One of them."""

    def __init__(self, kind: Rogue, model_dir: Path) -> None:
        self._kind: Final = kind
        base = TokenizerBundle.from_dir(model_dir)
        text = base.tokenizer_json
        match kind:
            case Rogue.BUNDLE:
                text = text.rstrip()[:-1] + " " * WHITE_LEN + "}"
            case Rogue.MISTAKE:
                text = text.replace('"ByteLevel"', '"None"')
        template = {Rogue.LOOPS: _LOOPS, Rogue.LENGTH: _LENGTH}.get(kind, _PLAIN)
        self._base: Final = msgspec.structs.replace(base, tokenizer_json=text, chat_template=template)
        self._chats = 0
        self._data = b""
        self._hash = ""
        self._make()

    @property
    def _changes(self) -> bool:
        return self._kind in (Rogue.BUNDLE, Rogue.MISTAKE)

    def _make(self) -> None:
        """Make a tokenizer that is another than before."""
        bundle = msgspec.structs.replace(self._base, named_tokens={"number": str(self._chats)})
        self._data = msgspec.json.encode(bundle)
        self._hash = f"sha256:{hashlib.sha256(self._data).hexdigest()}"

    async def handle(self, path: str, request: ServerRequest, responder: ServerResponder) -> None:
        match path:
            case "v1/models" if self._changes and not self._chats:
                await responder.send(503, {}, b"")
            case "v1/models":
                if self._changes:
                    await asyncio.to_thread(self._make)
                model = Model(id=self._kind, created=CREATED, max_model_len=CONTEXT_LEN)
                await responder.send(
                    200, self._named(self._hash), msgspec.json.encode(ModelList(data=[model]))
                )
            case "penstock/tokenizer":
                await responder.send(200, self._named(self._hash), self._data)
            case _:
                await request.body(len_max=BODY_LEN_MAX, deadline_s=BODY_DEADLINE_S)
                self._chats += 1
                another = f"sha256:{self._chats:064x}" if self._changes else self._hash
                await responder.send(200, self._named(another), _ANSWER)

    def _named(self, hash_: str) -> dict[str, str]:
        return {"content-type": "application/json", TOKENIZER_HEADER: hash_}


_ANSWER: Final = msgspec.json.encode(
    ChatCompletion(
        id="chatcmpl-0123456789abcdef",
        created=CREATED,
        model="rogue",
        choices=[ChatChoice(0, AssistantMessage("x"), "stop")],
        usage=Usage(1, 1, 2, PromptTokensDetails()),
        system_fingerprint="fp_rogue",
    )
)


async def serve(port: int, model_dir: Path) -> None:
    replicas = {kind.value: RogueReplica(kind, model_dir) for kind in Rogue}

    async def handle(request: ServerRequest, responder: ServerResponder) -> None:
        name, _, path = request.path.removeprefix("/").partition("/")
        with contextlib.suppress(ClientGone):
            await replicas[name].handle(path, request, responder)

    http2, plain = Http2Server(handle), PacedEngine(Ticker(1.0), model_dir)
    server = await asyncio.get_running_loop().create_server(
        # who asks over HTTP/1.1 wants to know whether this process runs
        lambda: SniffingProtocol(http2.protocol, lambda: Http1Connection(plain)),
        "127.0.0.1",
        port,
    )
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="the model whose tokenizer is spoilt")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(options.port, options.tokenizer))


if __name__ == "__main__":
    main()
