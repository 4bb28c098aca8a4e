"""Inside a pod: the API server, if it may be asked, knows since when the pod waited and when it got its node."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import HOST_NAME, NAMESPACE, POD, ApiServer, condition, make_certificates, pod, refusal, stamp
from slurm import free_ports
from small_job import began_s, is_scheduling_known, ledger, says_unknown, train, wait_until

from headway.accounting.rules import Bucket
from headway.events import scheduler
from headway.events.scheduler import parse_pod, scheduled
from headway.events.vocabulary import Scheduled

pytestmark = pytest.mark.needs("openssl")

CREATED, PLACED, RUNNING = 1794787200, 1794787320, 1794787380
S = 1_000_000_000


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """The API server that knows our pod, and time for its answers."""
    monkeypatch.setattr(scheduler, "TIMEOUT_S", 100.0)
    with ApiServer(tmp_path / "cluster", pod(CREATED, PLACED, RUNNING)).serving() as server:
        yield server


def asked(api: ApiServer, count: int) -> list[str]:
    """The paths asked for: the server notes each after its answer, when the client may have gone on already."""
    wait_until(lambda: len(api.asked) >= count)
    return api.asked


def ask(api: ApiServer, **more: str) -> Scheduled | None:
    return scheduled(api.environ | more, "", "", 7)


RIGHT = Scheduled(t_ns=7, eligible_wall_ns=CREATED * S, allocated_wall_ns=PLACED * S, source="kubernetes")


def test_a_pod_waits_from_its_creation_until_it_has_a_node(api: ApiServer) -> None:
    assert ask(api) == RIGHT
    assert asked(api, 1) == [f"/api/v1/namespaces/{NAMESPACE}/pods/{POD}"]
    assert api.authorizations == [f"Bearer {api.token}"]


def test_a_pods_wait_is_in_the_ledger(home: Path) -> None:
    now = int(time.time())
    # Image pull and container start lie between the node and the process: they are hardware setup.
    with ApiServer(home / "cluster", pod(now - 300, now - 100, now - 1)).serving() as api:
        assert train(home, until=is_scheduling_known, **api.environ) == ""
    told = ledger()
    start_ns = told.attempts[0].attempt.first_start_ns
    assert told.notes == []
    assert told.begin_ns == (now - 300) * S
    assert told.buckets[Bucket.START_SCHEDULING] == 200 * S
    assert told.buckets[Bucket.START_HARDWARE_SETUP] == start_ns - (now - 100) * S
    assert start_ns <= began_s(home) * S


# --- which pod -----------------------------------------------------------------------------------------------------


def test_the_token_names_the_pod_where_the_host_name_does_not(api: ApiServer) -> None:
    assert HOST_NAME != POD
    assert ask(api, HOSTNAME="the-node-of-a-pod-with-the-hosts-network") == RIGHT
    assert ask(api, POD_NAME="llm") == RIGHT


@pytest.mark.parametrize("token", ["opaque", "a.b.c", "e30.bnVsbA.x", "e30.e30.x", "\N{FIRE}.\N{FIRE}.\N{FIRE}", ".."])
def test_a_token_that_names_no_pod_leaves_it_to_the_environment(api: ApiServer, token: str) -> None:
    (api.account / "token").write_text(token)
    assert ask(api, POD_NAME="from-the-downward-api", HOSTNAME="llm-0") is None
    assert ask(api, HOSTNAME="llm-0") is None
    pods = [path.rpartition("/")[2] for path in asked(api, 2 if token.isascii() else 0)]
    assert pods == (["from-the-downward-api", "llm-0"] if token.isascii() else [])
    environ = {name: value for name, value in api.environ.items() if name != "HOSTNAME"}
    assert scheduled(environ, "", "", 0) is None


@pytest.mark.parametrize("variable", ["POD_NAME", "HOSTNAME"])
def test_a_pod_that_is_named_by_the_environment_is_found(tmp_path: Path, variable: str) -> None:
    name = "elastic-0"
    with ApiServer(tmp_path / "cluster", pod(CREATED, PLACED, RUNNING, name), token="opaque").serving() as api:
        assert ask(api, **{variable: name}) == RIGHT


def trust_somebody_else(api: ApiServer, folder: Path) -> None:
    """The account's CA becomes one that did not sign the server's certificate."""
    make_certificates(folder, folder / "stranger", "a stranger's")
    (folder / "stranger" / "ca.crt").replace(api.account / "ca.crt")


# --- no answer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503])
def test_a_refusal_means_that_nothing_is_known(api: ApiServer, status: int) -> None:
    api.status, api.body = status, refusal(status, "Forbidden")
    assert ask(api) is None
    assert len(asked(api, 1)) == 1


@pytest.mark.parametrize("problem", ["forbidden", "untrusted", pytest.param("garbage", marks=pytest.mark.thorough)])
def test_without_an_answer_the_job_goes_on_and_scheduling_is_unknown(home: Path, problem: str) -> None:
    with ApiServer(home / "cluster", pod(CREATED, PLACED, RUNNING)).serving() as api:
        if problem == "forbidden":
            api.status, api.body = 403, refusal(403, "Forbidden")
        elif problem == "garbage":
            api.body = b'[{"status": "\xff'
        else:
            trust_somebody_else(api, home)
        until = (lambda: True) if problem == "untrusted" else (lambda: bool(api.asked))
        said = train(home, until, **api.environ)
    assert said == ""
    assert says_unknown(ledger())


def test_a_server_that_another_ca_signed_is_told_nothing(api: ApiServer, tmp_path: Path) -> None:
    trust_somebody_else(api, tmp_path)
    assert ask(api) is None
    assert api.authorizations == []


def test_a_server_of_another_name_is_told_nothing(api: ApiServer) -> None:
    assert ask(api, KUBERNETES_SERVICE_HOST="localhost") is None
    assert api.authorizations == []


def test_a_server_that_never_answers_is_given_up(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert ask(api, KUBERNETES_SERVICE_PORT=str(silent.getsockname()[1])) is None


def test_a_job_does_not_wait_for_a_server_that_never_answers(home: Path) -> None:
    with (
        ApiServer(home / "cluster", pod(CREATED, PLACED, RUNNING)).serving() as api,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        connected = threading.Event()
        held: list[socket.socket] = []

        def hold() -> None:
            held.append(silent.accept()[0])
            connected.set()

        threading.Thread(target=hold, daemon=True).start()
        environ = api.environ | {"KUBERNETES_SERVICE_PORT": str(silent.getsockname()[1])}
        assert train(home, connected.is_set, **environ) == ""
        held[0].close()
    assert says_unknown(ledger())


def test_nobody_listening_or_no_such_port_means_that_nothing_is_known(api: ApiServer) -> None:
    for port in (str(free_ports(1)[0]), "0", "tcp://10.0.0.1:443", "99999999", ""):
        assert ask(api, KUBERNETES_SERVICE_PORT=port) is None


def test_something_that_does_not_speak_http_means_that_nothing_is_known(api: ApiServer) -> None:
    api.headers = {"Content-Length": "999999"}
    assert ask(api) is None
    api.headers = {"Content-Length": "12", "Transfer-Encoding": "chunked"}
    assert ask(api) is None


@pytest.mark.parametrize("name", ["token", "namespace", "ca.crt"])
def test_without_a_service_account_nothing_is_known(api: ApiServer, name: str) -> None:
    (api.account / name).write_bytes(b"\xff\0\n\n")
    assert ask(api) is None
    (api.account / name).unlink()
    assert ask(api) is None


# --- the way there -------------------------------------------------------------------------------------------------


def test_the_server_is_asked_directly_whatever_proxy_is_set(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setenv("no_proxy", "")
    assert ask(api) == RIGHT


def test_the_token_does_not_follow_a_redirect(api: ApiServer, tmp_path: Path) -> None:
    with ApiServer(tmp_path / "elsewhere", api.pod).serving() as other:
        api.status = 302
        api.headers = {"Location": f"https://127.0.0.1:{other.port}/api/v1/namespaces/{NAMESPACE}/pods/{POD}"}
        both = (other.account / "ca.crt").read_text() + (api.account / "ca.crt").read_text()
        (api.account / "ca.crt").write_text(both)
        assert ask(api) is None
        assert other.authorizations == []


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_a_cluster_of_ipv6_is_asked_too(tmp_path: Path) -> None:
    with ApiServer(tmp_path / "cluster", pod(CREATED, PLACED, RUNNING)).serving("::1") as api:
        assert ask(api) == RIGHT


# --- what a pod may look like --------------------------------------------------------------------------------------


def without(pod: dict[str, Any], *path: str) -> dict[str, Any]:
    inner = pod
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return pod


def with_conditions(*conditions: object) -> dict[str, Any]:
    whole = pod(CREATED, PLACED, RUNNING)
    whole["status"]["conditions"] = list(conditions)
    return whole


UNKNOWN = {
    "no metadata": without(pod(CREATED, PLACED, RUNNING), "metadata"),
    "no creation": without(pod(CREATED, PLACED, RUNNING), "metadata", "creationTimestamp"),
    "no status": without(pod(CREATED, PLACED, RUNNING), "status"),
    "no conditions": without(pod(CREATED, PLACED, RUNNING), "status", "conditions"),
    "gated": with_conditions(condition("PodScheduled", PLACED, "False")),
    "conditions of another kind": with_conditions(condition("Ready", PLACED), None, 3, "PodScheduled", {}),
    "a condition without its time": with_conditions(
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": None}
    ),
    "null conditions": pod(CREATED, PLACED, RUNNING) | {"status": {"conditions": None}},
    "a list": [],
    "null": None,
    "a number": 12,
}


@pytest.mark.parametrize("shape", UNKNOWN)
def test_a_pod_without_the_two_times_means_that_nothing_is_known(api: ApiServer, shape: str) -> None:
    assert parse_pod(UNKNOWN[shape]) is None
    api.body = json.dumps(UNKNOWN[shape]).encode()
    assert ask(api) is None


def test_a_pod_whose_times_are_no_times_means_that_nothing_is_known(api: ApiServer) -> None:
    api.body = json.dumps(api.pod).replace(stamp(PLACED), "2026-13-45T00:00:00Z").encode()
    assert ask(api) is None
