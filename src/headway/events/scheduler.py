"""When the platform gave the job its hardware: asked of Slurm, of Kubernetes, or told by two variables."""

import json
import os
import re
import ssl
import subprocess
import urllib.request
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from headway.events.vocabulary import Scheduled

TIMEOUT_S = 10.0
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def scheduled(environ: Mapping[str, str], eligible: str, allocated: str, now_ns: int) -> Scheduled | None:
    """What is known of this attempt's wait for hardware; None where nobody can tell. ValueError if told nonsense."""
    found: tuple[int, int] | None
    if eligible or allocated:
        found, source = (_moment_ns(eligible or allocated), _moment_ns(allocated or eligible)), "environment"
    elif "SLURM_JOB_ID" in environ:
        found, source = _ask_slurm(environ["SLURM_JOB_ID"]), "slurm"
    elif "KUBERNETES_SERVICE_HOST" in environ:
        found, source = _ask_kubernetes(environ), "kubernetes"
    else:
        return None
    if found is None:
        return None
    return Scheduled(t_ns=now_ns, eligible_wall_ns=found[0], allocated_wall_ns=max(found), source=source)


def is_askable(environ: Mapping[str, str]) -> bool:
    """Whether this process runs under a platform that keeps timestamps."""
    return "SLURM_JOB_ID" in environ or "KUBERNETES_SERVICE_HOST" in environ


def _moment_ns(text: str) -> int:
    """Seconds since 1970, or ISO 8601 with a zone, as nanoseconds since 1970."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return round(float(text) * 1e9)
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone: write it as seconds since 1970, or like 2026-04-17T09:30:00+00:00")
    return round(moment.timestamp() * 1e9)


def _ask_slurm(job: str) -> tuple[int, int] | None:
    # scontrol prints local time without a zone; asked for UTC, it prints that.
    env = {**os.environ, "TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}
    command = ["scontrol", "--oneliner", "show", "job", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_slurm(done.stdout)


def parse_slurm(text: str) -> tuple[int, int] | None:
    """Eligible and start time in `scontrol show job` output of UTC times, in nanoseconds since 1970."""
    moments = []
    for name in ("EligibleTime", "StartTime"):
        match = re.search(rf"\b{name}=(\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
        if match is None:
            return None
        moments.append(_moment_ns(match[1] + "+00:00"))
    return moments[0], moments[1]


def _ask_kubernetes(environ: Mapping[str, str]) -> tuple[int, int] | None:
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    folder = Path(environ.get("KUBERNETES_SERVICE_ACCOUNT", _SERVICE_ACCOUNT))
    try:
        namespace, token = ((folder / name).read_text().strip() for name in ("namespace", "token"))
        pod = environ.get("POD_NAME") or environ["HOSTNAME"]
        request = urllib.request.Request(
            f"https://{host}:{port}/api/v1/namespaces/{namespace}/pods/{pod}", headers={"Authorization": f"Bearer {token}"}
        )
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            return parse_pod(json.load(answer))
    except (OSError, KeyError, ValueError):
        return None


def parse_pod(pod: dict[str, object]) -> tuple[int, int] | None:
    """When the pod was created and when it was given a node, in nanoseconds since 1970."""
    metadata, status = pod.get("metadata"), pod.get("status")
    if not isinstance(metadata, dict) or not isinstance(status, dict):
        return None
    placed = [c for c in status.get("conditions", []) if c.get("type") == "PodScheduled" and c.get("status") == "True"]
    if "creationTimestamp" not in metadata or not placed:
        return None
    return _moment_ns(metadata["creationTimestamp"]), _moment_ns(placed[0]["lastTransitionTime"])
