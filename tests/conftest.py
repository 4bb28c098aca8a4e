"""Guards each test run, groups its tests for xdist, skips what the machine lacks, and prints seconds per package.

A skip names the command that installs what is missing. In CI it is a failure.
"""

import compileall
import importlib.util
import itertools
import os
import re
import resource
import shutil
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

import guard
import warm

GET = {
    "chromium": "apt-get install chromium",
    "ip": "apt-get install iproute2, and run as root",
    "bindfs": "apt-get install bindfs, and run as root",
    "mount": "run as root, where mounting a tmpfs is allowed",
    "g++": "apt-get install g++",
    "openssl": "apt-get install openssl",
    "py-spy": "pip install py-spy",
    "mkfs.btrfs": "apt-get install btrfs-progs, and run as root",
    "strace": "apt-get install strace, and run where tracing is allowed",
    **dict.fromkeys(
        ("scontrol", "slurmctld", "slurmd", "munged"), "apt-get install slurm-client slurmctld slurmd munge"
    ),
}
FRAMEWORKS = "pip install -c constraints.txt -e '.[frameworks]'"
GET_PACKAGE = {"torchrec": "pip install -c constraints.txt -e '.[rec]', then pip install --no-deps torchrec==1.8.0"}
SLOWEST = 10
_CPU_S = pytest.StashKey[float]()


# The same examples in every run, so that none fails by chance; a sweep draws others, and many more.
hypothesis.settings.register_profile("tests", max_examples=60, derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("sweep", max_examples=1000, deadline=None, database=None)
hypothesis.settings.load_profile("sweep" if "SEED" in os.environ else "tests")


def pytest_configure(config: pytest.Config) -> None:
    sys.dont_write_bytecode = False  # otherwise each worker rewrites the assertions of all tests again
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(__file__).parent.parent / "src", quiet=1)
        # What tests start writes none: a module written twice within a second would be run as it was at first.
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        guard.continue_in_a_guarded_child()


# --- order and groups ------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that share an expensive fixture to one worker, and start what takes longest first."""
    for item in items:
        if name := _group_of(item):
            item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: (item.get_closest_marker("xdist_group") is None, not _is_thorough(item)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse versions of pytest and xdist that ignore groups: each worker would start its own Slurm."""
    if session.config.getoption("dist", "no") == "loadgroup" and hasattr(session.config, "workerinput"):
        lost = [
            each.nodeid for each in session.items if each.get_closest_marker("xdist_group") and "@" not in each.nodeid
        ]
        if lost:
            raise pytest.UsageError(f"pytest-xdist ignores groups with pytest {pytest.__version__}: {lost[0]}")


def _group_of(item: pytest.Item) -> str | None:
    """The worker group of a test that uses Slurm or a fixture made once per file; None if any worker may run it."""
    fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    if "slurm" in fixtures:
        return "slurm"
    is_shared = any(definitions[-1].scope == "module" for definitions in fixtures.values())
    return item.nodeid.partition("::")[0] if is_shared else None


def _is_thorough(item: pytest.Item) -> bool:
    return item.get_closest_marker("thorough") is not None


# --- what is missing -------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_CPU_S] = _cpu_s()
    for mark in item.iter_markers("needs"):
        for program in mark.args:
            if shutil.which(program) is None and shutil.which(program, path=os.path.dirname(sys.executable)) is None:
                pytest.skip(f"needs {program}: {GET.get(program, 'install it')}")
    for mark in item.iter_markers("needs_package"):
        for package in mark.args:
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"needs {package}: {GET_PACKAGE.get(package, FRAMEWORKS)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    report = yield
    if report.skipped and os.environ.get("SKIP_IS_FAILURE") == "1" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which counts as a failure here: {report.longrepr}"
    if call.when == "teardown":  # junit takes what this report has, and no other
        report.user_properties.append(("cpu_s", _cpu_s() - item.stash[_CPU_S]))
        if item.get_closest_marker("hypothesis"):
            own = getattr(getattr(item, "obj", None), "_hypothesis_internal_use_settings", hypothesis.settings.default)
            report.user_properties.append(("examples", own.max_examples))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a test as soon as it has failed: the whole run takes minutes."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when})", file=sys.stderr, flush=True)


# --- seconds per package ---------------------------------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how long each package and the slowest tests took."""
    spent: dict[str, Spent] = defaultdict(Spent)
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            spent[re.sub(r"@(slurm|tests/\S+\.py)$", "", report.nodeid)].add(report)
    packages: dict[str, list[Spent]] = defaultdict(list)
    for test, each in spent.items():
        folders = Path(test.partition("::")[0]).parts[1:-1]
        packages[folders[0] if folders else "tests"].append(each)
    if not spent:
        return
    line = terminalreporter.write_line
    line(f"\n{'package':<14}{'tests':>6}{'seconds':>10}{'of CPU':>10}")
    for name, every in sorted(packages.items(), key=lambda pair: -sum(each.wall_s for each in pair[1])):
        wall_s, cpu_s = sum(each.wall_s for each in every), sum(each.cpu_s for each in every)
        line(f"{name:<14}{len(every):>6}{wall_s:>10.1f}{cpu_s:>10.1f}")
    line(f"\nthe {SLOWEST} slowest tests")
    for test, each in sorted(spent.items(), key=lambda pair: -pair[1].wall_s)[:SLOWEST]:
        line(f"{each.wall_s:>8.1f} s  {test}")


@dataclass
class Spent:
    """Seconds that a test took, set-up and teardown included."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of the test's process and of the children it waited for; daemons are missing."""

    def add(self, report: pytest.TestReport) -> None:
        self.wall_s += report.duration
        self.cpu_s += dict(report.user_properties).get("cpu_s", 0.0) if report.when == "teardown" else 0.0


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return warm.cpu_s + sum(each.ru_utime + each.ru_stime for each in used)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty headway home, and no setting from outside."""
    for name in [name for name in os.environ if name.startswith(("HEADWAY_", "SLURM_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    return tmp_path
