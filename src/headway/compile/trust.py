"""Who may be believed: loading a cache runs code that its author has chosen.

::

    <home>/keys/
      own.json          this user's signing key, readable by nobody else
      trusted/<name>    the public key of somebody whose segments are loaded

Typical use::

    keys = Keys.at()
    public = keys.generate("ci")        # others say: headway cache trust <public> ci
    signer = keys.believes(manifest, signature)
"""

import base64
import contextlib
import getpass
import json
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from headway.compile.bundle import Refused
from headway.config import Settings
from headway.errors import HeadwayError, InputError, PlatformError, nearest
from headway.paths import folder_name

_PREFIX = "ed25519:"
_PURPOSE = b"headway compile cache segment\n"
"""Precedes what is signed: a signature over something else never passes for one of these."""
_MOST_NAME_LETTERS = 64


class Keys:
    """This user's signing key, and whom this user trusts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own_file = folder / "own.json"
        self._trusted = folder / "trusted"

    @classmethod
    def at(cls, folder: Path | None = None) -> "Keys":
        """Those in a folder, which need not exist; without one, those of this headway home."""
        return cls(folder or Settings.from_environment().home_folder / "keys")

    def generate(self, name: str = "") -> str:
        """Makes this user's signing key; its public half, for others to trust."""
        name = _checked(name or f"{getpass.getuser()}@{socket.gethostname()}"[:_MOST_NAME_LETTERS])
        private = _ed25519().Ed25519PrivateKey.generate()
        public = _PREFIX + base64.b64encode(private.public_key().public_bytes_raw()).decode()
        secret = base64.b64encode(private.private_bytes_raw()).decode()
        try:
            _create(self._own_file, json.dumps({"name": name, "public": public, "private": secret}))
        except FileExistsError:
            raise InputError(
                f"there is a signing key in {self._own_file} already: what it has signed could not be believed any "
                f"more. Delete that file first if this is what you want."
            ) from None
        return public

    def own(self) -> tuple[str, str] | None:
        """Name and public half of this user's signing key, if there is one."""
        found = self._own()
        return (found["name"], found["public"]) if found else None

    def trust(self, public: str, name: str) -> None:
        """Believes from now on what that key has signed."""
        _public_key_bytes(public)
        known = self.trusted()
        if known.get(_checked(name), public) != public:
            raise InputError(f"{name} is the name of another key already. Choose another, or remove that one first.")
        if name not in known:
            with contextlib.suppress(FileExistsError):  # somebody says the same at the same time
                _create(self._trusted / folder_name(name), public)

    def distrust(self, name: str) -> None:
        """Believes that key no longer, whatever it has signed."""
        if (own := self.own()) and own[0] == name and not (self._trusted / folder_name(name)).exists():
            raise InputError(f"{name} is your own key. Delete {self._own_file} to be rid of it.")
        try:
            (self._trusted / folder_name(name)).unlink()
        except FileNotFoundError:
            known = self.trusted()
            hint = nearest(name, known) if known else "there are none."
            raise InputError(f"no trusted key has the name {name!r}: {hint}") from None

    def trusted(self) -> dict[str, str]:
        """The public keys that are believed, by name: this user's own is one of them."""
        files = sorted(self._trusted.iterdir()) if self._trusted.is_dir() else []
        found = {}
        for file in (each for each in files if not each.name.startswith(".")):
            if reason := others_can_write(file):
                raise PlatformError(f"the list of trusted keys cannot be relied on: {reason}")
            found[unquote(file.name)] = file.read_text().strip()
        own = self.own()
        return found | ({own[0]: own[1]} if own else {})

    def sign(self, data: bytes) -> str | None:
        """A signature that says whose it is; None if this user has no key."""
        if not (found := self._own()):
            return None
        private = _ed25519().Ed25519PrivateKey.from_private_bytes(base64.b64decode(found["private"]))
        return f"{found['public']} {base64.b64encode(private.sign(_PURPOSE + data)).decode()}"

    def believes(self, data: bytes, signature: str | None) -> str:
        """The name of the trusted key that has signed this; `Refused`, with the reason, otherwise."""
        if signature is None:
            raise Refused("is not signed.")
        public, _, text = signature.partition(" ")
        try:
            signer = next((name for name, each in self.trusted().items() if each == public), None)
            if signer is not None:
                self._check(public, text, data, signer)
                return signer
        except HeadwayError as error:
            raise Refused(str(error)) from error
        raise Refused(
            f"is signed by {public[:60]!r}, whom you do not trust. If you know whose key this is: "
            f"headway cache trust PUBLIC NAME."
        )

    def _check(self, public: str, text: str, data: bytes, signer: str) -> None:
        key_class = _ed25519().Ed25519PublicKey
        from cryptography.exceptions import InvalidSignature

        try:
            key = key_class.from_public_bytes(_public_key_bytes(public))
            key.verify(base64.b64decode(text, validate=True), _PURPOSE + data)
        except (InvalidSignature, InputError, ValueError):
            raise Refused(f"says that {signer} has signed it, and this is not so: it was changed.") from None

    def _own(self) -> dict[str, str] | None:
        try:
            mode = self._own_file.stat().st_mode
            found: dict[str, str] = json.loads(self._own_file.read_text())
            found["name"], found["public"], found["private"]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self._own_file} is no signing key: {error!r}. Restore it, or delete it.") from error
        reason = others_can_write(self._own_file)
        if mode & 0o077 or reason:
            raise PlatformError(
                f"others can read or write your signing key, and sign in your name. {reason} chmod 600 {self._own_file}"
            )
        return found


def others_can_write(path: Path) -> str:
    """Why somebody other than this user (and root) could change what is at that path; empty if nobody can.

    Whoever can write a folder can replace all that is in it, so those above count too. In a sticky one, as /tmp is,
    others can add, and not replace.
    """
    for each in _way_to(path):
        try:
            found = each.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"{each} cannot be looked at: {error.strerror}."
        if found.st_uid not in (0, os.getuid()):
            return f"{each} belongs to another user."
        sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        if found.st_mode & 0o022 and not sticky and not stat.S_ISLNK(found.st_mode):
            return f"others can write {each}: chmod go-w {each}"
    return ""


def _way_to(path: Path) -> Iterator[Path]:
    """The path, all folders above it, and where symbolic links on the way lead to."""
    ahead, seen = [Path(os.path.abspath(path)), Path(os.path.realpath(path))], set[Path]()
    while ahead:
        last = ahead.pop()
        for each in (last, *last.parents):
            if each not in seen:
                seen.add(each)
                yield each
                if each.is_symlink():
                    ahead.append(Path(os.path.abspath(each.parent / os.readlink(each))))


def _create(file: Path, text: str) -> None:
    """Makes a file that only this user reads, whole; FileExistsError if there is one."""
    for folder in reversed((file.parent, *file.parent.parents)):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    part = file.with_name(f".{secrets.token_hex(8)}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
            output.write(text)
            output.flush()
            os.fsync(output.fileno())
        os.link(part, file)
    finally:
        part.unlink(missing_ok=True)


def _public_key_bytes(public: str) -> bytes:
    with contextlib.suppress(ValueError):
        raw = base64.b64decode(public.removeprefix(_PREFIX), validate=True)
        if public.startswith(_PREFIX) and len(raw) == 32:
            return raw
    raise InputError(f"{public!r} is no public key. One is {_PREFIX}… as `headway cache keygen` prints it.")


def _checked(name: str) -> str:
    if not name or len(name) > _MOST_NAME_LETTERS or not name.isprintable() or not name.isascii():
        raise InputError(f"{name!r} is no name for a key: give up to {_MOST_NAME_LETTERS} ASCII letters.")
    return name


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise PlatformError(
            "signatures need the package cryptography, which is not installed: pip install 'headway[cache]'."
        ) from error
    return ed25519
