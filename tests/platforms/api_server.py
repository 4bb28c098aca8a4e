"""As much of Kubernetes as a pod sees of it: an API server on loopback over TLS, and the service account's folder."""

import base64
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET6
from tempfile import TemporaryDirectory
from typing import Any

NAMESPACE = "team-a"
POD = "llm-worker-0-x7k2p"
HOST_NAME = "llm-worker-0"
"""Pods of an indexed Job have a host name without the last part of the pod's."""

CA = """\
[req]
distinguished_name = name
x509_extensions = ca
prompt = no
[name]
CN = kubernetes
[ca]
basicConstraints = critical, CA:TRUE
"""
"""As bare as a managed cluster's may be: valid, but without the identifiers and usages that a strict check wants."""

SERVER = "subjectAltName = IP:127.0.0.1, IP:::1, DNS:kubernetes.default.svc\nextendedKeyUsage = serverAuth\n"


class ApiServer:
    """Answers for one pod, to whoever brings the token."""

    def __init__(self, folder: Path, pod: dict[str, Any], token: str | None = None) -> None:
        self.account = folder / "serviceaccount"
        self.token = token or bound_token()
        self.pod = pod
        self.status, self.body = 200, json.dumps(pod).encode()
        self.headers: dict[str, str] = {}
        self.asked: list[str] = []
        """Path of every request, after its answer is sent."""
        self.authorizations: list[str | None] = []
        self.port = 0
        self._folder = folder

    @contextmanager
    def serving(self, host: str = "127.0.0.1") -> Iterator["ApiServer"]:
        """The server, up while this is open."""
        key, certificate = make_certificates(self._folder, self.account)
        for name, text in (("namespace", NAMESPACE), ("token", self.token)):
            (self.account / name).write_text(text)
        kind = type("Server", (ThreadingHTTPServer,), {"address_family": AF_INET6} if ":" in host else {})
        server = kind((host, 0), partial(_Handler, self))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        # The handshake is left to the handler's thread: a client that does not trust us must not end the server.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        self.port, self.host = server.server_address[1], host
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    @property
    def environ(self) -> dict[str, str]:
        """What a container of the pod finds in its environment, and where its service account is mounted here."""
        return {
            "KUBERNETES_SERVICE_HOST": self.host,
            "KUBERNETES_SERVICE_PORT": str(self.port),
            "KUBERNETES_SERVICE_ACCOUNT": str(self.account),
            "HOSTNAME": HOST_NAME,
        }


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, server: ApiServer, *args: Any) -> None:
        self.api = server
        super().__init__(*args)

    def setup(self) -> None:
        self.request.settimeout(100)
        try:
            self.request.do_handshake()
        except OSError:
            self.close_connection = True
        super().setup()

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            pass  # the client went away, or never trusted us

    def do_GET(self) -> None:
        api = self.api
        api.authorizations.append(self.headers["Authorization"])
        status, body = api.status, api.body
        if self.headers["Authorization"] != f"Bearer {api.token}":
            status, body = 401, refusal(401, "Unauthorized")
        elif self.path != f"/api/v1/namespaces/{NAMESPACE}/pods/{api.pod['metadata']['name']}":
            status, body = 404, refusal(404, "NotFound")
        self.send_response(status)
        for name, value in (
            {"Content-Type": "application/json", "Content-Length": str(len(body))} | api.headers
        ).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        api.asked.append(self.path)

    def log_message(self, *args: object) -> None:
        pass


def pod(created_s: int, scheduled_s: int, running_s: int, name: str = POD) -> dict[str, Any]:
    """A running pod as `kubectl get pod -o json` shows it, with all times that could be taken for the right ones."""
    conditions = [
        condition("PodReadyToStartContainers", running_s),
        condition("Initialized", scheduled_s + 1),
        condition("Ready", running_s),
        condition("ContainersReady", running_s),
        condition("PodScheduled", scheduled_s),
    ]
    container = {
        "name": "trainer",
        "ready": True,
        "restartCount": 0,
        "state": {"running": {"startedAt": stamp(running_s)}},
    }
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": "0d8b260e-ef0e-45fb-be8e-ff44f97722e8",
            "creationTimestamp": stamp(created_s),
            "labels": {"batch.kubernetes.io/job-name": "llm-worker", "batch.kubernetes.io/job-completion-index": "0"},
            "managedFields": [{"manager": "kubelet", "operation": "Update", "time": stamp(running_s)}],
        },
        "spec": {"nodeName": "gpu-7", "hostname": HOST_NAME, "containers": [{"name": "trainer", "image": "trainer:1"}]},
        "status": {
            "phase": "Running",
            "conditions": conditions,
            "startTime": stamp(scheduled_s),
            "containerStatuses": [container],
        },
    }


def condition(kind: str, since_s: int, status: str = "True") -> dict[str, Any]:
    """One line of a pod's state."""
    return {"type": kind, "status": status, "lastProbeTime": None, "lastTransitionTime": stamp(since_s)}


def stamp(moment_s: int) -> str:
    """Seconds since 1970 as Kubernetes writes them."""
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def refusal(code: int, reason: str) -> bytes:
    """What the API server says instead of an answer."""
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": reason, "code": code}
    return json.dumps(status).encode()


def bound_token(pod: str = POD) -> str:
    """A service account's token as the kubelet projects it into a pod: a JWT that names the pod."""
    account = {"name": "default", "uid": "e6a8680e-d103-4cce-80ea-03acbbeacf7d"}
    claims = {
        "kubernetes.io": {"namespace": NAMESPACE, "pod": {"name": pod, "uid": "0d8b260e"}, "serviceaccount": account}
    }
    parts = (json.dumps({"alg": "RS256", "kid": "k"}).encode(), json.dumps(claims).encode(), b"\xfb\xff signature")
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


def make_certificates(folder: Path, account: Path, authority: str = "the cluster's") -> tuple[Path, Path]:
    """The server's key and certificate; the CA that signed it lies in the account's folder."""
    account.mkdir(parents=True)
    found = _certificates(authority)
    (account / "ca.crt").write_bytes(found["ca.crt"])
    key, certificate = folder / "server.key", folder / "server.crt"
    key.write_bytes(found[key.name])
    certificate.write_bytes(found[certificate.name])
    return key, certificate


@cache
def _certificates(authority: str) -> dict[str, bytes]:
    """Files by name, made once per process: each CA signs one server."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ca.conf").write_text(CA)
        (folder / "server.conf").write_text(SERVER)
        ca, ca_key, request, key, certificate = (
            folder / name for name in ("ca.crt", "ca.key", "server.csr", "server.key", "server.crt")
        )
        new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        openssl("req", "-x509", *new_key, "-config", folder / "ca.conf", "-keyout", ca_key, "-out", ca)
        openssl("req", *new_key, "-subj", "/CN=apiserver", "-keyout", key, "-out", request)
        signed_by = ["-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-extfile", folder / "server.conf"]
        openssl("x509", "-req", "-in", request, *signed_by, "-out", certificate)
        return {path.name: path.read_bytes() for path in (ca, key, certificate)}


def openssl(*words: object) -> None:
    """Runs one of its commands."""
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
