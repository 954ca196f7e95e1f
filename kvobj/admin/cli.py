"""`kvobj-admin`: arguments in, exit status out. 0 on success, 1 when what was asked is not so, 2 on misuse.

This is the edge: only here are the arguments, the environment and the terminal touched.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from kvobj import __version__
from kvobj.admin import namespaces, offline, render
from kvobj.admin.access import DEFAULT_ENDPOINT, AccessFlags, find_access, find_credentials
from kvobj.admin.flush import flush
from kvobj.admin.output import Output, tell
from kvobj.admin.recall import recall, time_ms
from kvobj.admin.verify import verify
from kvobj.client import AdminClient, Endpoint, SignedConnection
from kvobj.errors import ConfigurationError, KvobjError

Command = Callable[[AdminClient, Output, argparse.Namespace], int]
AddCommand = Callable[[str, str], argparse.ArgumentParser]

_OFFLINE: Final = frozenset({"fsck", "rebuild"})
# A flush or the status of a busy store may take longer than a request's usual deadline.
_TIMEOUT_SECONDS: Final = 600.0
_REMOTE_RULES: Final = ("never", "reused", "evicted", "always")


def main(arguments: Sequence[str] | None = None, *, environment: Mapping[str, str] | None = None) -> int:
    """Run the command line; returns the exit status. `None`: the process's own arguments and environment."""
    options = parser().parse_args(arguments)
    environment = os.environ if environment is None else environment
    # Wide enough for any row where nobody looks at a terminal: a pipe must not get folded names.
    width = None if sys.stdout.isatty() else 1000
    output = Output(sys.stdout, sys.stderr, Console(file=sys.stdout, width=width), options.json)
    try:
        return _run(options, output, environment)
    except ConfigurationError as error:
        for problem in error.problems:
            output.complain(problem)
        return 2
    except KvobjError as error:
        output.complain(str(error))
        return 1
    except BrokenPipeError:  # `kvobj-admin ls … | head`: the reader has seen enough
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - so that the exit's flush finds a writer
        return 1
    except KeyboardInterrupt:
        return 1


def parser() -> argparse.ArgumentParser:
    """The command line's grammar. The global flags stand before the command or after it."""
    whole = argparse.ArgumentParser(prog="kvobj-admin", description="Look into a kvobj server, or a stopped store.")
    whole.add_argument("--version", action="version", version=f"kvobj-admin {__version__}")
    _add_global_flags(whole, is_default=True)
    shared = argparse.ArgumentParser(add_help=False)
    _add_global_flags(shared, is_default=False)
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, parents=[shared])

    command("status", "tiers, occupancy, hit ratios, rates")
    ls = command("ls", "list buckets, or the objects of one")
    ls.add_argument("bucket", nargs="?", metavar="BUCKET", help="default: the buckets themselves")
    ls.add_argument("key_prefix", nargs="?", default="", metavar="KEY_PREFIX", help="objects whose keys begin so")
    inspect = command("inspect", "one object: blobs, tiers, frames, digest")
    inspect.add_argument("bucket", metavar="BUCKET")
    inspect.add_argument("key", metavar="KEY")
    verify_ = command("verify", "hash every copy again, and replace a bad one from a good one")
    verify_.add_argument("bucket", nargs="?", metavar="BUCKET", help="default: all buckets")
    _add_flush_and_gc(command)
    _add_recall(command)
    command("credentials", "print the root user's keys as shell exports")
    _add_bucket_commands(command, shared)
    _add_user_commands(command, shared)
    _add_namespace_commands(command, shared)
    _add_offline_commands(command)
    return whole


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, shared: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    return actions.add_parser(name, help=text, description=text, parents=[shared])


def _name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def _add_flush_and_gc(command: AddCommand) -> None:
    flush_ = command("flush", "write down what is only in memory, and upload what waits for the remote tier")
    flush_.add_argument("--local", action="store_true", help="only write down, and upload nothing")
    flush_.add_argument(
        "--timeout",
        type=_seconds,
        default=_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="exit 1 where that is not enough (default: %(default).0f)",
    )
    gc = command("gc", "remove now what policy does not want in the home tier any more")
    gc.add_argument("--dry-run", action="store_true", help="list what would go and why, and change nothing")


def _add_recall(command: AddCommand) -> None:
    recall_ = command("recall", "remove every chunk of a writer, a namespace or a span of time, with all descendants")
    recall_.add_argument("--bucket", required=True, metavar="BUCKET", help="alone: every chunk of it")
    recall_.add_argument("--namespace", metavar="NAMESPACE", help="and of this namespace")
    recall_.add_argument("--writer", metavar="USER", help="and stored by this user")
    recall_.add_argument(
        "--from", dest="from_ms", type=time_ms, metavar="TIME", help="and stored at or after: 2026-01-31T08:00"
    )
    recall_.add_argument(
        "--to", dest="to_ms", type=time_ms, metavar="TIME", help="and stored before; UTC where no zone is given"
    )
    recall_.add_argument("--dry-run", action="store_true", help="only count what fits")


def _add_bucket_commands(command: AddCommand, shared: argparse.ArgumentParser) -> None:
    bucket = command("bucket", "create and set up buckets").add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    create = _action(bucket, "create", "create a bucket", shared)
    create.add_argument("name", metavar="NAME")
    create.add_argument(
        "--kind", choices=("ordinary", "kv"), default="ordinary", help="kv: immutable chunks; default: ordinary"
    )
    create.add_argument(
        "--durability", choices=("memory", "local", "shared"), help="default: memory for kv, local for ordinary"
    )
    create.add_argument("--remote", choices=_REMOTE_RULES, help="what else goes to the remote tier; default: never")
    create.add_argument("--codec", choices=("raw", "zp"), default="raw", help="on disk; default: raw")
    create.add_argument("--owner", metavar="USER", help="default: root")
    change = _action(bucket, "set", "change what of a bucket goes to the remote tier", shared)
    change.add_argument("name", metavar="NAME")
    change.add_argument("--remote", choices=_REMOTE_RULES, required=True)


def _add_user_commands(command: AddCommand, shared: argparse.ArgumentParser) -> None:
    user = command("user", "users beside the root user").add_subparsers(dest="action", required=True, metavar="ACTION")
    add = _action(user, "add", "add a user; keys that are not given are made and shown once", shared)
    add.add_argument("id", type=_name, metavar="ID")
    add.add_argument("--display-name", default="", metavar="NAME", help="default: the id")
    add.add_argument("--user-access-key", default="", metavar="KEY", help="the new user's; default: one is made")
    add.add_argument("--user-secret-key", default="", metavar="SECRET", help="the new user's; default: one is made")
    _action(user, "list", "list users", shared)
    remove = _action(user, "remove", "remove a user, whose buckets and objects stay", shared)
    remove.add_argument("id", type=_name, metavar="ID")


def _add_namespace_commands(command: AddCommand, shared: argparse.ArgumentParser) -> None:
    actions = command("namespace", "namespaces of KV buckets, and one from store to store").add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    for name, text in (
        ("list", "the namespaces of a bucket"),
        ("show", "one namespace: declaration, settings, usage"),
        ("export", "write one namespace with its key into a file that only you may read"),
        ("import", "declare a namespace with the key that another store exported"),
    ):
        action = actions.add_parser(name, help=text, description=text, parents=[shared])
        if name in ("show", "export"):
            action.add_argument("name", metavar="NAME")
        if name == "export":
            action.add_argument("--output", type=Path, metavar="FILE", help="default: NAME.namespace.json")
        if name == "import":
            action.add_argument("file", type=Path, metavar="FILE")
        action.add_argument("--bucket", required=True, metavar="BUCKET")


def _add_offline_commands(command: AddCommand) -> None:
    fsck = command("fsck", "check a stopped store")
    fsck.add_argument("--remote", action="store_true", help="against what lies on its remote tier")
    fsck.add_argument("--read", action="store_true", help="with --remote: download every blob and check it")
    rebuild = command("rebuild", "make a stopped store's catalog again")
    rebuild.add_argument("--remote", action="store_true", help="from the remote tier alone: the node was lost")
    rebuild.add_argument(
        "--replace", action="store_true", help="with --remote: in place of the data directory there is"
    )
    rebuild.add_argument(
        "--keep-missing",
        action="store_true",
        help="keep objects whose bytes are not there; without --remote: the disk with the segments is lost",
    )
    rebuild.add_argument(
        "--without-secrets",
        action="store_true",
        help="with --remote: leave out users and namespaces that the wrapping key does not open",
    )
    rebuild.add_argument(
        "--accept-unsigned",
        action="store_true",
        help="with --remote: believe manifests that are not signed under the wrapping key (older versions did not sign)",
    )
    rebuild.add_argument(
        "--accept-gaps",
        action="store_true",
        help="with --remote: go on without journals that are damaged or missing, and without what they told",
    )
    for parser_ in (fsck, rebuild):
        parser_.add_argument("--config", type=Path, metavar="FILE", help="the server's configuration")


def _offline(options: argparse.Namespace, output: Output, environment: Mapping[str, str]) -> int:
    if options.command == "fsck" and options.remote:
        return offline.fsck_remote(
            output, config=options.config, data=options.data, environment=environment, read=options.read
        )
    if options.command == "rebuild" and options.remote:
        return offline.rebuild_remote(
            output,
            config=options.config,
            data=options.data,
            environment=environment,
            replace=options.replace,
            keep_missing=options.keep_missing,
            without_secrets=options.without_secrets,
            accept_unsigned=options.accept_unsigned,
            accept_gaps=options.accept_gaps,
        )
    for flag in ("read", "replace", "without_secrets", "accept_unsigned", "accept_gaps"):
        if getattr(options, flag, False):
            raise ConfigurationError([f"--{flag.replace('_', '-')} is for --remote"])
    if options.command == "fsck":
        return offline.fsck(output, config=options.config, data=options.data, environment=environment)
    return offline.rebuild(
        output,
        config=options.config,
        data=options.data,
        environment=environment,
        keep_missing=options.keep_missing,
    )


def _add_global_flags(parser_: argparse.ArgumentParser, *, is_default: bool) -> None:
    # A subcommand's own default would overwrite what stood before the command: there, absent means absent.
    default = None if is_default else argparse.SUPPRESS
    flags = parser_.add_argument_group("access")
    flags.add_argument(
        "--endpoint",
        default=default,
        metavar="URL",
        help=f"admin port (default: what DIR/endpoints says; else, with keys that are not DIR's, {DEFAULT_ENDPOINT})",
    )
    flags.add_argument("--access-key", default=default, metavar="KEY", help="root's (or KVOBJ_ACCESS_KEY)")
    flags.add_argument(
        "--secret-key",
        default=default,
        metavar="SECRET",
        help="root's (better in KVOBJ_SECRET_KEY: others see arguments)",
    )
    flags.add_argument("--profile", default=default, metavar="NAME", help="a table of ~/.config/kvobj/profiles.toml")
    flags.add_argument(
        "--data",
        type=Path,
        default=default,
        metavar="DIR",
        help="data directory: the server's address and root's keys; the store of fsck and rebuild (default: ./kvobj-data)",
    )
    flags.add_argument(
        "--ca-bundle",
        type=Path,
        default=default,
        metavar="FILE",
        help="who signs an https endpoint's certificate (PEM)",
    )
    flags.add_argument(
        "--json",
        action="store_true",
        default=False if is_default else argparse.SUPPRESS,
        help="answer in JSON, in place of tables",
    )


def _run(options: argparse.Namespace, output: Output, environment: Mapping[str, str]) -> int:
    if options.command in _OFFLINE:
        return _offline(options, output, environment)
    if options.command == "credentials":
        return _credentials(output, options.data, environment)
    flags = AccessFlags(
        options.endpoint, options.access_key, options.secret_key, options.profile, options.data, options.ca_bundle
    )
    access = find_access(flags, environment)
    try:
        endpoint = Endpoint.parse(access.endpoint)
    except KvobjError as error:
        raise ConfigurationError([str(error)]) from error
    with SignedConnection(
        endpoint,
        access.credentials,
        region=access.region,
        timeout_seconds=_TIMEOUT_SECONDS,
        tls=access.tls_context() if endpoint.is_tls else None,
    ) as connection:
        return _command_of(options)(AdminClient(connection), output, options)


def _command_of(options: argparse.Namespace) -> Command:
    name = f"{options.command} {options.action}" if "action" in options else options.command
    commands: dict[str, Command] = {
        "status": _status,
        "ls": _list,
        "inspect": _inspect,
        "verify": _verify,
        "flush": _flush,
        "gc": _gc,
        "recall": _recall,
        "bucket create": _create_bucket,
        "bucket set": _set_bucket,
        "namespace list": lambda client, output, given: namespaces.list_namespaces(client, output, given.bucket),
        "namespace show": lambda client, output, given: namespaces.show(client, output, given.bucket, given.name),
        "namespace export": lambda client, output, given: namespaces.export(
            client, output, given.bucket, given.name, given.output
        ),
        "namespace import": lambda client, output, given: namespaces.import_(client, output, given.bucket, given.file),
        "user add": _add_user,
        "user list": _list_users,
        "user remove": _remove_user,
    }
    return commands[name]


def _status(client: AdminClient, output: Output, _options: argparse.Namespace) -> int:
    status = client.status()
    output.show(status, lambda console: render.print_status(console, status))
    return 0


def _list(client: AdminClient, output: Output, options: argparse.Namespace) -> int:
    if options.bucket is None:
        buckets = client.buckets()
        output.show({"buckets": buckets}, lambda console: render.print_buckets(console, buckets))
        return 0
    objects = client.objects(options.bucket, options.key_prefix)
    if output.is_json:
        for row in objects:  # a line an object: a bucket may hold more than a program wants to read at once
            output.show(row, lambda _console: None)
        return 0
    render.print_objects(output.console, objects)
    return 0


def _inspect(client: AdminClient, output: Output, options: argparse.Namespace) -> int:
    inspection = client.inspect(options.bucket, options.key)
    output.show(inspection, lambda console: render.print_inspection(console, inspection))
    return 0


def _verify(client: AdminClient, output: Output, options: argparse.Namespace) -> int:
    return verify(client, output, bucket=options.bucket, wait=time.sleep)


def _flush(client: AdminClient, output: Output, options: argparse.Namespace) -> int:
    return flush(client, output, local=options.local, timeout_seconds=options.timeout, monotonic=time.monotonic)


def _gc(client: AdminClient, output: Output, options: argparse.Namespace) -> int:
    if options.dry_run:
        plan = client.gc_plan()
        output.show(plan, lambda console: render.print_gc_plan(console, plan))
        return 0
    report = client.collect()
    output.show(report, lambda console: render.print_gc_report(console, report))
    return 0


def _recall(client: AdminClient, output: Output, options: argparse.Namespace) -> int:
    if options.from_ms is not None and options.to_ms is not None and options.from_ms >= options.to_ms:
        raise ConfigurationError(["--from and --to: nothing is stored at or after the one and before the other"])
    return recall(
        client,
        output,
        bucket=options.bucket,
        namespace=options.namespace,
        writer=options.writer,
        from_ms=options.from_ms,
        to_ms=options.to_ms,
        dry_run=options.dry_run,
        wait=time.sleep,
    )


def _create_bucket(client: AdminClient, output: Output, options: argparse.Namespace) -> int:
    bucket = client.create_bucket(
        options.name,
        kind=options.kind,
        durability=options.durability,
        codec=options.codec,
        owner=options.owner,
        remote=options.remote,
    )
    output.show(bucket, lambda console: render.print_values(console, "bucket", bucket))
    return 0


def _set_bucket(client: AdminClient, output: Output, options: argparse.Namespace) -> int:
    bucket = client.set_remote_rule(options.name, options.remote)
    output.show(bucket, lambda console: render.print_values(console, "bucket", bucket))
    return 0


def _add_user(client: AdminClient, output: Output, options: argparse.Namespace) -> int:
    user = client.add_user(
        options.id,
        display_name=options.display_name,
        access_key=options.user_access_key,
        secret_key=options.user_secret_key,
    )
    output.show(user, lambda console: render.print_values(console, "user", user))
    return 0


def _list_users(client: AdminClient, output: Output, _options: argparse.Namespace) -> int:
    users = client.users()
    output.show({"users": users}, lambda console: render.print_users(console, users))
    return 0


def _remove_user(client: AdminClient, output: Output, options: argparse.Namespace) -> int:
    removed = client.remove_user(options.id)
    output.show(removed, lambda console: tell(console, f"removed {options.id}"))
    return 0


def _credentials(output: Output, data: Path | None, environment: Mapping[str, str]) -> int:
    credentials = find_credentials(data, environment)
    keys = {"access_key": credentials.access_key, "secret_key": credentials.secret_key}
    lines = [
        f"export AWS_ACCESS_KEY_ID={shlex.quote(credentials.access_key)}",
        f"export AWS_SECRET_ACCESS_KEY={shlex.quote(credentials.secret_key)}",
    ]
    output.show(keys, lambda console: console.out("\n".join(lines), highlight=False))  # as they are: a shell reads them
    return 0
