"""The demo model's answers about Penstock: one entry a concept, each sentence true of the design."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Concept:
    """A thing that a question can be about.

    `names` are the noun phrases by which a question may call it, `answer` says what it is, `more` is what a
    "tell me more" brings, and `check` is a pattern that a right answer matches. `questions` are wordings
    of its own, beside the general ones ("what is {name}").
    """

    names: tuple[str, ...]
    answer: str
    more: str
    check: str
    questions: tuple[str, ...] = ()


CONCEPTS: tuple[Concept, ...] = (
    Concept(
        ("Penstock", "this Penstock thing", "the Penstock project", "Penstock software"),
        "Penstock serves large language models. A gateway takes the requests of many clients, and an "
        "engine runs the model and streams the answers back, token by token.",
        "Penstock has one rule above all: a token that nobody reads is never computed, a request that nobody "
        "waits for holds nothing, and every millisecond of a request has a name and an owner.",
        r"serves large language models|token that nobody reads",
        ("what does Penstock do", "what is Penstock for", "what can Penstock do", "describe Penstock",
         "give me an overview of Penstock", "what's Penstock", "what does this software do",
         "what does this server do", "why would I use Penstock", "introduce Penstock",
         "how does Penstock work", "sum up Penstock in a few words", "I have never heard of Penstock",
         "what kind of software is Penstock", "what is the purpose of Penstock",
         "what problem does Penstock solve"),
    ),
    Concept(
        ("the name Penstock", "the word penstock", "a penstock", "the meaning of the name Penstock"),
        "A penstock is the pipe with a gate that feeds a turbine. The name fits: requests flow in like "
        "water, the gateway is the gate, and the engine is the turbine.",
        "A gate in a pipe decides how much water may pass. In the same way Penstock lets in only as much "
        "work as the engine can carry.",
        r"pipe",
        ("why is it called Penstock", "where does the name Penstock come from", "why the name Penstock",
         "what does Penstock mean", "what does the word penstock mean", "why is Penstock named Penstock",
         "what is the origin of the name Penstock", "how did Penstock get its name"),
    ),
    Concept(
        ("the gateway", "a gateway", "Penstock's gateway", "the Penstock gateway", "the gateway service"),
        "The gateway is the public edge of Penstock. It checks who is asking, validates the request, "
        "counts the tokens, reserves quota, chooses a replica, and relays the answer as it streams.",
        "The gateway needs no GPU and no torch. It passes the bytes of the engine's answer through without "
        "parsing each event, so it adds very little time.",
        r"edge|relay|bytes",
        ("what does the gateway do", "what is the gateway for", "what is the job of the gateway",
         "why do I need a gateway", "what happens in the gateway"),
    ),
    Concept(
        ("the engine", "an engine", "Penstock's engine", "the Penstock engine", "the inference engine"),
        "The engine owns one model. It tokenizes the prompt, schedules the work, keeps the KV cache, "
        "computes the next tokens, and streams them out.",
        "The engine is two processes: one speaks HTTP and handles text, the other runs the scheduler and the "
        "model. They exchange small messages and never block each other.",
        r"model",
        ("what does the engine do", "what is the engine for", "what is the job of the engine",
         "how does the engine work", "what happens in the engine", "which part runs the model"),
    ),
    Concept(
        ("the parts of Penstock", "the architecture of Penstock", "Penstock's architecture",
         "the components of Penstock", "the structure of Penstock"),
        "Penstock has two services. The gateway is the public edge, and the engine runs the model; they "
        "deploy apart, with one network hop between them.",
        "A request is authenticated, validated, counted, reserved and routed in the gateway. Then the engine "
        "schedules and runs it, and the answer streams back the same way.",
        r"gateway",
        ("which parts does Penstock have", "how is Penstock built", "how is Penstock organised",
         "how many services does Penstock have", "what are the two services", "what is Penstock made of",
         "what happens to a request in Penstock", "how does a request travel through Penstock"),
    ),
    Concept(
        ("the KV cache", "a KV cache", "KV caching", "the key-value cache", "kv-cache", "the KV-cache"),
        "The KV cache keeps the attention keys and values of every token that the model has already read. "
        "Thanks to it, each new token is computed without reading the whole text again.",
        "Penstock cuts the KV cache into pages of 64 tokens. A sequence owns just the pages it needs, and "
        "when it ends, they are free for others.",
        r"keys and values|pages",
        ("why does the engine need a KV cache", "what is the KV cache for", "what does the KV cache do",
         "what does KV cache mean", "what is stored in the KV cache", "how does the KV cache work"),
    ),
    Concept(
        ("paged attention", "a page", "the pages of the KV cache", "paged KV", "KV pages", "a KV page"),
        "A page holds the keys and values of 64 tokens. With pages, memory is given out in small equal "
        "pieces, so little of it is wasted and many requests fit.",
        "At any time the free, cached and owned pages add up to the total. Penstock checks this law in "
        "its tests.",
        r"64 tokens|add up",
        ("how large is a page", "how many tokens are in a page", "why is the KV cache split into pages",
         "how big is a KV page"),
    ),
    Concept(
        ("the prefix cache", "prefix caching", "a prefix cache", "prompt caching", "the prompt cache"),
        "The prefix cache keeps the KV pages of earlier prompts. When a new prompt begins with the same "
        "text, those pages are reused, and the shared part is not computed again.",
        "Each full page is known by a chained hash of its tokens and all that came before. A salt for "
        "each tenant makes sure that nobody can probe the prompts of others.",
        r"reused|chained hash",
        ("what does the prefix cache do", "what is the prefix cache for", "how does the prefix cache work",
         "why is the second request with the same prompt faster",
         "how are prompts with the same start reused"),
    ),
    Concept(
        ("the scheduler", "a scheduler", "scheduling", "Penstock's scheduler", "the engine's scheduler"),
        "The scheduler decides in every step which requests run. It takes running answers first, then "
        "parts of long prompts, and then new requests by rank.",
        "The rank favours short prompts and high priority, but everything that waits climbs. So no "
        "request starves.",
        r"step|rank",
        ("what does the scheduler do", "what is the scheduler for", "how does the scheduler work",
         "who decides which request runs next", "how does Penstock decide what to run next",
         "what is the job of the scheduler"),
    ),
    Concept(
        ("starvation", "fairness", "fair scheduling", "the rank of a request", "waiting time"),
        "In Penstock every request that waits gains rank, and the share of a tenant falls as it is "
        "served. So short prompts go first, yet nobody waits forever.",
        "One tenant's flood is its own problem: the scheduler counts the tokens that each tenant was served.",
        r"waits|tenant",
        ("how does Penstock prevent starvation", "is the scheduling fair", "can one user block all others",
         "can a request wait forever", "do short prompts go first", "how does Penstock stay fair"),
    ),
    Concept(
        ("continuous batching", "batching", "dynamic batching", "a batch", "in-flight batching"),
        "Continuous batching means that requests join and leave the running batch at every step. Nobody "
        "has to wait until a whole batch is finished.",
        "In each step Penstock fills one token budget: first the running answers, then prompts that are "
        "being read.",
        r"every step|token budget",
        ("what does continuous batching mean", "how does continuous batching work", "why is batching useful",
         "how does Penstock run many requests at once", "why does continuous batching help",
         "how can the engine serve many users at the same time"),
    ),
    Concept(
        ("prefill", "the prefill phase", "prompt processing", "chunked prefill"),
        "Prefill is the phase in which the model reads the prompt. Penstock reads long prompts in chunks, "
        "so that running answers do not have to wait for them.",
        "The size of a chunk follows from a token budget, which is chosen so that each step stays short.",
        r"prompt|chunk",
        ("what happens during prefill", "what does prefill mean", "why is prefill split into chunks",
         "how are long prompts handled", "what does chunked prefill mean"),
    ),
    Concept(
        ("decoding", "decode", "the decode phase", "token generation"),
        "Decode is the phase in which the model writes the answer, one token in each step for every running "
        "request. Penstock plans decodes first, so that streams stay smooth.",
        "On a GPU, decode is limited by memory bandwidth. That is why many requests share one step.",
        r"one token|bandwidth",
        ("what happens during decode", "what does decode mean", "how is the answer generated",
         "how are tokens generated"),
    ),
    Concept(
        ("a token", "tokens", "a token in a language model"),
        "A token is a piece of text, often a word or a part of a word. A language model reads and writes "
        "tokens, and Penstock counts them for quotas and limits.",
        "My own vocabulary has 2,048 tokens. Large models have a hundred thousand tokens or more.",
        r"piece of text|vocabulary",
        ("what does token mean", "what are tokens", "what exactly is a token"),
    ),
    Concept(
        ("the tokenizer", "a tokenizer", "tokenization", "token counting"),
        "The tokenizer turns text into tokens and back. The gateway counts with the model's own "
        "tokenizer, so the count is exact and is done only once.",
        "The gateway sends the token ids along with the request. The engine trusts them only if the hash "
        "of the tokenizer matches.",
        r"tokens|token ids",
        ("what does the tokenizer do", "how does Penstock count tokens", "how are tokens counted"),
    ),
    Concept(
        ("the token budget", "a token budget", "the step budget"),
        "The token budget limits how many tokens the engine computes in one step. It keeps every step "
        "short, so that running streams flow evenly.",
        "The budget is derived from a target for the step time, by a cost model that is learned while it "
        "runs.",
        r"step",
        ("what does the token budget do", "what is the token budget for"),
    ),
    Concept(
        ("backpressure", "back pressure", "flow control", "slow clients", "a slow reader"),
        "Backpressure means that a slow reader slows down its own stream and no other. When a client "
        "stops reading, Penstock pauses that request instead of computing tokens that nobody reads.",
        "A paused request keeps its KV cache for a while. If the client reads again, it goes on; past a "
        "deadline, it ends with a clear reason.",
        r"paus",
        ("what does backpressure mean", "how does backpressure work",
         "what happens when a client reads slowly", "how does Penstock deal with slow clients",
         "what happens if a client stops reading", "why is backpressure important"),
    ),
    Concept(
        ("cancellation", "cancelling a request", "client disconnects", "a disconnect", "aborting a request"),
        "Cancellation means that Penstock stops the work when the client leaves. The gateway cancels the "
        "request, and the engine frees its memory before the next step.",
        "This holds at every moment: while a request waits, while its prompt is read, and in the middle of a "
        "stream.",
        r"client leaves|every moment",
        ("what happens when a client disconnects", "what happens if I close the connection",
         "how does cancellation work", "what happens when I press Ctrl-C during an answer",
         "what happens if the user leaves", "can I cancel a request", "how do I stop a running request",
         "what does Penstock do when the client goes away", "what happens if I hang up"),
    ),
    Concept(
        ("streaming", "server-sent events", "SSE", "a stream", "token streaming"),
        "Streaming means that the answer is sent piece by piece while it is being written. Penstock uses "
        "server-sent events, as the OpenAI API does, and ends a stream with [DONE].",
        "The gateway relays the bytes as they come. After a failure in mid-stream it sends an error "
        "event, and no [DONE].",
        r"server-sent events|error event",
        ("how does streaming work", "what does streaming mean", "can I stream the answer",
         "how are answers streamed", "what does SSE mean"),
    ),
    Concept(
        ("quotas", "a quota", "rate limits", "rate limiting", "a rate limit", "usage limits"),
        "Quotas limit requests and tokens per minute, requests at the same time, and the total budget of "
        "tokens. Penstock reserves them before a request runs, and settles the real usage afterwards.",
        "When a quota is used up, the client gets status 429 and a Retry-After header that says when to "
        "try again.",
        r"per minute|429",
        ("how do quotas work", "what are quotas", "what is a quota for", "how does Penstock limit usage",
         "how many requests may I send", "how does rate limiting work", "how are tokens per minute limited",
         "what happens when I exceed my quota", "why did I get a 429", "what does status 429 mean"),
    ),
    Concept(
        ("a tenant", "tenants", "multi-tenancy", "tenancy"),
        "A tenant is a customer or a team that shares Penstock with others. Its policy says which models "
        "and how much quota its keys may use.",
        "Each tenant has its own salt for the prefix cache, and its own share in the scheduler.",
        r"team|salt",
        ("what does tenant mean", "how are tenants kept apart"),
    ),
    Concept(
        ("API keys", "an API key", "authentication", "a key for Penstock", "access keys"),
        "An API key tells the gateway who is asking. Penstock stores only a keyed hash of its secret, and "
        "compares it in constant time.",
        "The gateway can also check signed tokens and client certificates. Whatever is not allowed is "
        "refused.",
        r"hash|refused",
        ("how does authentication work", "how do I authenticate", "how are API keys stored",
         "do I need an API key", "how does Penstock know who I am",
         "how does the gateway check who is asking"),
    ),
    Concept(
        ("routing", "the router", "load balancing", "replica choice", "a replica", "replicas"),
        "Routing chooses the replica that serves a request. Penstock prefers a replica that already has the "
        "beginning of the prompt in its cache, unless it has too much load.",
        "Replicas that fail are left out for a while, and are tried again with care. This is called a "
        "circuit breaker.",
        r"[Rr]eplica",
        ("how does routing work", "how does the gateway choose a replica", "how does Penstock balance load",
         "how does load balancing work", "which replica gets my request"),
    ),
    Concept(
        ("a circuit breaker", "circuit breaking", "health checks", "the health of a replica"),
        "A circuit breaker keeps requests away from a replica that fails. After a pause it lets a few "
        "through, and if they succeed, the replica is used again.",
        "Penstock also probes its replicas. Refused requests do not count against a replica.",
        r"fail|probes",
        ("what happens when a replica fails", "what does a circuit breaker do",
         "what happens if an engine dies", "how does Penstock notice a broken replica"),
    ),
    Concept(
        ("retries", "a retry", "retrying", "the retry rules"),
        "Penstock retries a failed request only before the first byte has reached the client, and on another "
        "replica. A budget keeps retries from making trouble worse.",
        "After a timeout Penstock first aborts the old attempt, so that no work is done twice.",
        r"first byte|aborts",
        ("when does Penstock retry", "how do retries work", "does the gateway retry failed requests"),
    ),
    Concept(
        ("timeouts", "a timeout", "deadlines", "time limits"),
        "Penstock has separate timeouts for connecting, for the first token, and for the time between "
        "tokens. Each has its own error, so that you know what went wrong.",
        "There is also a limit for the whole request, and one for clients that read too slowly.",
        r"first token|whole request",
        ("which timeouts are there", "how do timeouts work in Penstock",
         "what happens when the engine is too slow"),
    ),
    Concept(
        ("a request id", "the request id", "request ids", "tracing", "logs", "the completed line"),
        "Every request has an id that is on each answer and in the logs of both services. With it you can "
        "find where each millisecond of a request went.",
        "Each service writes one completed line for every request, however it ended. The two lines carry "
        "the same id.",
        r"\bid\b",
        ("what is the request id for", "how do I find out what happened to a request",
         "how can I trace a request", "what is in the logs", "how do I debug a slow request"),
    ),
    Concept(
        ("privacy", "privacy in Penstock", "the privacy of prompts", "data protection"),
        "Penstock writes no text of prompts or answers into logs, metrics or errors, unless an operator "
        "switches it on. The logs hold ids, counts and times.",
        "Prefix caches are salted for each tenant, so nobody can find out what others have asked.",
        r"logs|salted",
        ("are my prompts logged", "does Penstock store my prompts", "do you log my messages",
         "who can read my prompts", "is my data private", "do you save what I write"),
    ),
    Concept(
        ("the OpenAI API", "OpenAI compatibility", "the API", "Penstock's API", "the OpenAI SDK"),
        "Penstock speaks the OpenAI API. You can use any OpenAI client: set its base URL to your gateway, "
        "and give it your key.",
        "Chat completions, completions and the list of models are served, with and without streaming.",
        r"OpenAI|completions",
        ("is Penstock compatible with OpenAI", "which API does Penstock use", "how do I call Penstock",
         "can I use the OpenAI SDK", "how do I connect my client", "how do I send a request to Penstock",
         "which client do I need", "does Penstock work with the OpenAI client"),
    ),
    Concept(
        ("the supported models", "supported models", "model support", "the model families"),
        "Penstock's engine loads Llama, Qwen and Mistral models from Hugging Face directories. An "
        "architecture that it does not know is refused by name.",
        "The weights are read from safetensors files. Pickled files are never loaded, because they can "
        "run code.",
        r"Llama|safetensors",
        ("which models does Penstock support", "which models can I run", "can I use my own model",
         "how do I load another model", "can Penstock run Llama", "can I run Qwen with Penstock",
         "does Penstock support Mistral", "what models can Penstock serve", "how can I use a bigger model"),
    ),
    Concept(
        ("penstock up", "the command penstock up", "installing Penstock", "starting Penstock"),
        "The command penstock up starts the gateway and the engine on your machine. It prints a base URL "
        "and a key, and without further options it serves me, the demo model.",
        "With the option --model you give it a model directory, and it serves that model instead of me.",
        r"starts|--model",
        ("how do I start Penstock", "how do I run Penstock", "how can I try Penstock",
         "what does penstock up do", "which command starts Penstock", "how do I launch the server",
         "how do I get started", "how do I begin with Penstock"),
    ),
    Concept(
        ("preemption", "preempting a request", "preempted requests"),
        "Preemption means that a running request gives up its memory for one of a higher class. Later it "
        "goes on where it stopped, and its tokens are the same.",
        "The victims are chosen with care: stalled requests first, then the lowest class, then what is "
        "cheapest to restore.",
        r"memory|victims",
        ("what does preemption mean", "when is a request preempted", "what happens when the memory is full",
         "what happens if KV memory runs out"),
    ),
    Concept(
        ("priority", "priorities", "priority classes", "the service tier", "service classes"),
        "Requests come in three classes: priority, default and flex. A higher class has more weight, but "
        "waiting counts too, so that flex requests are served as well.",
        "The class comes from the service tier of the OpenAI API, and the policy of the tenant caps it.",
        r"class",
        ("how do priorities work", "which priority classes are there", "can I give a request priority"),
    ),
    Concept(
        ("the waiting queue", "the queue", "a full queue", "overload", "too much load"),
        "The waiting queue of the engine is bounded. When it is full, Penstock answers at once with "
        "status 503 and says when to try again, instead of letting you wait for nothing.",
        "A request that could never fit is refused at the door with status 400, and is not queued.",
        r"503|400",
        ("what happens when the queue is full", "what happens under overload", "why did I get a 503",
         "what does status 503 mean", "what if there are too many requests"),
    ),
    Concept(
        ("sampling", "temperature", "the temperature", "top-p", "top-k sampling"),
        "Sampling picks the next token from the probabilities of the model. A low temperature makes "
        "answers steady, a high one makes them lively, and zero always takes the most likely token.",
        "In Penstock sampling is keyed by seed and position. So an answer does not depend on who shares "
        "the batch.",
        r"next token|seed",
        ("what does temperature do", "how does sampling work", "what does the temperature setting mean",
         "how is the next token chosen"),
    ),
    Concept(
        ("a seed", "the seed", "reproducible answers", "determinism"),
        "With a seed, the same request gives the same answer again. Penstock keys the random choice by "
        "seed and position, so other requests in the batch do not matter.",
        "Tokens are the same alone, in a batch, in chunks, and after a pause. That is one of Penstock's "
        "laws.",
        r"same",
        ("how do I get the same answer twice", "what does the seed do", "are answers reproducible"),
    ),
    Concept(
        ("the hop", "HTTP/2", "the connection between gateway and engine", "the transport"),
        "Between gateway and engine there is one network hop. The design uses HTTP/2 for it, so that many "
        "streams share a connection and each has its own flow control.",
        "The engine also answers plain HTTP/1.1 on the same port. So curl can talk to it alone.",
        r"HTTP",
        ("how do gateway and engine talk to each other", "why does Penstock use HTTP/2",
         "which protocol connects gateway and engine"),
    ),
    Concept(
        ("metrics", "monitoring", "observability", "Server-Timing", "the stage times"),
        "Penstock measures every stage of a request. The same names appear in the logs, in the metrics "
        "and in the Server-Timing header.",
        "Both services have pages for probes and for metrics, so that operators see when something is wrong.",
        r"stage|probes",
        ("how do I monitor Penstock", "which metrics are there", "how do I see where time is spent",
         "how do I measure latency"),
    ),
    Concept(
        ("draining", "graceful shutdown", "shutdown", "stopping Penstock"),
        "On shutdown Penstock drains: it takes no new requests and lets the running ones finish, up to a "
        "limit. Then it stops.",
        "A service is starting, ready, draining or stopped. Its probes show which.",
        r"drain",
        ("how do I stop Penstock", "what happens on shutdown", "what happens to running requests on shutdown",
         "what does draining mean"),
    ),
    Concept(
        ("a large language model", "an LLM", "LLMs", "a language model", "language models",
         "large language models"),
        "A language model predicts the next token of a text, again and again, until the answer is "
        "complete. I am a very small one, and Penstock can serve much larger ones.",
        "It learns from example texts. A large one has billions of parameters, and I have only a few "
        "million.",
        r"next token|parameters",
        ("what does LLM mean", "what does LLM stand for", "how does a language model work",
         "what is a large language model for"),
    ),
    Concept(
        ("time to first token", "TTFT", "the first token", "latency"),
        "The time to first token is how long you wait until the answer begins. Penstock keeps it low by "
        "letting short prompts pass long ones, and by reusing cached prefixes.",
        "The other number that you feel is the time between tokens. Short steps keep it even.",
        r"answer begins|between tokens",
        ("what does TTFT mean", "how does Penstock keep latency low", "why does the first token take longer"),
    ),
    Concept(
        ("Penstock's users", "the users of Penstock", "the audience of Penstock"),
        "Penstock is for three kinds of people: developers who call models through an API, platform teams "
        "who install it, and operators who keep it running.",
        "A developer needs only a key and an OpenAI client. An operator needs a request id and a question.",
        r"developer",
        ("who is Penstock for", "who uses Penstock", "who should use Penstock", "who needs Penstock"),
    ),
    Concept(
        ("Redis", "Redis in Penstock", "the quota store"),
        "In production Penstock can keep its quotas in Redis, so that several gateways share them. For a "
        "single machine, quotas are kept in memory.",
        "If Redis is lost, a stated policy decides what happens. The limits are never silently multiplied.",
        r"quota|policy",
        ("why does Penstock use Redis", "where are quotas stored", "what happens if Redis is down",
         "do I need Redis"),
    ),
    Concept(
        ("hardware needs", "the hardware", "GPUs", "a GPU", "CPU support"),
        "Penstock's engine runs on a CPU or on a GPU. I am so small that a CPU is enough; large models "
        "need a GPU.",
        "The gateway never needs a GPU. It is installed without torch.",
        r"CPU|GPU",
        ("do I need a GPU", "can Penstock run on a CPU", "which hardware do I need",
         "does Penstock need a GPU", "can I run this on my laptop"),
    ),
    Concept(
        ("the programming language of Penstock", "Penstock's code", "the implementation of Penstock"),
        "Penstock is written in Python. The gateway builds on aiohttp, the engine on torch, and on a GPU "
        "it adds kernels in Triton.",
        "Only one floor of the engine touches torch. The scheduler and the gateway are plain Python, "
        "which makes them easy to read and to test.",
        r"Python",
        ("what is Penstock written in", "which programming language does Penstock use",
         "is Penstock written in Python", "in which language is Penstock programmed",
         "what libraries does Penstock use", "does Penstock use torch", "how is Penstock implemented",
         "which technologies does Penstock use"),
    ),
)  # fmt: skip
