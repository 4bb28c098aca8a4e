"""`headway inject`: measures every program of one Python, where no word can be put before the command."""

import os
import subprocess
import sys
from pathlib import Path

import click

import headway
from headway.errors import InputError, PlatformError

NAME = "headway-inject.pth"

OLDEST = (3, 11)

SHIM = Path(headway.__file__).absolute().parent / "instrument" / "site" / "sitecustomize.py"

_ASK = "import sys, sysconfig; print(*sys.version_info[:2]); print(sysconfig.get_path('purelib'))"

# Run by every start of that Python: it may do no harm, whatever has become of headway since. A shim that is whole says
# itself what it cannot do; half of one, left by an uninstall, must not put a line into every program's output.
_CODE = """
try:
    import os, sys
    if os.environ.get("HEADWAY_DISABLE") != "1" and os.path.exists({shim}):
        from _frozen_importlib_external import SourceFileLoader
        loader = SourceFileLoader("headway_inject", {shim})
        module = type(sys)("headway_inject")
        module.__file__ = {shim}
        exec(loader.get_code("headway_inject"), module.__dict__)
except Exception:
    pass
"""


@click.command()
@click.option("--python", default=sys.executable, help="The Python to measure. Default: the one that runs headway.")
@click.option("--remove", is_flag=True, help="Take back what an earlier call wrote.")
def inject(python: str, remove: bool) -> None:
    """Measure every program that one Python runs.

    For where `headway exec` cannot be put before a command. It writes one file to that Python's site-packages, and
    --remove deletes it. HEADWAY_DISABLE=1 excepts a program.
    """
    version, folder = _ask(python)
    file = folder / NAME
    if remove:
        _remove(file, python)
        click.echo(f"removed {file}: {python} is as it was")
        return
    if version < OLDEST:
        raise InputError(f"{python} is Python {version[0]}.{version[1]}, and headway measures 3.11 and newer.")
    _write(file)
    click.echo(f"wrote {file}: {python} measures what it runs from now on")
    click.echo(f"to undo it: headway inject --python {python} --remove")


def line() -> str:
    """The line that runs the shim: of a .pth file, Python executes what begins with `import`."""
    return f"import sys; exec({_CODE.format(shim=ascii(str(SHIM)))!a}, {{}})\n"


def _ask(python: str) -> tuple[tuple[int, ...], Path]:
    """A Python's version and its site-packages, from itself."""
    try:
        environ = os.environ | {"HEADWAY_DISABLE": "1"}
        done = subprocess.run([python, "-I", "-c", _ASK], capture_output=True, text=True, env=environ, timeout=60)
        version, folder = done.stdout.splitlines()
        return tuple(map(int, version.split())), Path(folder)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        why = error.strerror if isinstance(error, OSError) else "it does not answer like one"
        raise InputError(f"{python} is not a Python that can be asked where its packages are: {why}.") from error


def _write(file: Path) -> None:
    """Puts the line there in one piece: a Python that starts meanwhile sees all of it or nothing."""
    draft = file.with_name(f"{file.name}.{os.getpid()}.tmp")  # read by nobody: it does not end in .pth
    try:
        try:
            draft.write_text(line(), encoding="ascii")
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise PlatformError(
            f"{file} cannot be written ({error.strerror}). Use a virtual environment of your own, or `headway exec`."
        ) from error


def _remove(file: Path, python: str) -> None:
    try:
        file.unlink()
    except FileNotFoundError as error:
        raise InputError(f"there is no {file}: {python} was not injected, or is as it was already.") from error
    except OSError as error:
        raise PlatformError(f"{file} cannot be removed ({error.strerror}). Ask whoever owns that Python.") from error
