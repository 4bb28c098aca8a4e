"""From a request to a version: the anchor is opened, the recipe run, what it made is checked, and then it is published.

Killed at any instant, it leaves what it has done for the next try, and `latest` where it was.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from headway.errors import InputError
from headway.publish import named
from headway.publish.anchor import Anchor, open_anchor, pinned, torch_version, unpin
from headway.publish.card import card
from headway.publish.layout import WORK, VersionManifest
from headway.publish.out import Out, Rejected
from headway.publish.request import Desk, Request
from headway.publish.versions import Version, Versions
from headway.storage import open_storage

if TYPE_CHECKING:
    from headway.publish.ready import Served

EXIT_INPUT, EXIT_REJECTED = 2, 3
"""What a publisher ends with if it cannot be published as given, and if a check failed."""

CARD = "README.md"
_PREVIOUS = "previous"
_TELL_S = 0.5


class Publisher:
    """Publishes what one request asks for."""

    def __init__(
        self,
        desk: Desk,
        span: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
        ledger: Callable[[str], Mapping[str, Any] | None] = lambda job: None,
    ) -> None:
        """`span` times a step; `ledger` gives the report of a job, if there is one."""
        self._desk, self._span, self._ledger = desk, span, ledger
        self.request: Request = desk.request
        self._storage = open_storage(self.request.to)
        self._versions = Versions(self._storage)
        self._name = f"{self.request.id}-{desk.token}"
        self._doing, self._told_at = "", 0.0
        self._out: Out | None = None
        self._checks: dict[str, Callable[..., Any]] = {}
        self.steps: dict[str, float] = {}
        """How many seconds each step took, when it was done."""

    def publish(self) -> Version:
        """The version, which is there when this returns; `latest` names it if it is to."""
        try:
            with self._span("anchor"):
                anchor = self._anchor()
        except InputError as error:
            if (version := self._published()) is None:
                raise
            return self._ended(version, f"it was published before; it cannot be made again: {error}")
        with self._span("recipe"):
            make = self._recipe()
            self._checks = {name: self._function(name) for name in self.request.what.checks}
            key = self._key(anchor)  # here, where all is imported that a try begins with, and nothing has been run
        version = self._versions.with_key(anchor.step, key) or self._made(anchor, key, make)
        shutil.rmtree(self._work, ignore_errors=True)
        why_not = self._serve(version)
        self._desk.change(
            version=version.name, anchor=anchor.manifest.content
        )  # from here on the checkpoint is not needed
        unpin(open_storage(self.request.root), self.request.checkpoint, self.request.id)
        return self._ended(version, why_not)

    def _anchor(self) -> Anchor:
        request, what = self.request, self.request.what
        root = open_storage(request.root)
        anchor = open_anchor(root, request.checkpoint, request.id, what.recipe, what.part, self._waiting)
        anchor.progress = self._tell
        return anchor

    def _published(self) -> Version | None:
        """What was published before, if it is there: its checkpoint may be gone since."""
        state, request = self._desk.state(), self.request
        kept = pinned(open_storage(request.root), request.checkpoint, request.id)
        if kept is not None and kept.content != state.anchor:  # it was saved again, and that was not published
            return None
        name = state.version
        found = [each for each in self._versions.all() if name and each.name == name and each.state == "complete"]
        return found[0] if found else None

    def _ended(self, version: Version, problem: str) -> Version:
        self._desk.change(phase="published", doing="", version=version.name, problem=problem, category="")
        return version

    # --- what is published ---

    def _recipe(self) -> Callable[[Anchor, Out], Any]:
        what = self.request.what
        if named.is_function(what.recipe):
            return self._function(what.recipe)
        from headway.publish.ready import ready

        make: Callable[[], Served] | None = self._function(what.model) if what.model else None
        return ready(what.recipe, make)

    def _function(self, name: str) -> Callable[..., Any]:
        return named.function_named(name, self.request.folder or ".")

    def _key(self, anchor: Anchor) -> str:
        """The same for the same anchor, recipe, code and torch: publishing twice is publishing once."""
        what, folder = self.request.what, self.request.folder or "."
        names = [*filter(None, (what.recipe, what.model, what.part, *what.checks))]
        made_of = [anchor.manifest.content, named.imported(names, folder), torch_version()]
        return named.digest([*names, *made_of], folder)[:8]

    def _made(self, anchor: Anchor, key: str, make: Callable[[Anchor, Out], Any]) -> Version:
        for stale in self._work.iterdir() if self._work.is_dir() else ():
            if stale.name not in (key, _PREVIOUS):  # of a recipe that was changed since
                shutil.rmtree(stale, ignore_errors=True)
        out = self._out = Out(self._work / key, self._tell, self._span)
        recipe = self.request.what.recipe
        try:
            make(anchor, out)
        except SystemExit as error:
            raise InputError(
                f"the recipe {recipe} has called sys.exit({error.code}). It is to return, or raise."
            ) from error
        if named.is_function(recipe) and not out.files():
            raise InputError(f"the recipe {recipe} has made nothing: it writes no file to `out`.")
        with self._span("checks"):
            self._check(out)
        self._tell("publishing")
        manifest = self._manifest(anchor, key, out)
        with self._span("upload"):
            return self._versions.add(
                out.folder, manifest, self._counting("publishing", manifest.size), publisher=self._name
            )

    @property
    def _work(self) -> Path:
        """Where steps are kept: beside the versions, if they are in a folder, so that they need not be copied."""
        return Path(self._storage.url) / WORK / self._name if self._storage.is_local else self._desk.work

    def _check(self, out: Out) -> None:
        from headway.publish.checks import compare_with_previous, timed_name, user_check

        for check in out.checks:
            if not check.passed:  # and the recipe went on all the same
                raise Rejected(f"{check.name}: {check.told}")
        previous = self._versions.latest()
        if previous is not None and previous.manifest is not None:
            self._tell("comparing with the version before")
            files = {name: told for name, told in previous.manifest.files.items() if name != CARD}  # this has none yet
            before, folder = replace(previous.manifest, files=files), self._fetched(previous, timed_name(out))
            for check in compare_with_previous(out, before, folder, self.request.what.allow):
                out.add(check)
        for name, function in self._checks.items():
            self._tell(f"check {name}")
            out.add(user_check(name, function, out.folder))

    def _fetched(self, previous: Version, name: str | None) -> Path | None:
        """Where the file of that name of a version is on this machine, if it can be had."""
        if self._storage.is_local:
            return Path(self._storage.url) / previous.name
        assert previous.manifest is not None
        told = previous.manifest.files.get(name or "")
        if name is None or told is None:
            return None
        place = self._work / _PREVIOUS / previous.name
        path = place / name
        if not path.is_file() or path.stat().st_size != told.bytes:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._storage.fetch(f"{previous.name}/{name}", path)
            except FileNotFoundError:  # a version that has lost a file is no reason not to publish the next one
                return None
        return place

    def _manifest(self, anchor: Anchor, key: str, out: Out) -> VersionManifest:
        manifest = VersionManifest(
            step=anchor.step, key=key, job=anchor.job, published_ns=time.time_ns(), anchor=asdict(anchor.manifest),
            recipe=self.request.what.recipe, signature=out.signature, checks=[asdict(each) for each in out.checks],
            facts=out.facts | {"seconds": out.steps}, files={},
        )  # fmt: skip
        files = out.hashes()
        if not (out / CARD).exists():  # the recipe may have made one of its own
            text = card(asdict(manifest) | {"files": files}, self._ledger(anchor.job)).encode()
            (out / CARD).write_bytes(text)
            files[CARD] = {"bytes": len(text), "xxh3": xxhash.xxh3_128_hexdigest(text)}
        return manifest.with_files(files)

    # --- what is served ---

    def _serve(self, version: Version) -> str:
        """Moves `latest`, if it is to; why not, otherwise."""
        if not self.request.what.promote:
            return ""
        should, why_not = self._versions.should_promote(version)
        if should:
            # What was found by its key alone may have changed since it was published.
            made_here, size = version.name in self._versions.added, version.manifest.size if version.manifest else 0
            self._versions.promote(
                version.name, why="publish", verified=made_here, progress=self._counting("verifying", size)
            )
        return why_not

    # --- saying ---

    def _waiting(self, why: str) -> None:
        self._tell(f"waiting for the anchor: {why}")

    def _tell(self, what: str, done: int = 0, total: int = 0) -> None:
        if what != self._doing or time.monotonic() - self._told_at > _TELL_S:
            self._doing, self._told_at = what, time.monotonic()
            self.steps = self._out.steps if self._out is not None else {}
            with suppress(OSError):  # a home that is full is no reason not to publish
                self._desk.change(doing=what, done=done, total=total, steps=tuple(self.steps))

    def _counting(self, what: str, size: int) -> Callable[[int], None]:
        done = 0

        def count(more: int) -> None:
            nonlocal done
            done += more
            self._tell(what, done, size)

        return count
