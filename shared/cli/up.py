"""The command `penstock up`: engines and a gateway with embedded defaults, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

from msgspec import Meta

from shared.cli import admin, running
from shared.cli.restarts import raise_first_death
from shared.cli.running import DataDir, Keys, Running
from shared.cli.service import command, missing_extra, reach
from shared.cli.supervisor import RunningService, ServiceDied, ServiceSpec, parse_line, stop_all, unless
from shared.process.arguments import Parser, cannot_listen, checked, closest, spelt
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.environment import settings_in, unread_in
from shared.process.lifecycle import on_stop_signals
from shared.process.setting_values import ConfigError, to_toml
from shared.process.settings import ModelName, Port, Text
from shared.process.tls import UnusableTls, names_of

DEMO_NAME: Final = "demo"
DRAIN_S: Final = 20.0
"""The drain time in seconds, unless an option or a variable sets it: a development server does not keep its
user waiting longer."""
OWN_HOST: Final = "127.0.0.1"
PORT_LAST: Final = 65_535
ENDING_S: Final = 10.0
"""The time in which a child must stop after its drain, in seconds; then it is killed."""
ENGINE_START_S: Final = 24 * 3600.0
"""The time in which the engine must be ready, in seconds: a download may take long. Once it is done the
engine's own limit counts (--startup-timeout-s)."""
GATEWAY_START_S: Final = 60.0
REDIS_S: Final = 1.0
"""The time for a connection to Redis, in seconds."""
REPLICAS_MAX: Final = 16
Replicas = Annotated[int, Meta(ge=1, le=REPLICAS_MAX)]

_OURS: Final = frozenset(
    {
        "--help",
        "--config",
        "--model",
        "--served-model-name",
        "--host",
        "--port",
        "--tls-cert",
        "--tls-key",
        "--tls-client-ca",
    }
)
"""Options of the engine that `up` sets itself, or that its engine, on loopback, has no use for."""
_NOT_FROM_ENVIRONMENT: Final = {
    "PENSTOCK_ENGINE_": ("HOST", "PORT", "TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA"),
    "PENSTOCK_GATEWAY_": ("LISTEN", "MODELS", "TENANTS", "KEYS"),
}
"""Variables, and beginnings of variables, that would undo what `up` arranges, by the service's prefix."""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "up",
        help="start an engine and a gateway, ready to be used",
        description="Start an engine and a gateway on this machine, with defaults for everything.",
        epilog="The engine's options work here too (--dtype, ...): see penstock engine --help.",
    )
    parser.add_argument(
        "--model",
        type=spelt(Text),
        default=os.environ.get("PENSTOCK_ENGINE_MODEL") or None,
        metavar="DIR|ID",
        help="model directory, or hub id to download (default: the built-in demo model)",
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        type=spelt(ModelName),
        default=os.environ.get("PENSTOCK_ENGINE_SERVED_MODEL_NAME") or None,
        help="what clients call the model (default: the last part of --model)",
    )
    parser.add_argument(
        "--replicas", metavar="N", type=spelt(Replicas), default=1,
        help=f"engines behind the gateway, all with the same model (1 to {REPLICAS_MAX}, default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--alias", metavar="NAME", nargs="+", action="extend", default=[], type=spelt(ModelName),
        help="further names that the model answers to; * is any name",
    )  # fmt: skip
    parser.add_argument(
        "--api-key", metavar="KEY", type=checked(_key_problem, is_secret=True),
        default=os.environ.get(running.KEY_VARIABLE) or None,
        help=f"development key, any string (default: ${running.KEY_VARIABLE}, or the one of the last time)",
    )  # fmt: skip
    _add_addresses(parser)
    parser.add_argument(
        "--data-dir", type=_directory, metavar="DIR",
        help="where keys, usage and logs are kept for the next time (default: a directory of the port's own, "
        "named at the start; with --port 0, one for this time alone)",
    )  # fmt: skip
    parser.add_argument("--log-dir", type=_renamed, help=argparse.SUPPRESS)
    parser.set_defaults(run=run, takes_more=True, parser=parser)


def _add_addresses(parser: Parser) -> None:
    """Where the gateway listens, and which Redis it asks."""
    parser.add_argument(
        "--host", type=spelt(Text), default="127.0.0.1", help="address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=spelt(Port), default=8000, help="port to listen on; 0 for any free one (default: 8000)"
    )
    parser.add_argument(
        "--admin-port", type=spelt(Port), metavar="PORT",
        help="port of the console, on this machine alone; 0 for any free one (default: --port and 1)",
    )  # fmt: skip
    tls = parser.add_mutually_exclusive_group()
    tls.add_argument("--tls-cert", metavar="FILE", type=spelt(Text), help="certificate chain, for https; PEM")
    parser.add_argument("--tls-key", metavar="FILE", type=spelt(Text), help="its private key, PEM")
    tls.add_argument(
        "--plaintext", action="store_true",
        help="serve plain text to other machines, where --host lets them in: keys and prompts can be read",
    )  # fmt: skip
    parser.add_argument(
        "--redis", metavar="URL", type=checked(_redis_problem, is_secret=True),
        help="where quotas and keys are kept, such as redis://127.0.0.1:6379 (default: memory, and a file)",
    )  # fmt: skip


def _directory(text: str) -> Path:
    return Path(spelt(Text)(text))


def _renamed(_: str) -> Path:
    raise argparse.ArgumentTypeError("it is called --data-dir now: logs are in it, beside keys and usage")


def _key_problem(key: str) -> str | None:
    problem: str | None = reach("gateway.identity.keys").key_problem(key)
    return problem


def _redis_problem(url: str) -> str | None:
    try:
        reach("gateway.config.redis").redis_hosts(url)
    except ValueError as error:
        return str(error)
    return None


def run(options: argparse.Namespace) -> int:
    for service in ("engine", "gateway"):
        if problem := missing_extra(service):
            return _fail(problem)
    check_listener(options.parser, options)
    check_environment(options.parser, os.environ)
    check_engine_options(options.parser, options.more, os.environ)
    if options.redis and (problem := unreachable(reach("gateway.config.redis").redis_hosts(options.redis))):
        return _fail(problem)
    with ExitStack() as held:
        return _run(options, held)


def _run(options: argparse.Namespace, held: ExitStack) -> int:
    try:
        plan = make_plan(options, running.data_dir(options.data_dir, options.port), held)
    except ConfigError as error:  # a variable is wrong: all options were checked before
        options.parser.error(str(error))
    except (OSError, UnusableTls) as error:
        return _fail(str(error))
    return asyncio.run(supervise(plan, sys.stdout))


def check_listener(parser: Parser, options: argparse.Namespace) -> None:
    """Exit with an error if other machines would be served plain text without a word, or half of TLS."""
    if (options.tls_cert is None) != (options.tls_key is None):
        parser.error("--tls-cert and --tls-key belong together")
    is_ours = reach("gateway.config.edge").is_loopback(options.host)
    if options.tls_cert is None and not (is_ours or options.plaintext):
        parser.error(
            f"--host {options.host} is reached from other machines: give --tls-cert and --tls-key, or "
            "--plaintext, with which keys and prompts can be read on the way"
        )


def check_environment(parser: Parser, env: Mapping[str, str]) -> None:
    """Exit with an error if a variable is set that is for a service that stands alone, and name those that
    nothing reads."""
    for prefix, beginnings in _NOT_FROM_ENVIRONMENT.items():
        for name in settings_in(env, prefix):
            if name.startswith(beginnings):
                parser.error(
                    f"{prefix}{name} is for a service that stands alone; unset it, and see --host, --port, "
                    "--tls-cert, --api-key and --alias"
                )
    if (key := env.get(admin.KEY_VARIABLE)) and (problem := _key_problem(key)):
        parser.error(f"${admin.KEY_VARIABLE} {problem}")
    for name in unread_in(env, env.values()):
        sys.stderr.write(f"penstock up: {name}: nothing reads it; see penstock up --help\n")


def check_engine_options(parser: Parser, more: Sequence[str], env: Mapping[str, str]) -> None:
    """Exit with an error if the engine's own parser refuses the options that `up` does not know."""
    engine = reach("engine.config").build_parser("penstock up")
    names = {name for name in engine._option_string_actions if name.startswith("--")} - _OURS
    for word in more:
        name = word.partition("=")[0]
        if name.startswith("-") and name not in names:
            if name in engine.gone:
                parser.error(f"{name} is {engine.gone[name]}")
            hint = closest(name, [*parser.option_names, *sorted(names)])
            parser.error(f"there is no option {name}" + (f"; did you mean {hint}?" if hint else ""))
    if strays := engine.parse_known_args(more)[1]:
        parser.error(f"{' '.join(strays)} belongs to no option")
    _engine_drain_s(more, env)


def unreachable(hosts: Sequence[tuple[str, int]]) -> str | None:
    """The problem where nobody listens at any of these addresses; None where somebody does."""
    problem = None
    for host, port in hosts:
        try:
            socket.create_connection((host, port), REDIS_S).close()
        except OSError as error:
            problem = f"--redis: nothing answers at {host}:{port}: {error.strerror or error}"
        else:
            return None
    return problem


def _drain_options(env: Mapping[str, str]) -> list[str]:
    """The engine's option for the drain time; empty when a variable sets it, which the option would
    override."""
    is_set = "DRAIN_TIMEOUT_S" in settings_in(env, reach("engine.config").ENV_PREFIX)
    return [] if is_set else ["--drain-timeout-s", str(DRAIN_S)]


def _engine_drain_s(more: Sequence[str], env: Mapping[str, str]) -> float:
    """The engine's drain time with these options, in seconds. Exits with an error when they are wrong."""
    config = reach("engine.config")
    argv = ["--model", "any", *_drain_options(env), *more]
    drain_s: float = config.from_args(argv, env, config.build_parser("penstock up")).drain_timeout_s
    return drain_s


def _fail(problem: str) -> int:
    sys.stderr.write(f"penstock up: {problem}\n")
    return 1


# -- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartPlan:
    """A complete plan: everything is decided, nothing is started."""

    services: tuple[ServiceSpec, ...]
    """The services in the order of starting: each is ready before the next is started."""
    running: Running
    data: DataDir
    grace_s: float = DRAIN_S + ENDING_S
    """The time in which a service must stop: its drain, and `ENDING_S`."""
    aliases: tuple[str, ...] = ()
    certificate_names: tuple[str, ...] = ()
    """The names that the certificate is for; empty without a certificate."""
    remarks: tuple[str, ...] = ()
    """Remarks on the start, for the user."""


def make_plan(options: argparse.Namespace, data: DataDir, held: ExitStack) -> StartPlan:
    """Choose ports, which are `held` for the services that are to listen there, and write the gateway's file
    with what it had the last time. Raises OSError, UnusableTls and ConfigError."""
    model, name = _model_and_name(options.model, options.served_model_name)
    tls = _tls(options.tls_cert, options.tls_key)
    certificate_names = names_of(*tls) if tls is not None else ()
    gateway_port = _hold_port(held, options.host, options.port)
    admin_port, remarks = _admin_port(held, options.admin_port, gateway_port)
    api_key, admin_key = _keys(options.api_key, data)
    config = data.path / "gateway.toml"
    kept, lost = _kept(config)
    engine_urls = [f"http://{OWN_HOST}:{_hold_port(held, OWN_HOST, 0)}" for _ in range(options.replicas)]
    gateway_config = reach("gateway.directory.development").development_config(
        host=options.host,
        port=gateway_port,
        key=api_key,
        model=name,
        aliases=options.alias,
        engine_url=engine_urls[0],
        more_engine_urls=engine_urls[1:],
        tls=tls,
        plaintext=options.plaintext,
        redis=options.redis,
        drain_s=DRAIN_S,
        admin=(admin_port, admin_key),
        billing_file=None if options.redis else str(data.path / "usage.jsonl"),
        kept=kept,
    )
    running.write_private(config, f"# Written by `penstock up`.\n{to_toml(gateway_config)}".encode())
    engine_options = ["--model", model, "--served-model-name", name, "--host", "127.0.0.1"]
    last_options = [*_drain_options(os.environ), *options.more]
    loaded = reach("gateway.config.whole").load(config, os.environ)
    admin_url = _admin_url(loaded.admin)
    scheme, cert = ("http", None) if tls is None else ("https", tls[0])
    base_url = f"{scheme}://{_reachable(options.host, certificate_names)}:{gateway_port}"
    url, log = f"{base_url}/v1", data.path / "gateway.log"
    gateway_argv = tuple(command("gateway", ["--config", str(config)]))
    return StartPlan(
        services=(
            *_engines(engine_urls, engine_options, last_options, data.path),
            ServiceSpec("gateway", gateway_argv, log, base_url, GATEWAY_START_S, cert),
        ),
        running=Running(url, api_key, name, os.getpid(), cert, str(config), admin_url, admin_key),
        data=data,
        grace_s=max(loaded.timeouts.drain_s, _engine_drain_s(options.more, os.environ)) + ENDING_S,
        certificate_names=certificate_names,
        aliases=tuple(options.alias),
        remarks=(*remarks, *lost),
    )


def _admin_url(own: Any) -> str:
    return f"{'http' if own.tls is None else 'https'}://{_reachable(own.host)}:{own.port}"


def _keys(api_key: str | None, data: DataDir) -> tuple[str, str]:
    """The development key and the operator's: those that were asked for, those of the last time, or new ones,
    which are kept for the next."""
    new = reach("gateway.directory.development").development_key
    api, operators = data.keys.api or new(), data.keys.admin or new()
    data.keep(Keys(api, operators))
    return api_key or api, os.environ.get(admin.KEY_VARIABLE) or operators


def _kept(config: Path) -> tuple[Any, tuple[str, ...]]:
    """The content of the gateway's file from the last time, None at first, and remarks on it."""
    if not config.exists():
        return None, ()
    try:
        return reach("gateway.config.whole").load(config, {}), ()
    except ConfigError:
        old = config.replace(config.with_suffix(".old.toml"))
        return None, (f"{config} could not be read; what it had is in {old.name}",)


def _admin_port(held: ExitStack, wanted: int | None, gateway_port: int) -> tuple[int, tuple[str, ...]]:
    """The console's port, and what is to be said of it. Raises OSError where the one that was asked for is
    taken."""
    if wanted is not None:
        return _hold_port(held, OWN_HOST, wanted), ()
    usual = min(gateway_port + 1, PORT_LAST)  # which is taken then
    try:
        return _hold_port(held, OWN_HOST, usual), ()
    except OSError:
        port = _hold_port(held, OWN_HOST, 0)
        return port, (f"Port {usual} is taken: the console is at {port}. See --admin-port",)


def _engines(
    urls: Sequence[str], options: Sequence[str], last_options: Sequence[str], folder: Path
) -> Iterator[ServiceSpec]:
    """The engines, one at each URL. Several are numbered, and started again when they end."""
    for number, url in enumerate(urls):
        name = "engine" if len(urls) == 1 else f"engine-{number}"
        argv = command("engine", [*options, "--port", url.rpartition(":")[2], *last_options])
        log, restarts = folder / f"{name}.log", len(urls) > 1
        yield ServiceSpec(name, tuple(argv), log, url, ENGINE_START_S, restarts=restarts)


def _model_and_name(model: str | None, name: str | None) -> tuple[str, str]:
    if model is None:
        return str(reach("engine.demo").MODEL_DIR), name or DEMO_NAME
    return model, name or reach("engine.config").served_name(model)


def _hold_port(held: ExitStack, host: str, wanted: int) -> int:
    """Hold a port that can be listened on: the wanted one, or for 0 any. Raises OSError. A service can listen
    there: this socket does not, and lets others that say so bind the same address (`SO_REUSEADDR`)."""
    probe = held.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host, wanted))
    except OSError as error:
        raise OSError(cannot_listen(host, wanted, error)) from error
    bound: int = probe.getsockname()[1]
    return bound


def _tls(cert: str | None, key: str | None) -> tuple[str, str] | None:
    """The absolute paths of a certificate chain and its key, because `penstock chat` reads the certificate
    from another directory. None without them."""
    return (os.path.abspath(cert), os.path.abspath(key)) if cert and key else None


def _reachable(host: str, certificate_names: Sequence[str] = ()) -> str:
    """This machine's name in a URL for a local client: `localhost` when the certificate is for that name
    alone."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    if host not in certificate_names and "localhost" in certificate_names and host in ("127.0.0.1", "::1"):
        return "localhost"
    return f"[{host}]" if ":" in host else host


# -- the run --------------------------------------------------------------------------------------


async def supervise(plan: StartPlan, out: TextIO, clock: Clock = SYSTEM_CLOCK) -> int:
    """Start the services, announce them, wait for a signal or a failure, and stop them. Returns the exit
    code."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    on_stop_signals(lambda _: (hurry if stop.is_set() else stop).set())
    services: list[RunningService] = []
    progress = StartProgress(out, clock)
    try:
        progress.say(_about_data(plan.data))
        for remark in plan.remarks:
            progress.say(remark)
        for spec in plan.services:
            progress.begin(spec.name, "starting")
            services.append(await RunningService.start(spec, clock))
            if not await unless(stop, services[-1].ready(progress.follow)):
                break
            progress.end()
        else:
            progress.say(announcement(plan, clock.monotonic() - progress.started_s))
            _announce_to_chat(plan)
            await unless(stop, raise_first_death(services, progress.say, clock))
        progress.say("Stopping. Ctrl-C again stops at once.")
    except (ServiceDied, OSError) as error:
        progress.say(f"penstock up: {error}\nThe logs are in {plan.data.path}")
        return 1
    finally:
        running.clear_running(plan.running)
        await stop_all(services, plan.grace_s, hurry)
    return 0


def _announce_to_chat(plan: StartPlan) -> None:
    try:
        running.write_running(plan.running)
    except (OSError, RuntimeError):
        return  # `penstock chat` then needs its options; nothing else depends on the file


class StartProgress:
    """The output about the stage of the start that runs, and its time: `engine   warming up ... 1.2 s`."""

    def __init__(self, out: TextIO, clock: Clock) -> None:
        self._out = out
        self._clock = clock
        self._name = ""
        self._began_s: float | None = None
        self.started_s = clock.monotonic()

    def begin(self, name: str, stage: str) -> None:
        self.end()
        self._name = name
        self._began_s = self._clock.monotonic()
        self._out.write(f"{name:8} {stage} ... ")
        self._out.flush()

    def end(self) -> None:
        if self._began_s is not None:
            self._out.write(f"{self._clock.monotonic() - self._began_s:.1f} s\n")
            self._out.flush()
            self._began_s = None

    def say(self, text: str) -> None:
        if self._began_s is not None:  # the stage did not end
            self._out.write("\n")
            self._began_s = None
        self._out.write(text + "\n")
        self._out.flush()

    def follow(self, line: str) -> None:
        """Show the stage in a log line of the service that starts, if the line begins one."""
        stage = stage_of(parse_line(line))
        if stage is not None:
            self.begin(self._name, stage)


def stage_of(fields: dict[str, Any] | None) -> str | None:
    """The stage of a service's start that this log line begins; None for any other line."""
    match fields:
        case {"event": "engine.listening"}:
            return "finding the model"
        case {"event": "engine.model"}:
            return "starting the core"
        case {"event": "core.progress", "stage": str(stage)}:
            return stage
    return None


def announcement(plan: StartPlan, seconds: float) -> str:
    """The text that says how to use the services."""
    url, key, model = plan.running.url, plan.running.key, plan.running.model
    body = json.dumps(
        {"model": model, "stream": True, "messages": [{"role": "user", "content": "What is a penstock?"}]},
        ensure_ascii=False,
    )
    stopped = "both" if len(plan.services) == 2 else "all"
    also = f"   (also as {', '.join(plan.aliases)})" if plan.aliases else ""
    return f"""
Ready after {seconds:.1f} s.

  Base URL   {url}
  API key    {key}
  Model      {model}{also}{_about_engines(plan)}{_about_console(plan)}

{_about_certificate(plan)}Stream an answer:

  curl -N {url}/chat/completions -H {shlex.quote(f"Authorization: Bearer {key}")} \\
    -H 'Content-Type: application/json' -d {shlex.quote(body)}

With the OpenAI SDK:

  from openai import OpenAI
  client = OpenAI(base_url={url!r}, api_key={key!r})
  answer = client.chat.completions.create(
      model={model!r}, messages=[{{"role": "user", "content": "What is a penstock?"}}])
  print(answer.choices[0].message.content)

In another terminal: {_penstock()} chat. Ctrl-C here stops {stopped} services.
"""


def _about_data(data: DataDir) -> str:
    if data.is_kept:
        return f"Keys, usage and logs are in {data.path}"
    return f"Keys, usage and logs are in {data.path}, for this time alone; see --data-dir"


def _about_engines(plan: StartPlan) -> str:
    engines = len(plan.services) - 1
    return "" if engines == 1 else f"\n  Engines    {engines}"


def _about_console(plan: StartPlan) -> str:
    url, key = plan.running.admin_url, plan.running.admin_key
    return "" if url is None else f"\n  Console    {url}/console\n  Admin key  {key}"


def _about_certificate(plan: StartPlan) -> str:
    if plan.running.cert is None:
        return ""
    names = ", ".join(plan.certificate_names) or "no name"
    return f"""\
The certificate is for {names}. Clients that do not know its authority need that authority's own
certificate: --cacert FILE for curl, SSL_CERT_FILE=FILE for the OpenAI SDK.

"""


def _penstock() -> str:
    """The command that starts this program in another terminal, where the environment may not be active."""
    if shutil.which("penstock"):
        return "penstock"
    return shlex.quote(str(Path(sys.executable).with_name("penstock")))
