"""A whole Slurm on loopback for one test session: munged, slurmctld and slurmd, run from one folder, without systemd.

Nothing outside the folder is read or written: configuration, key, state and logs lie in it, the ports are free ones.
Jobs start within a second or two, and a requeued job waits about six seconds instead of two minutes.
"""

import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import shared

CPUS = 4
"""What the only node claims to have, whatever the machine has."""

PATIENCE_S = 500.0
"""How long anything may take on a busy machine."""

CONFIG = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
# How long a credential lives is how long a requeued job is held back.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
KillWait=2
JobRequeue=1
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=main Nodes={host} Default=YES State=UP
"""


class Slurm:
    """Starts and stops the three daemons, and says to Slurm what its commands do. One node, one partition."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def environ(self) -> dict[str, str]:
        """The environment in which Slurm's commands talk to this Slurm, and to no other around."""
        others = ("SLURM", "SBATCH", "SRUN", "HEADWAY_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        return kept | {"SLURM_CONF": str(self.config)}

    # --- the daemons ---

    def start(self) -> "Slurm":
        """All three daemons, and the node ready for jobs."""
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        values = {"folder": self.folder, "host": host, "user": getpass.getuser(), "ports": free_ports(2), "cpus": CPUS}
        self.config.write_text(CONFIG.format_map(values))
        self._start_munge()
        self._start("slurmctld", "-D", "-f", str(self.config))
        self._start("slurmd", "-D", "-f", str(self.config))
        sinfo = ("sinfo", "--noheader", "--format=%T")
        self._wait(lambda: self.ask(*sinfo, check=False).strip() == "idle", "an idle node")
        return self

    def stop(self) -> None:
        """Nothing of it is left: no job, no daemon, no file."""
        if len(self._daemons) == 3:
            self.ask("scancel", "--user", getpass.getuser(), check=False)
            self._wait(lambda: not self.ask("squeue", "--noheader", check=False).strip(), "an empty queue", must=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        deadline = time.monotonic() + PATIENCE_S
        while (left := self._left_behind()) and time.monotonic() < deadline:  # none may write while the folder goes
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        shutil.rmtree(self.folder)

    def _start_munge(self) -> None:
        key, munge = self.folder / "munge.key", self.folder / "munge.socket"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = [f"--key-file={key}", f"--socket={munge}"]
        files += [f"--{name}-file={self.folder}/munged.{name}" for name in ("pid", "log", "seed")]
        # It would rather not have its socket below a folder that only its own user can enter.
        self._start("munged", "--foreground", "--force", *files)
        self._wait(munge.exists, "munged's socket")

    def _start(self, *command: str) -> None:
        # A session of their own, so that Ctrl-C reaches them by way of `stop`.
        with open(self.folder / f"{command[0]}.out", "wb") as out:
            daemon = subprocess.Popen(
                command, env=self.environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self._daemons.append(daemon)

    def _left_behind(self) -> list[int]:
        """Processes of jobs that outlived the daemons: each has the configuration's name in its environment."""
        mark, found = f"SLURM_CONF={self.config}".encode(), []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in environ.read_bytes().split(b"\0"):
                    found.append(int(environ.parent.name))
            except OSError:
                continue  # another user's, or gone by now
        return found

    # --- the commands ---

    def ask(self, *command: str, check: bool = True, stdin: str = "", **environ: str) -> str:
        """What one of Slurm's commands prints."""
        around = self.environ | environ
        done = subprocess.run(command, env=around, input=stdin, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0 or not check, f"{command} exited with {done.returncode}: {done.stderr}"
        return done.stdout

    def submit(self, script: str, *options: str, environ: Mapping[str, str] | None = None) -> str:
        """The id of a new batch job that runs `script` in a shell."""
        options = ("--parsable", f"--output={self.folder}/%j.out", "--open-mode=append", *options)
        return self.ask("sbatch", *options, stdin=f"#!/bin/sh\n{script}\n", **(environ or {})).strip()

    def fill(self) -> str:
        """The id of a running job that takes the whole node until it is cancelled."""
        job = self.submit("exec sleep 600", "--exclusive")
        self.wait_for(job, "RUNNING")
        return job

    def cancel(self, job: str) -> None:
        """Ends a job, or takes it out of the queue."""
        self.ask("scancel", job)

    def requeue(self, job: str) -> None:
        """Kills a job and puts it back into the queue, under the same id."""
        self.ask("scontrol", "requeue", job)

    def state(self, job: str) -> str:
        """Such as `PENDING`, `RUNNING` or `COMPLETED`."""
        return self._field(job, "JobState")

    def eligible_s(self, job: str) -> int:
        """Since when the job could have run, in seconds since 1970."""
        return int(self._field(job, "EligibleTime"))

    def started_s(self, job: str) -> int:
        """When the job got the node, in seconds since 1970."""
        return int(self._field(job, "StartTime"))

    def output(self, job: str) -> str:
        """What the job's script has printed so far."""
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def wait_for(self, job: str, state: str) -> None:
        """Until the job is in that state; AssertionError with its output if it ends in another."""

        def reached() -> bool:
            found = self.state(job)
            over = found in ("CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT")
            assert found == state or not over, f"job {job} is {found}, not {state}:\n{self.output(job)}"
            return found == state

        self._wait(reached, f"job {job} to be {state}")

    def _field(self, job: str, name: str) -> str:
        # Times as seconds since 1970: what headway is held against must not know of time zones.
        text = self.ask("scontrol", "--oneliner", "show", "job", job, SLURM_TIME_FORMAT="%s")
        match = re.search(rf"(?m)^JobId={job} .*? {name}=(\S+)", text)
        assert match, f"no {name} of job {job} in {text!r}"
        return match[1]

    def _wait(self, ready: Callable[[], bool], what: str, must: bool = True) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            dead = [daemon.args[0] for daemon in self._daemons if daemon.poll() is not None]  # type: ignore[index]
            if dead or time.monotonic() > deadline:
                assert not must, f"waited for {what}; dead: {dead or 'none'}\n{self._said()}"
                return
            time.sleep(0.1)

    def _said(self) -> str:
        """The last words of each daemon."""
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("*.out")))


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on."""
    return [shared.free_port() for _ in range(count)]
