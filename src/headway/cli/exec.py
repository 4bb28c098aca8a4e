"""`headway exec`: any command, measured, and otherwise as if it had been called alone."""

import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import click

import headway
from headway.config import Settings
from headway.errors import InputError
from headway.events.clock import Clock
from headway.events.process import command_line, describe, job_name, shares_no_id
from headway.events.vocabulary import clean_text
from headway.instrument.witness import leave_witness

SITE = Path(headway.__file__).absolute().parent / "instrument" / "site"
"""Holds the `sitecustomize` that every Python of the job runs first, and nothing else."""

_LAUNCHERS = ("torch.distributed.", "accelerate", "deepspeed")


class NotFound(click.ClickException):
    """There is no such command. The exit code is the one that shells have for it."""

    exit_code = 127


class NotExecutable(click.ClickException):
    """The command is there, and is none."""

    exit_code = 126


@click.command("exec", context_settings={"allow_interspersed_args": False})
@click.option("--job", help="Name of the job. Default: the scheduler's id, or a new name after the script.")
@click.option("--compile-cache", metavar="URL", help="Folder or URL to keep compiled code in, and to take it from.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_command(job: str | None, compile_cache: str | None, command: tuple[str, ...]) -> None:
    """Run any COMMAND, unchanged, and measure it.

    `python train.py`, `torchrun …`, `srun …`, a shell script: every Python ≥ 3.11 that COMMAND starts is measured. The
    command takes headway's place, and so keeps its exit code, signals, terminal and process id.
    """
    environ = _given_environment()
    program = find_program(command[0], environ)
    if environ.get("HEADWAY_DISABLE") != "1":
        environ = job_environment(environ, job, command, compile_cache)
        _announce(environ, Settings.from_environment(environ), command)
    _become(program, command, environ)


# --- the job's environment -------------------------------------------------------------------------------------------


def job_environment(
    environ: Mapping[str, str], job: str | None, command: Sequence[str], compile_cache: str | None = None
) -> dict[str, str]:
    """What a command's processes need to know to be measured as one job."""
    settings = Settings.from_environment(environ)
    _ = settings.fast_start_items  # an unknown one is told here, and not by every process
    if job == "":
        raise InputError("a job needs a name: --job is empty. Give one, or leave --job out.")
    changed = {"PYTHONPATH": python_path(environ.get("PYTHONPATH", ""))}
    changed["HEADWAY_JOB"] = job or settings.job or name_of(command, environ)
    if environ.get("HEADWAY_HOME"):  # absolute: the command may go to another folder
        changed["HEADWAY_HOME"] = str(settings.home_folder)
    if settings.spool is not None:
        changed["HEADWAY_SPOOL"] = str(settings.spool_folder)
    if store := compile_cache or settings.compile_cache:
        changed["HEADWAY_COMPILE_CACHE"] = _store(store)
    return {**environ, **changed}


def _store(url: str) -> str:
    """The place for compiled code; InputError if there can be none."""
    scheme, is_url, _ = url.partition("://")
    if not is_url:
        return os.path.abspath(os.path.expanduser(url))
    from fsspec import available_protocols  # type: ignore[import-untyped]

    if scheme not in available_protocols():
        raise InputError(
            f"{url} is no place for compiled code: {scheme}:// is not known. Give a folder, or s3://bucket/x."
        )
    return url


def python_path(given: str) -> str:
    """PYTHONPATH with our folder in front, once, and what was there as it was. An empty entry would be the working
    directory: there is none that was not there before."""
    others = [entry for entry in given.split(os.pathsep) if entry != str(SITE)] if given else []
    return os.pathsep.join([str(SITE), *others])


def name_of(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """The job's name where nobody gave one: the scheduler's id, the launcher's, or a new one after the script."""
    environ = dict(environ)
    if (run := option_of(command, "rdzv-id")) not in ("", "none"):  # all nodes of the job are given the same
        environ["TORCHELASTIC_RUN_ID"] = run
    if nodes := option_of(command, "nnodes"):
        environ["GROUP_WORLD_SIZE"] = nodes.rpartition(":")[2]
    if shares_no_id(environ):
        _say("several nodes, and no id they share: each is a job of its own. Set HEADWAY_JOB, or --rdzv-id.")
    return job_name(environ, script=script_of(command))


def script_of(command: Sequence[str]) -> str:
    """What a command runs in the end: the first script or module in it, and without one the command itself."""
    words = " ".join(command).split()  # what is behind `sh -c` is one word, with the script in it
    for before, word in zip(["", *words], words, strict=False):
        if word.endswith(".py"):
            return Path(word).name
        if before == "-m" and not word.startswith(_LAUNCHERS):
            return word.rpartition(".")[2]
    shell_scripts = (word for word in words if word.endswith(".sh"))
    return Path(next(shell_scripts, command[0])).name


def option_of(command: Sequence[str], name: str) -> str:
    """The value of a launcher's option, in each of its spellings; empty if it is not given."""
    for word, after in zip(command, [*command[1:], ""], strict=False):
        key, is_one_word, value = word.partition("=")
        if key.replace("_", "-") == f"--{name}":
            return value if is_one_word else after
    return ""


# --- becoming the command --------------------------------------------------------------------------------------------


def find_program(name: str, environ: Mapping[str, str]) -> str:
    """Where the command is, found as a shell would find it; NotFound or NotExecutable if it is not to be."""
    folders = [""] if "/" in name else os.get_exec_path(environ)
    places = [os.path.join(folder, name) for folder in folders]
    files = [place for place in places if os.path.isfile(place)]
    for file in files:
        if os.access(file, os.X_OK):
            return file
    if files:
        raise _not_executable(files[0])
    if "/" in name and os.path.isdir(name):
        raise NotExecutable(f"{name} is a folder, not a command.")
    where = "it is not there" if "/" in name else "it is in no folder of PATH"
    hint = f" To run a script: headway exec python {name}" if name.endswith(".py") and os.path.isfile(name) else ""
    raise NotFound(f"cannot run {name}: {where}.{hint}")


def _not_executable(file: str) -> NotExecutable:
    hint = f"Did you mean: headway exec python {file}" if file.endswith(".py") else "Make it one with chmod +x."
    return NotExecutable(f"{file} is not executable. {hint}")


def _announce(environ: Mapping[str, str], settings: Settings, command: Sequence[str]) -> None:
    """Leaves a witness of the command that this process is about to become, and says what the job is called."""
    job = environ["HEADWAY_JOB"]
    try:
        process = describe(environ, job, Clock(), node=settings.node, attempt=settings.attempt, role="launcher")
        process = replace(process, program=clean_text(script_of(command)), command=command_line(command))
        note = leave_witness(process, settings)
    except OSError as error:  # the command runs all the same
        note = f"nobody watches the command ({error}): its end is not measured."
    if sys.stderr is not None and sys.stderr.isatty():
        _say(f"job {clean_text(job)}")
    if note:
        _say(note)


def _become(program: str, command: tuple[str, ...], environ: Mapping[str, str]) -> NoReturn:
    # Python ignores these, and what is ignored stays so through `exec`.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(program, command, environ)
    except OSError as error:
        if error.errno == errno.ENOEXEC and program.endswith(".py"):
            raise _not_executable(program) from error
        if error.errno == errno.ENOEXEC:  # a script without a first line that says by what: by the shell, as ever
            os.execve("/bin/sh", ["sh", program, *command[1:]], environ)
        raise NotExecutable(f"{program} cannot be executed: {error.strerror}.") from error


def _given_environment() -> dict[str, str]:
    """The environment as it was given, without what Python adds to it in the C locale."""
    environ = dict(os.environ)
    if b"\0LC_CTYPE=" not in b"\0" + Path("/proc/self/environ").read_bytes():
        environ.pop("LC_CTYPE", None)
    return environ


def _say(text: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError):  # nobody reads it
            print(f"headway: {text}", file=sys.stderr, flush=True)
