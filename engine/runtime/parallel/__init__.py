"""Tensor parallelism: one model on several devices, a process (a rank) for each.

One decision, executed everywhere. The core process schedules, and its own runner is rank 0. It starts the
other ranks as processes of their own and sends each the same two messages, in the order in which it makes
the same two calls itself:

    Execute(plan)           before it launches the plan
    Landed(step, digest)    after it has collected what the plan brought

So every rank makes the same calls in the same order, plain or overlapped, and no rank decides anything by a
clock, by its own memory or by the state of another rank. Tokens are not sent: all ranks sample from the same
gathered logits, by (seed, position). That they agree is checked in every step, by the digest of the tokens
that rank 0 found.

Shards are Megatron's (Shoeybi et al. 2019): query, key and value heads and the inner size of the MLP are
split between ranks, the matrices after them by columns, so that a layer needs two all-reduces and nothing
else; `shard` says what each rank holds. The embedding is whole on every rank: splitting it would save memory
once and cost every step an all-reduce, and a tied head is a part of it. The head is split by vocabulary, and
its logits are gathered.

Failure. Rank 0 has a thread (`ranks`) that sees a rank's end at once, by the end of its socket, and a rank
that is late, by a deadline on rank 0's own clock. It names that rank and ends all of them; the core tells the
API process and ends. The other way, a rank ends when its socket does, or by the kernel's signal when its
parent is gone. So no process waits for ever.

Several machines. Another program may start the ranks and tell each its place in the environment
(`rendezvous`): torchrun, or a LeaderWorkerSet. Then rank 0 starts nobody. The others find it over the network
(`nodes`), the messages travel over TCP, and a rank ends by itself when its connection does (`remote`).

    shard        the part that a rank holds                collective   sum, gather (`group`: by gloo or NCCL)
    wire         messages and frames                       ranks        the other processes, seen from rank 0
    leader       rank 0's runner                           rank         the program of the other processes
    joining      a rank's way to the others, and its card  rendezvous   a rank's place, from the environment
    nodes        ranks on several machines meet            remote       the program of such a rank
"""
