"""`kvobj serve`: reads the configuration and starts the server. Names and exits are fixed (design §12).

Exits 0 after a clean stop, 1 when the store could not run, 2 for a configuration that cannot be used (every problem
on a line of its own), for misuse, and where only the client is installed. This is the edge: only here are the environment
and the arguments read.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvobj import __version__
from kvobj.announcement import announcement
from kvobj.config import Settings, example_text, load_settings
from kvobj.errors import ConfigurationError, KvobjError
from kvobj.extras import server_missing

__all__ = ["announcement", "main"]


def main(arguments: Sequence[str] | None = None, *, environment: Mapping[str, str] | None = None) -> int:
    """Run the command line; returns the exit status. `None`: the process's own arguments and environment."""
    options = _parser().parse_args(arguments)
    if options.command == "example-config":
        sys.stdout.write(example_text())
        return 0
    try:
        environment = os.environ if environment is None else environment
        settings = load_settings(options.config, environment=environment, data=options.data, listen=options.listen)
        if options.check:
            return _check(settings)
        if options.hold_sockets:
            return _hold(settings, options, environment)
        return _run(settings, environment)
    except ConfigurationError as error:
        sys.stderr.write("kvobj: this configuration cannot be used:\n")
        sys.stderr.writelines(f"  {problem}\n" for problem in error.problems)
        return 2
    except KvobjError as error:
        sys.stderr.write(f"kvobj: {error}\n")
        return 1


def _run(settings: Settings, environment: Mapping[str, str]) -> int:
    # The server's modules and a start's objects all stay: collections that walk them again and again took a seventh of the
    # former's time and a third of the latter's. `serve` lets them run again.
    gc.disable()
    try:
        # Imported here, so that a wrong configuration is told at once and `--help` does not load the server.
        from kvobj.app.serve import run  # noqa: PLC0415 - see above

        return run(settings, environment)
    except ModuleNotFoundError as error:
        return _not_installed(error)
    finally:
        gc.enable()


def _check(settings: Settings) -> int:
    try:
        from kvobj.app.serve import check  # noqa: PLC0415 - see above
    except ModuleNotFoundError as error:
        return _not_installed(error)
    check(settings)
    sys.stdout.write("kvobj: this configuration can be used\n")
    return 0


def _hold(settings: Settings, options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    try:
        from kvobj.app.holder import hold  # noqa: PLC0415 - see above
    except ModuleNotFoundError as error:
        return _not_installed(error)
    command = [sys.executable, "-m", "kvobj", "serve"]
    for option, value in (("--config", options.config), ("--data", options.data), ("--listen", options.listen)):
        if value is not None:
            command += [option, str(value)]
    return hold(settings, command, environment)


def _not_installed(error: ModuleNotFoundError) -> int:
    sys.stderr.write(f"kvobj: {server_missing(error)}\n")
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvobj", description="A tiered object store for KV-cache chunks (S3 API).")
    parser.add_argument("--version", action="version", version=f"kvobj {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run the server", description="Run the server until SIGTERM.")
    serve.add_argument("--config", type=Path, metavar="FILE", help="TOML configuration (default: the embedded default)")
    serve.add_argument("--data", metavar="DIR", help="data directory (default: ./kvobj-data)")
    serve.add_argument("--listen", metavar="HOST:PORT", help="address of the S3 API (default: 127.0.0.1:9000)")
    serve.add_argument(
        "--hold-sockets",
        action="store_true",
        help="start the server as a child, and again whenever it ends; clients that connect meanwhile wait",
    )
    serve.add_argument(
        "--check", action="store_true", help="say whether the configuration can be used, and start nothing"
    )
    commands.add_parser("example-config", help="print the annotated example configuration")
    return parser
