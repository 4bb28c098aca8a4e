"""Settings from the environment: all there are, and an error for a name that is none of them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from headway.errors import InputError, nearest

FAST_START = {
    "imports": "packages that the program imported before are there already",
    "groups": "process groups connect when they are first used",
    "compile-cache": "compiled code is kept, and taken from there",
    "loader": "a data loader's workers start when it is made, where that changes nothing",
}
"""What can be had at a start without a word in the script, by the name it is switched by."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user can set. Each field is the variable `HEADWAY_<FIELD>`."""

    home: Path = Path("~/.headway")
    """Folder that holds the jobs. It may be on a network file system; then journals go through the spool."""
    spool: Path | None = None
    """Node-local folder for journals on their way to `home`. Setting it makes every journal take that way."""
    job: str = ""
    """Name of the job this process belongs to. Without it: the scheduler's id, or the launcher's run id."""
    attempt: str = ""
    """Number of this attempt, from a supervisor that counts them. Without it attempts are told apart by their ranks."""
    node: str = ""
    """Name of this node, where the host name will not do."""
    eligible: str = ""
    """When the job could first have run: seconds since 1970, or ISO 8601 with a zone. For platforms not known to us."""
    allocated: str = ""
    """When the job got its hardware, in the same form."""
    board: str = ""
    """File through which a supervisor tells its ranks to stop. Set by `headway run`."""
    notice: str = ""
    """Where to look for a preemption notice besides signals: `package.module:function`, or `file:/path`."""
    skip_checkpoints: str = ""
    """How many of the newest checkpoints not to trust. Set by `headway run` after one proved bad."""
    failure_rules: str = ""
    """What tells failures apart before headway's own rules do: a file of rules, or `package.module:function`."""
    policy: str = ""
    """What decides about a failure before headway's own policy does: `package.module:function`."""
    compile_cache: str = ""
    """Folder or URL of the store of compiled code. Set by `--compile-cache`."""
    compile_group: str = ""
    """Names the ranks that compile the same as this one, where not all do: a stage of a pipeline, say."""
    serial: str = ""
    """Set to 1, the stages of a `headway.Startup` run one after another."""
    fast_start: str = ""
    """What is done to start faster: items of `--fast-start`, separated by commas, or `all`."""
    disable: str = ""
    """Set to 1, `headway.current()` records nothing."""

    @classmethod
    def variables(cls) -> dict[str, str]:
        """The field each variable sets."""
        return {f"HEADWAY_{f.name.upper()}": f.name for f in fields(cls)}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "Settings":
        """Reads `HEADWAY_*`; InputError for a name that is not a setting."""
        known = cls.variables()
        given = {name: value for name, value in environ.items() if name.startswith("HEADWAY_") and value}
        for name in given:
            if name not in known:
                raise InputError(f"{name} is set, but headway has no such setting: {nearest(name, known)}")
        values: dict[str, object] = {known[name]: value for name, value in given.items()}
        for key in ("home", "spool"):
            if key in values:
                values[key] = Path(str(values[key]))
        return cls(**values)  # type: ignore[arg-type]

    @property
    def fast_start_items(self) -> list[str]:
        """The items that are on; InputError for one there is none of."""
        return items_in(self.fast_start, "HEADWAY_FAST_START")

    @property
    def home_folder(self) -> Path:
        """`home`, absolute."""
        return self.home.expanduser().absolute()

    @property
    def spool_folder(self) -> Path:
        """`spool`, or a folder of this user's under the temporary directory."""
        return (self.spool or Path(os.environ.get("TMPDIR", "/tmp")) / f"headway-{os.getuid()}").absolute()


def items_in(text: str, given_by: str) -> list[str]:
    """The items of `FAST_START` that a list names, in their order; InputError for a name that is none."""
    named = {name.strip() for name in text.split(",") if name.strip()}
    if unknown := sorted(named - FAST_START.keys() - {"all"}):
        hint = nearest(unknown[0], FAST_START)
        raise InputError(f"{given_by}: a fast start has no item {unknown[0]}: {hint}")
    return [item for item in FAST_START if item in named or "all" in named]
