"""When the platform gave the job its hardware: asked of Slurm, of Kubernetes, or told by two variables."""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from headway.events.vocabulary import Scheduled
from headway.machine import answer_of

if TYPE_CHECKING:
    from subprocess import CompletedProcess

TIMEOUT_S = 10.0
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def scheduled(environ: Mapping[str, str], eligible: str, allocated: str, now_ns: int) -> Scheduled | None:
    """What is known of this attempt's wait for hardware; None where nobody can tell. ValueError if told nonsense."""
    found: tuple[int, int] | None
    if eligible or allocated:
        found, source = (_moment_ns(eligible or allocated), _moment_ns(allocated or eligible)), "environment"
    elif "SLURM_JOB_ID" in environ:
        found, source = _ask_slurm(environ), "slurm"
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
    # Nine or ten digits reach from 1973 to 2286. Eight may be a date, thirteen are milliseconds.
    if match := re.fullmatch(r"(\d{9,10})(?:\.(\d+))?", text):
        return int(match[1]) * 1_000_000_000 + int((match[2] or "")[:9].ljust(9, "0"))
    try:
        moment = datetime.fromisoformat(text)
        problem = "has no time zone" if moment.tzinfo is None else ""
    except ValueError:
        problem = "is not a time"
    if problem:
        raise ValueError(f"{text[:40]!r} {problem}: write it as seconds since 1970, or like 2026-04-17T09:30:00+00:00")
    return (moment - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1) * 1000


# --- Slurm ---------------------------------------------------------------------------------------------------------


def _ask_slurm(environ: Mapping[str, str]) -> tuple[int, int] | None:
    # scontrol prints local time without a zone; asked for UTC, it prints that.
    env = {**environ, "TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}
    done = scontrol(env, TIMEOUT_S, "--oneliner", "show", "job", environ["SLURM_JOB_ID"])
    return parse_slurm(done.stdout) if done is not None and done.returncode == 0 else None


def scontrol(environ: Mapping[str, str], timeout_s: float, *words: str) -> "CompletedProcess[str] | None":
    """What Slurm's own command answers; None if there is none, or it does not answer in time."""
    return answer_of(["scontrol", *words], timeout_s, environ)


def slurm_fields(text: str) -> dict[str, str]:
    """The fields of the first record that `scontrol --oneliner` printed, each as it was told first: commands and
    comments, which may look like fields, come last."""
    return dict(reversed(re.findall(r"(?:^|\s)(\w+)=(\S*)", text.partition("\n")[0])))


def parse_slurm(text: str) -> tuple[int, int] | None:
    """Eligible and start time in `scontrol show job` output of UTC times, in nanoseconds since 1970."""
    moments = []
    for name in ("EligibleTime", "StartTime"):
        match = re.search(rf"\b{name}=(\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
        if match is None:
            return None
        moments.append(_moment_ns(match[1] + "+00:00"))
    return moments[0], moments[1]


# --- Kubernetes ----------------------------------------------------------------------------------------------------


def _ask_kubernetes(environ: Mapping[str, str]) -> tuple[int, int] | None:
    import http.client
    import ssl
    from contextlib import closing

    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    folder = Path(environ.get("KUBERNETES_SERVICE_ACCOUNT", _SERVICE_ACCOUNT))
    try:
        namespace, token = ((folder / name).read_text().strip() for name in ("namespace", "token"))
        pod = _pod_in(token) or environ.get("POD_NAME") or environ["HOSTNAME"]
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        # Python 3.13 began to refuse the CAs of many clusters for extensions they lack; the chain is verified still.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        # Not urllib, which goes by proxies meant for the world outside, and takes the token along when redirected.
        with closing(http.client.HTTPSConnection(host, int(port), timeout=TIMEOUT_S, context=context)) as connection:
            path, headers = f"/api/v1/namespaces/{namespace}/pods/{pod}", {"Authorization": f"Bearer {token}"}
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return parse_pod(json.load(answer)) if answer.status == 200 else None
    except (OSError, http.client.HTTPException, KeyError, ValueError):
        return None


def _pod_in(token: str) -> str | None:
    """The pod a service account's token is bound to, if any; an indexed Job's pods do not have it as host name."""
    from base64 import urlsafe_b64decode

    try:
        claims = json.loads(urlsafe_b64decode(token.split(".")[1] + "=="))
    except (IndexError, ValueError):
        return None
    match claims:
        case {"kubernetes.io": {"pod": {"name": str(name)}}}:
            return name
    return None


def parse_pod(pod: object) -> tuple[int, int] | None:
    """When the pod was created and when it was given a node, in nanoseconds since 1970. ValueError if at no time."""
    match pod:
        case {"metadata": {"creationTimestamp": str(created)}, "status": {"conditions": [*conditions]}}:
            for condition in conditions:
                match condition:
                    case {"type": "PodScheduled", "status": "True", "lastTransitionTime": str(placed)}:
                        return _moment_ns(created), _moment_ns(placed)
    return None
