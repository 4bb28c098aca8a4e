"""Only what a trusted key has signed is believed, and only this user says which keys those are."""

import base64
import json
import multiprocessing
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headway.compile.bundle import Refused
from headway.compile.trust import Keys, others_can_write
from headway.errors import InputError, PlatformError

DATA = b'{"format": 1}'


@pytest.fixture
def mine(tmp_path: Path) -> Keys:
    keys = Keys.at(tmp_path / "mine" / "keys")
    keys.generate("me")
    return keys


@pytest.fixture
def other(tmp_path: Path) -> Keys:
    keys = Keys.at(tmp_path / "other" / "keys")
    keys.generate("other")
    return keys


def public(keys: Keys) -> str:
    own = keys.own()
    assert own
    return own[1]


def test_without_a_folder_the_keys_are_those_of_the_home(home: Path) -> None:
    assert Keys.at().folder == home / "keys"
    assert Keys.at().sign(DATA) is None
    assert Keys.at().own() is None
    assert Keys.at().trusted() == {}
    assert not (home / "keys").exists()


def test_ones_own_signature_is_believed(mine: Keys) -> None:
    assert mine.believes(DATA, mine.sign(DATA)) == "me"
    assert Keys.at(mine.folder).believes(DATA, mine.sign(DATA)) == "me"
    assert mine.trusted() == {"me": public(mine)}


def test_a_stranger_is_refused_until_trusted_and_after(mine: Keys, other: Keys) -> None:
    signature = other.sign(DATA)
    with pytest.raises(Refused, match="whom you do not trust"):
        mine.believes(DATA, signature)
    mine.trust(public(other), "CI of team a")
    mine.trust(public(other), "CI of team a")
    assert mine.believes(DATA, signature) == "CI of team a"
    assert mine.trusted() == {"me": public(mine), "CI of team a": public(other)}
    mine.distrust("CI of team a")
    with pytest.raises(Refused, match="whom you do not trust"):
        mine.believes(DATA, signature)


def test_one_who_trusts_needs_no_key(tmp_path: Path, other: Keys) -> None:
    keys = Keys.at(tmp_path / "reader")
    keys.trust(public(other), "ci")
    assert keys.believes(DATA, other.sign(DATA)) == "ci"


def test_every_changed_bit_of_data_or_signature_is_refused(mine: Keys) -> None:
    signature = mine.sign(DATA)
    assert signature
    for at in range(len(DATA)):
        with pytest.raises(Refused, match="it was changed"):
            mine.believes(DATA[:at] + bytes([DATA[at] ^ 1]) + DATA[at + 1 :], signature)
    key, _, text = signature.partition(" ")
    raw = base64.b64decode(text)
    for at in range(len(raw)):
        for bit in (0, 7):
            wrong = raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]
            with pytest.raises(Refused, match="it was changed"):
                mine.believes(DATA, f"{key} {base64.b64encode(wrong).decode()}")


def test_what_is_no_signature_is_refused(mine: Keys, other: Keys) -> None:
    for signature in (None, "", "x", public(mine), f"{public(mine)} ", f"{public(mine)} äö", f"{public(mine)} AAAA"):
        with pytest.raises(Refused):
            mine.believes(DATA, signature)
    stolen = f"{public(mine)} {str(other.sign(DATA)).partition(' ')[2]}"
    with pytest.raises(Refused, match="it was changed"):
        mine.believes(DATA, stolen)


def test_a_signature_of_the_key_over_something_else_does_not_count(mine: Keys) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    secret = json.loads((mine.folder / "own.json").read_text())["private"]
    bare = Ed25519PrivateKey.from_private_bytes(base64.b64decode(secret)).sign(DATA)
    with pytest.raises(Refused, match="it was changed"):
        mine.believes(DATA, f"{public(mine)} {base64.b64encode(bare).decode()}")


def test_the_private_key_is_readable_by_nobody_else(mine: Keys) -> None:
    file = mine.folder / "own.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in mine.folder.iterdir()] == ["own.json"]
    file.chmod(0o640)
    with pytest.raises(PlatformError, match="chmod 600"):
        mine.sign(DATA)


def test_a_second_key_does_not_take_the_place_of_the_first(mine: Keys) -> None:
    before = public(mine)
    with pytest.raises(InputError, match="there is a signing key"):
        mine.generate("again")
    assert public(mine) == before


def generate(folder: Path, name: str) -> bool:
    try:
        Keys.at(folder).generate(name)
    except InputError:
        return False
    return True


def test_of_many_who_generate_at_once_one_does(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        done = pool.starmap(generate, [(tmp_path / "keys", f"key{number}") for number in range(8)])
    assert sum(done) == 1
    keys = Keys.at(tmp_path / "keys")
    assert keys.believes(DATA, keys.sign(DATA)) == f"key{done.index(True)}"


def test_bad_names_and_keys_are_refused_with_a_reason(mine: Keys, other: Keys) -> None:
    for bad in ("", "ed25519:", "ed25519:AAAA", public(other)[8:], "ssh-ed25519 AAAA", public(other) + "x"):
        with pytest.raises(InputError, match="is no public key"):
            mine.trust(bad, "x")
    for name in ("", "a\nb", "x" * 65, "ä"):
        with pytest.raises(InputError, match="is no name for a key"):
            mine.trust(public(other), name)
    with pytest.raises(InputError, match="is the name of another key already"):
        mine.trust(public(other), "me")
    with pytest.raises(InputError, match="did you mean me"):
        mine.distrust("mee")
    with pytest.raises(InputError, match="is your own key"):
        mine.distrust("me")


def test_a_name_that_looks_like_a_path_stays_in_its_folder(mine: Keys, other: Keys) -> None:
    mine.trust(public(other), "../../x")
    assert "../../x" in mine.trusted()
    assert [path.parent for path in mine.folder.rglob("*x")] == [mine.folder / "trusted"]
    mine.distrust("../../x")
    assert "../../x" not in mine.trusted()


@pytest.mark.parametrize("what", ["file", "folder", "above"])
def test_a_trust_list_that_others_can_write_is_no_trust_list(mine: Keys, other: Keys, what: str) -> None:
    mine.trust(public(other), "other")
    signature = other.sign(DATA)
    path = {"file": mine.folder / "trusted" / "other", "folder": mine.folder / "trusted", "above": mine.folder}[what]
    path.chmod(0o722)
    with pytest.raises(Refused, match="others can"):
        mine.believes(DATA, signature)


def test_a_damaged_key_file_says_so(mine: Keys) -> None:
    (mine.folder / "own.json").write_text("{")
    with pytest.raises(InputError, match="is no signing key"):
        mine.sign(DATA)


def test_without_the_package_the_error_names_the_extra(mine: Keys) -> None:
    script = """
import sys
from pathlib import Path
sys.modules["cryptography"] = None
sys.modules["cryptography.hazmat.primitives.asymmetric"] = None
from headway.compile.trust import Keys
try:
    Keys.at(Path(sys.argv[1])).believes(b"x", sys.argv[2])
except Exception as error:
    print(type(error).__name__, error)
"""
    command = [sys.executable, "-c", script, str(mine.folder), str(mine.sign(b"x"))]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert told.startswith("Refused signatures need the package cryptography")
    assert "pip install 'headway[cache]'" in told


# --- who can write ---------------------------------------------------------------------------------------------------


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    path = tmp_path / "a" / "b" / "file"
    path.parent.mkdir(parents=True, mode=0o700)
    (tmp_path / "a").chmod(0o700)
    path.write_text("x")
    path.chmod(0o600)
    return path


def test_a_folder_of_ones_own_is_nobody_elses(deep: Path) -> None:
    assert others_can_write(deep) == ""
    assert others_can_write(deep.parent / "not" / "there") == ""


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_one_open_door_on_the_way_is_enough(deep: Path, level: int, mode: int) -> None:
    path = [deep, *deep.parents][level]
    path.chmod(mode)
    assert others_can_write(deep) == f"others can write {path}: chmod go-w {path}"


def test_in_a_sticky_folder_others_cannot_replace(deep: Path) -> None:
    deep.parent.chmod(0o1777)
    assert others_can_write(deep) == ""
    deep.chmod(0o1666)  # on a file the bit means nothing
    assert others_can_write(deep) != ""


@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_belongs_to_somebody_else_is_theirs(deep: Path, level: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: to give a file to somebody else")
    path = [deep, *deep.parents][level]
    os.chown(path, 12345, -1)
    assert others_can_write(deep) == f"{path} belongs to another user."


def test_the_folders_a_link_passes_through_count(deep: Path, tmp_path: Path) -> None:
    doors = tmp_path / "doors"
    doors.mkdir()
    (doors / "second").symlink_to(deep.parent)
    (tmp_path / "first").symlink_to("doors/second")
    assert others_can_write(tmp_path / "first" / "file") == ""
    doors.chmod(0o777)
    assert others_can_write(tmp_path / "first" / "file").startswith(f"others can write {doors}:")


def test_a_link_that_leads_to_itself_is_no_safe_way(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "cannot be looked at" in others_can_write(tmp_path / "a" / "file")
