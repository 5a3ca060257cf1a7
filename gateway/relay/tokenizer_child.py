"""The process that loads a replica's tokenizer before the gateway does.

    python -P -m gateway.relay.tokenizer_child

It reads a bundle's JSON from stdin and writes to stdout what it found, as `gateway.relay.checked_bundles`
says. What cannot be loaded ends here, whatever it is: an error, a crash, too much memory or too much time.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from typing import Final

import msgspec

from gateway.relay.checked_bundles import CHECK_S, MEMORY_MAX, NICE, Checked
from shared.process.child_python import answer_pipe
from shared.text.tokenizer import BUNDLE_LEN_MAX, Tokenizer, TokenizerBundle, UnusableTokenizer

_NO_MEMORY: Final = Checked(problem="the tokenizer cannot be loaded: memory ran out")


def checked(data: bytes) -> tuple[Checked, bytes]:
    """What is found of a bundle, and its tokenizer.json without white space."""
    try:
        bundle = msgspec.json.decode(data, type=TokenizerBundle)
    except msgspec.DecodeError as error:
        return Checked(unreadable=str(error)), b""
    try:
        began_s = time.process_time()
        Tokenizer(bundle).probe()
        load_s = time.process_time() - began_s
        text = msgspec.json.format(bundle.tokenizer_json.encode(), indent=-1)
    except UnusableTokenizer as error:
        return Checked(hash=bundle.hash, problem=str(error)), b""
    except Exception as error:
        return Checked(hash=bundle.hash, problem=f"the tokenizer cannot be used: {error}"), b""
    rest = msgspec.structs.replace(bundle, tokenizer_json="")
    return Checked(hash=bundle.hash, load_s=load_s, bundle=rest), text


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is for the process that asks
    signal.alarm(int(CHECK_S))  # should nobody be left to kill it
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX, MEMORY_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer = answer_pipe()
    data = sys.stdin.buffer.read(BUNDLE_LEN_MAX + 1)
    try:
        found, text = checked(data)
    except MemoryError:
        found, text = _NO_MEMORY, b""
    head = msgspec.msgpack.encode(found)
    answer.write(len(head).to_bytes(8, "big") + head + text)
    answer.flush()


if __name__ == "__main__":
    main()
