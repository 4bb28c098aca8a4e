"""`headway cache` on real stores."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headway.cli import main
from headway.compile import key as key_module
from headway.compile.bundle import Member
from headway.compile.store import Store
from headway.compile.trust import Keys

ABOUT = {"torch": "2.13.0", "cpu": "x86_64 avx2", "program": "train.py"}
OTHER = ABOUT | {"torch": "2.14.0", "program": "train.py \x1b[2J"}
KEY, OTHER_KEY = key_module.digest(ABOUT), key_module.digest(OTHER)


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["cache", *map(str, words)], env={"COLUMNS": "140"})


@pytest.fixture(autouse=True)
def root(home: Path) -> Path:
    """The default store, with two keys; the first was used last."""
    store = Store(str(home / "compile"))
    store.save(OTHER_KEY, {"sources.json": Member(b"{}", 1)}, OTHER, "job1")
    store.save(KEY, {"file/a/b.so": Member(os.urandom(3000), 1), "file/a/c.cpp": Member(b"x" * 500, 2)}, ABOUT, "job1")
    return home / "compile"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def segment(root: Path, key: str = KEY) -> Path:
    (path,) = (root / key).glob("*.bundle")
    return path


def damage(root: Path) -> None:
    data = bytearray(segment(root).read_bytes())
    data[-500] ^= 4
    segment(root).write_bytes(data)


# --- what there is ---------------------------------------------------------------------------------------------------


def test_ls_shows_what_there_is(root: Path) -> None:
    told = run("ls")
    assert told.exit_code == 0
    header, first, second = told.output.splitlines()
    assert header.split() == ["key", "size", "members", "segments", "saved", "used", "program"]
    assert re.fullmatch(rf" {KEY[:12]} +\d.\d kB +2 +1 +\S+ [\d:]{{8}} +\S+ [\d:]{{8}} +train.py *", first)
    assert OTHER_KEY[:12] in second
    assert "\x1b" not in told.output


def test_ls_as_json_has_all_of_it(root: Path) -> None:
    first, second = json.loads(run("ls", "--json").output)
    assert list(first) == ["key", "about", "bytes", "members", "segments", "used_ns", "saved_ns"]
    assert (first["key"], first["about"], second["key"]) == (KEY, ABOUT, OTHER_KEY)


def test_a_store_with_nothing_in_it_is_no_error(tmp_path: Path) -> None:
    told = run("ls", "--store", tmp_path / "nowhere")
    assert told.exit_code == 0
    assert told.output == f"Nothing is stored in {tmp_path / 'nowhere'}.\n"
    assert json.loads(run("ls", "--json", "--store", tmp_path / "nowhere").output) == []


def test_info_says_what_a_key_was_made_from_and_what_it_holds(root: Path) -> None:
    told = run("info", KEY[:6])
    assert told.exit_code == 0
    assert told.output.startswith(f"{KEY}\n2 members in 1 segment, ")
    assert re.search(r", saved \d{4}-\d\d-\d\d [\d:]+, used \d{4}-", told.output), told.output
    assert "  torch    2.13.0\n" in told.output
    assert "  file .so   3.0 kB unpacked\n" in told.output
    assert f"  {segment(root).name}  not signed\n" in told.output
    row = json.loads(run("info", KEY, "--json").output)
    assert row["kinds"] == {"file .so": 3000, "file .cpp": 500}
    assert row["signers"] == {segment(root).name: ""}


def test_info_says_that_something_is_not_believed(root: Path) -> None:
    segment(root).chmod(0o666)
    assert f"Not believed: 1 segment. `headway cache verify {KEY[:12]}` says why." in run("info", KEY).output


@pytest.mark.parametrize(
    ("key", "why"), [("abc", "too short"), ("ffffffff", "begins with 'ffffffff'"), ("../../etc", "begins with '../..")]
)
@pytest.mark.parametrize("command", [["info"], ["verify"], ["key"], ["push", "--to", "x"], ["pull", "--from", "."]])
def test_a_key_that_is_none_is_said_to_be_none(command: list[str], key: str, why: str) -> None:
    told = run(*command, key)
    assert told.exit_code == 1
    assert why in told.output


def test_a_prefix_of_several_keys_is_not_enough(root: Path) -> None:
    for last in "01":
        Store(str(root)).save("abcdef1" + last, {}, {}, "job")
    assert "2 keys in" in run("info", "abcdef").output
    assert run("info", "abcdef10").exit_code == 0


def test_key_says_in_which_parts_two_keys_differ(root: Path) -> None:
    told = run("key", KEY, OTHER_KEY)
    assert told.exit_code == 0
    assert told.output.startswith("torch\n  2.13.0\n  2.14.0\nprogram\n  train.py\n")
    assert "cpu" not in told.output
    assert "\x1b" not in told.output
    first, _ = json.loads(run("key", KEY, OTHER_KEY, "--json").output)
    assert first == {"part": "torch", "a": "2.13.0", "b": "2.14.0"}
    assert run("key", KEY, KEY).output == "The two keys are made of the same parts.\n"


def test_key_says_what_one_key_is_made_of(root: Path) -> None:
    assert run("key", KEY[:8]).output == f"{KEY}\n  torch    2.13.0\n  cpu      x86_64 avx2\n  program  train.py\n"
    assert json.loads(run("key", KEY, "--json").output) == {"key": KEY, "parts": ABOUT}


def test_key_makes_no_guess_about_what_is_not_believed(root: Path) -> None:
    segment(root).chmod(0o666)
    told = run("key", KEY, OTHER_KEY)
    assert told.exit_code == 1
    assert f"nothing under {KEY} is believed" in told.output


def test_key_alone_is_the_one_of_this_machine() -> None:
    told = json.loads(run("key", "--json").output)
    assert told == {"key": key_module.digest(key_module.parts()), "parts": key_module.parts()}


def test_verify_is_quiet_about_what_is_good_and_names_what_is_not(root: Path) -> None:
    told = run("verify")
    assert (told.exit_code, told.output) == (0, f"{KEY[:12]}  good\n{OTHER_KEY[:12]}  good\n")
    damage(root)
    told = run("verify")
    assert told.exit_code == 1
    assert f"{KEY[:12]}  bad\n  {segment(root).name} is damaged" in told.output
    assert run("verify", OTHER_KEY).exit_code == 0
    assert {key: len(problems) for key, problems in json.loads(run("verify", "--json").output).items()} == {
        KEY: 1,
        OTHER_KEY: 0,
    }


# --- moving it -------------------------------------------------------------------------------------------------------


def test_push_and_pull_carry_a_key_from_one_user_to_another(
    root: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = run("push", KEY, "--to", shared)
    assert told.exit_code == 1
    assert "headway cache keygen" in told.output
    public = run("keygen", "alice").output.splitlines()[0]
    assert run("push", KEY, "--to", shared).output == f"{KEY[:12]} is in {shared}.\n"

    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "bob"))
    told = run("pull", KEY, "--from", shared)
    assert told.exit_code == 1
    assert "whom you do not trust" in told.output
    assert "nothing was copied" in told.output
    assert run("trust", public, "alice").exit_code == 0
    assert run("pull", KEY, "--from", shared).output == f"{KEY[:12]} is in {tmp_path / 'bob' / 'compile'}.\n"
    loaded = Store(str(tmp_path / "bob" / "compile"), keys=Keys.at(tmp_path / "bob" / "keys")).load(KEY)
    assert loaded.digest == Store(str(root)).load(KEY).digest


def test_what_is_left_out_of_a_copy_is_said(root: Path, tmp_path: Path) -> None:
    Store(str(root)).save(KEY, {"a": Member(b"x", 3)}, ABOUT, "job2")
    (bad,) = (root / KEY).glob("job1-*")
    bad.write_bytes(b"rubbish")
    told = run("push", KEY, "--to", tmp_path / "copy")
    assert told.exit_code == 1
    assert f"left out: {bad.name} is damaged" in told.output
    assert set(Store(str(tmp_path / "copy")).load(KEY).members) == {"a"}


def test_prune_deletes_what_was_not_used_for_longest(root: Path) -> None:
    Store(str(root)).touch(OTHER_KEY)
    assert run("prune", "--max-size", "1GB").output == "Nothing to delete.\n"
    told = run("prune", "--max-size", "1kB")
    assert told.exit_code == 0
    assert told.output.startswith(f"deleted {KEY[:12]}  ")
    assert Store(str(root)).stored() == [OTHER_KEY]


@pytest.mark.parametrize(("size", "left"), [("4000", 1), ("1.5GiB", 2), ("1 mb", 2), ("0.001 KIB", 0), ("0", 0)])
def test_sizes_are_read_as_people_write_them(root: Path, size: str, left: int) -> None:
    assert run("prune", "--max-size", size).exit_code == 0
    assert len(Store(str(root)).stored()) == left


@pytest.mark.parametrize("size", ["", "much", "-1", "10XB", "1e9", "10 G B", "ib"])
def test_a_size_that_is_none_deletes_nothing(root: Path, size: str) -> None:
    told = run("prune", "--max-size", size)
    assert told.exit_code == 2
    assert "is no size. Give one such as 500MB, 10GB or 1.5GiB." in " ".join(told.output.split())
    assert len(Store(str(root)).stored()) == 2


# --- trust -----------------------------------------------------------------------------------------------------------


def test_keygen_prints_what_others_say(home: Path) -> None:
    told = run("keygen", "me").output
    own = Keys.at(home / "keys").own()
    assert own
    assert told == f"{own[1]}\nWhoever is to load what you save says: headway cache trust {own[1]} me\n"
    again = run("keygen")
    assert again.exit_code == 1
    assert "there is a signing key" in again.output


def test_keygen_has_a_name_for_those_who_give_none(home: Path) -> None:
    assert run("keygen").exit_code == 0
    own = Keys.at(home / "keys").own()
    assert own
    assert "@" in own[0]


def test_trust_lists_adds_and_removes(home: Path, tmp_path: Path) -> None:
    assert "Nobody is trusted" in run("trust").output
    public = Keys.at(tmp_path / "other").generate("other")
    assert run("trust", public, "ci").output == "What ci has signed is loaded from now on.\n"
    run("keygen", "me")
    own = Keys.at(home / "keys").own()
    assert own
    assert run("trust").output == f"  ci  {public}\n  me  {own[1]}  (your own)\n"
    assert json.loads(run("trust", "--json").output) == {"ci": public, "me": own[1]}
    assert run("trust", "--remove", "ci").output == "What ci has signed is no longer loaded.\n"
    assert "ci" not in run("trust").output


@pytest.mark.parametrize("words", [["ed25519:x"], ["a", "b", "--remove", "c"]])
def test_half_of_what_trust_needs_is_refused(words: list[str]) -> None:
    told = run("trust", *words)
    assert told.exit_code == 1
    assert "give a public key and a name for it" in told.output


# --- when it does not work -------------------------------------------------------------------------------------------


def test_a_disk_that_refuses_is_an_error_without_a_trace(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("?")
    told = run("push", KEY, "--to", tmp_path / "file" / "store")
    assert told.exit_code == 1
    assert told.output.startswith("Error: ")
    assert "Traceback" not in told.output
    assert "nosuch" in run("ls", "--store", "nosuch://x").output


def test_listing_imports_no_torch(home: Path) -> None:
    script = "import sys; from headway.cli import main; main(['cache', 'ls'], standalone_mode=False)"
    script += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False"


def test_long_work_shows_a_bar_on_a_terminal_and_none_elsewhere(root: Path) -> None:
    outer, inner = pty.openpty()
    command = [sys.executable, "-m", "headway", "cache", "verify"]
    with subprocess.Popen(
        command, stdin=inner, stdout=inner, stderr=inner, env={**os.environ, "TERM": "xterm"}
    ) as child:
        os.close(inner)
        said = b""
        with contextlib.suppress(OSError):  # the terminal is closed
            while part := os.read(outer, 1 << 16):
                said += part
        assert child.wait() == 0
    os.close(outer)
    assert b"verifying" in said
    piped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (piped.stderr, "verifying" in piped.stdout) == ("", False)


def test_times_are_those_of_the_segments(root: Path) -> None:
    (entry, _) = json.loads(run("ls", "--json").output)
    assert 0 < time.time_ns() - entry["saved_ns"] < 300 * 10**9
