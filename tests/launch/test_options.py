"""Every option of torchrun does in `headway run` what it does there, or is refused with a word of why."""

import json
import socket
from argparse import SUPPRESS
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from supervising import run as run_cold

from headway.cli import main
from headway.cli.run import FLAGS, head_of, parse, parser
from headway.errors import InputError
from shared import free_port

run = partial(run_cold, cold=False)

TELL = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "GROUP_WORLD_SIZE", "OMP_NUM_THREADS",
         "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_ERROR_FILE")
told = {name: os.environ.get(name) for name in names}
told["argv"] = sys.argv[1:]
told["name"] = __name__
print("told " + json.dumps(told), flush=True)
print("apple on stderr", file=sys.stderr, flush=True)
"""


def told(text: str) -> list[dict]:  # type: ignore[type-arg]
    """What each worker said, by rank; the lines of two may run into one."""
    found = [json.JSONDecoder().raw_decode(part)[0] for part in text.split("told ")[1:]]
    return sorted(found, key=lambda worker: worker["RANK"])


@pytest.fixture
def script(home: Path) -> Path:
    path = home / "tell.py"
    path.write_text(TELL)
    return path


def test_torchruns_options_are_all_there_and_each_is_tried_below() -> None:
    options = {
        action.option_strings[0] for action in parser()._actions if action.option_strings and action.help != SUPPRESS
    }
    text = Path(__file__).read_text()
    ours = {"-h", "--job", "--preload", "--compile-cache", "--fast-start", "--without", "--cold", "--hang-after"}
    untried = [
        name
        for name in sorted(options - ours)
        if not any(f'"{spelling}' in text for spelling in parser()._option_string_actions[name].option_strings)
    ]
    assert untried == []


def test_which_options_take_no_value_is_known_without_torch() -> None:
    found = {name for name, action in parser()._option_string_actions.items() if action.nargs == 0}
    assert found == FLAGS


def test_the_scripts_own_options_are_not_ours() -> None:
    words = ["--nproc-per-node=2", "-r3", "--role", "x", "--standalone", "train.py", "--cold", "--max-restarts", "3"]
    assert head_of(words) == words[:5]
    assert head_of(["-m", "package.module", "--preload", "x"]) == ["-m"]


def test_options_of_one_node(script: Path, home: Path) -> None:
    words = [
        "--nnodes", "1:1", "--nproc_per_node=2", "--max-restarts=1", "--monitor-interval", "0.2",
        "--start-method", "fork", "--event-log-handler", "null", "--role", "baker",
        "--local-addr", "127.0.0.1", "--shutdown-timeout", "5",
        "--signals-to-handle", "SIGTERM,SIGINT", "--virtual-local-rank", "--log-dir", "logs", "-r", "1", "--tee", "2",
        "--local-ranks-filter", "1", "--duplicate-stderr-filters", "apple", "--duplicate-stdout-filters", "pear",
        "tell.py", "--lr", "0.1", "--nproc-per-node", "7",
    ]  # fmt: skip
    code, out, err = run(words, home, CUDA_VISIBLE_DEVICES="4,5")
    assert code == 0, err
    assert "told" not in out
    logs = home / "logs"
    (folder,) = logs.glob("*/attempt_0")
    workers = told("".join((folder / str(rank) / "stdout.log").read_text() for rank in (0, 1)))
    assert [worker["RANK"] for worker in workers] == ["0", "1"]
    assert [worker["LOCAL_RANK"] for worker in workers] == ["0", "0"]
    assert [worker["CUDA_VISIBLE_DEVICES"] for worker in workers] == ["4", "5"]
    for worker in workers:
        assert worker["ROLE_NAME"] == "baker"
        assert worker["OMP_NUM_THREADS"] == "1"
        assert worker["MASTER_ADDR"] == "127.0.0.1"
        assert worker["TORCHELASTIC_MAX_RESTARTS"] == "1"
        assert worker["argv"] == ["--lr", "0.1", "--nproc-per-node", "7"]
        assert worker["TORCHELASTIC_ERROR_FILE"].startswith(str(logs)) or "logs" in worker["TORCHELASTIC_ERROR_FILE"]
    for rank in (0, 1):
        assert "apple on stderr" in (folder / str(rank) / "stderr.log").read_text()
    assert err.count("apple on stderr") == 1  # of rank 1 alone, as the filter says
    assert "[baker1]:apple on stderr" in err
    assert "apple on stderr" in (folder / "filtered_stderr.log").read_text()
    assert (folder / "filtered_stdout.log").exists()


def test_a_module_in_a_standalone_job(script: Path, home: Path) -> None:
    code, out, err = run(["--standalone", "--nproc-per-node", "2", "-m", "tell", "x"], home)
    assert code == 0, err
    assert [worker["argv"] for worker in told(out)] == [["x"], ["x"]]
    assert {worker["name"] for worker in told(out)} == {"__main__"}


def test_a_program_that_is_no_python(home: Path) -> None:
    code, out, err = run(["--nproc-per-node", "2", "--no-python", "sh", "-c", "echo told $RANK of $WORLD_SIZE"], home)
    assert code == 0, err
    assert sorted(out.splitlines()) == ["told 0 of 2", "told 1 of 2"]
    assert "workers start fresh: the program is not run by this Python" in err


def test_a_program_that_is_not_there(home: Path) -> None:
    code, _, err = run(["--no-python", "no-such-program"], home)
    assert code == 1
    assert "cannot run no-such-program" in err


def test_a_script_by_its_absolute_path(script: Path, home: Path) -> None:
    code, out, err = run(["--run-path", str(script), "x"], home)
    assert code == 0, err
    assert told(out)[0]["argv"] == ["x"]


def test_a_static_rendezvous(script: Path, home: Path) -> None:
    words = ["--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    code, out, err = run([*words, "--rdzv-backend", "static", "tell.py"], home)
    assert code == 0, err
    assert told(out)[0]["MASTER_ADDR"] == "127.0.0.1"


def test_a_c10d_rendezvous_with_its_options(script: Path, home: Path) -> None:
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "mine"]
    code, out, err = run([*words, "--rdzv-conf", "timeout=120,join_timeout=100", "tell.py"], home)
    assert code == 0, err
    assert told(out)[0]["TORCHELASTIC_RUN_ID"] == "mine"


def test_options_may_come_from_the_environment_as_in_torchrun(script: Path, home: Path) -> None:
    code, out, err = run(["tell.py"], home, PET_NPROC_PER_NODE="2", PET_ROLE="cook")
    assert code == 0, err
    assert [worker["ROLE_NAME"] for worker in told(out)] == ["cook", "cook"]


# --- bad input -------------------------------------------------------------------------------------------------------


def refused(words: list[str], folder: Path) -> str:
    """What is said to words that cannot be run."""
    code, _, err = run(words, folder)
    assert code == 1
    assert "Traceback" not in err, err
    return err


def test_an_unknown_option_is_told_with_the_nearest_one() -> None:
    with pytest.raises(InputError, match=r"there is no option --nproc-per-nod: .*--nproc-per-node"):
        parse(["--nproc-per-nod", "2", "train.py"])
    with pytest.raises(InputError, match=r"there is no option --max-restart: .*--max-restarts"):
        parse(["--max-restart=2", "train.py"])


def test_a_script_that_is_not_there_or_not_given(home: Path) -> None:
    assert f"there is no script no.py in {home}" in refused(["no.py"], home)
    assert "there is no script to run" in refused(["--nproc-per-node", "2"], home)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rdzv-backend", "etcd", "--rdzv-endpoint", "h:1"], "--rdzv-backend etcd is not supported"),
        (["--nnodes", "x"], "--nnodes x"),
        (["--nproc-per-node", "many"], "many"),
        (["--max-restarts", "-1"], "max_restarts must be >= 0"),
        (["--local-ranks-filter", "a"], "--local_ranks_filter must be"),
        (["--logs-specs", "no-such"], "no-such"),
        (["--signals-to-handle", "SIGNOPE"], "SIGNOPE"),
        (["--redirects", "nine"], "nine"),
        (["--numa-binding", "node"], "torch sees no GPU here"),
        (["--nproc-per-node", "0"], "at least one worker is needed"),
        (["--rdzv-backend", "static", "--master-port", "80000"], "80000 is no port"),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "bad:port"], "bad:port"),
        (["--hang-after", "-3"], "--hang-after -3 is no time"),
        (["--fast-start", "--without", "import"], "--without: a fast start has no item import: did you mean imports?"),
        (["--without", "groups"], "--without takes items out of --fast-start, which is not there"),
    ],
)
def test_values_that_make_no_sense(words: list[str], said: str, script: Path, home: Path) -> None:
    assert said in refused([*words, "tell.py"], home)


@contextmanager
def occupied() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield int(sock.getsockname()[1])


def test_a_port_that_another_program_has(script: Path, home: Path) -> None:
    with occupied() as port:
        words = ["--nnodes", "1", "--rdzv-backend", "static", "--master-port", str(port), "tell.py"]
        said = refused(words, home)
    assert str(port) in said
    assert "in use" in said


def test_the_help_lists_torchruns_options_and_headways_own(home: Path) -> None:
    done = CliRunner().invoke(main, ["run", "--help"], catch_exceptions=False)
    ours = ("--job", "--preload", "--compile-cache", "--fast-start", "--without", "--cold", "--hang-after")
    for option in ("--nproc-per-node", "--rdzv-endpoint", *ours):
        assert option in done.stdout
    reference = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    assert all(f"`{option}" in reference for option in ours)
