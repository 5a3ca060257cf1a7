"""The most memory that each process takes above what it holds at rest: the sum of its limits.

    gateway     bodies of requests + what each live request has in buffers + threads + clients' connections
                + the two processes that render chats
    engine API  bodies, prompts and answers of requests + each stream's buffers + threads + those processes
    core        what waits and runs; its KV cache and swap space are taken as they are used

Memory that is given back to the allocator stays with the process while anything lives beside it, so the
memory of many requests of all sizes is larger than the sum of their reservations, by `FRAGMENTATION` at most.

While a gateway loads a tokenizer that is new to it, it has a process with
`gateway.relay.checked_bundles.MEMORY_MAX` of addresses beside these, or two of them.

`tests/neighbours` hold the services to these sums under attack, and `python -m tests.bench neighbours` says
how near they come. A container's limit is the memory at rest plus this, and `SOCKET` for each live request of
a gateway: cgroups of version 2 count the kernel's buffers, too.
"""

from __future__ import annotations

from typing import Final

from shared.process.accepting import HANDSHAKES_MAX
from shared.text.rendering import MEMORY_MAX

KIB: Final = 1024
MIB: Final = 1024 * KIB

FRAGMENTATION: Final = 1.25
"""Resident bytes for each reserved byte, where reservations are full of small objects."""
LIVE_REQUEST: Final = 448 * KIB
"""Bytes of a gateway's live request: 256 KiB of an answer whose status is not decided yet, 64 KiB of a
stream's window, 16 KiB that wait to be written, 64 KiB of a body that is not read yet, and its objects."""
CONNECTION: Final = 32 * KIB
"""Bytes of a client's connection without a live request: 16 KiB that wait to be written, and its objects."""
TLS: Final = 96 * KIB
"""Bytes of a connection's TLS, or of a handshake, by uvloop: OpenSSL's state, 64 KiB of what was written at
once, and 16 KiB of what was received at once."""
TLS_LARGE: Final = 512 * KIB
"""Bytes more where as much was received at once as a socket holds, which is kept twice. As many connections
of a gateway have them as requests may be live."""
HOLDING: Final = 128 * MIB
"""Bytes of all connections' half heads and requests that were sent ahead, of which a gateway keeps 1,024."""
PIECES: Final = 40 * MIB
"""Bytes of the token ids that a gateway keeps of long prompts (`shared.text.known_pieces`), and their
objects."""
ADMIN: Final = 54 * MIB
"""Bytes of the admin listener's connections, of which there are 64, each with half a head, large buffers of
TLS and a handshake beside it."""
SOCKET: Final = 384 * KIB
"""Bytes that the kernel holds for a client's connection whose buffers are full: twice `RECEIVE_BUFFER_LEN` of
the gateway's listener, and twice `send_buffer_len` (64 KiB)."""
STREAM: Final = 192 * KIB
"""Bytes of an engine's stream: 64 KiB of a body that is not read yet, 64 KiB of events that wait to be
written, and its objects."""
THREAD: Final = 16 * MIB
"""Bytes of a thread that tokenizes or parses: one slice's data, and its own heap of the allocator."""
SEQUENCE: Final = 64 * KIB
"""Bytes of a sequence in the core: its page table, its penalties and its biases."""
TOKEN: Final = 64
"""Bytes of a prompt's token in the core: an integer, and its place in a list."""
LOGIT: Final = 24
"""Bytes of a token of the vocabulary in the core, for each sequence that runs: its logit, one more where the
request edits it, its count and its id where penalties need them, and what log-probabilities take."""
STEP: Final = 64 * MIB
"""Bytes of the largest step, if none as large was taken while the core warmed up."""


def gateway_memory_max(
    request_memory: int, live_max: int, tokenizer_threads: int, connections_max: int, *, has_tls: bool = False
) -> int:
    """Bytes above rest for a gateway with these `[limits]`. `has_tls` is true if it terminates TLS itself."""
    held = int(FRAGMENTATION * request_memory) + connections_max * CONNECTION + HOLDING + PIECES
    if has_tls:
        held += live_max * TLS_LARGE + (connections_max + HANDSHAKES_MAX) * TLS
    return held + live_max * LIVE_REQUEST + tokenizer_threads * THREAD + 2 * MEMORY_MAX


def engine_memory_max(request_memory: int, streams_max: int, tokenizer_threads: int) -> int:
    """Bytes above rest for an engine's API process. `streams_max` is the number of requests that its gateways
    send it at a time, each gateway at most its `live_max`."""
    held = int(FRAGMENTATION * request_memory)
    return held + streams_max * STREAM + tokenizer_threads * THREAD + 2 * MEMORY_MAX


def core_memory_max(
    kv_cache: int, swap: int, sequences_max: int, queue_tokens_max: int, running_max: int, vocab_size: int
) -> int:
    """Bytes above rest for an engine's core process on a CPU. `sequences_max` counts those that run or
    wait."""
    queued = sequences_max * SEQUENCE + queue_tokens_max * TOKEN
    return kv_cache + swap + queued + running_max * vocab_size * LOGIT + STEP
