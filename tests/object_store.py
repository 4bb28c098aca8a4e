"""A real S3 server on loopback, one per test run, and a line to it that can be broken.

A conftest.py or a test file has the fixtures that it imports from here.
"""

import contextlib
import http.client
import json
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from broken_line import Line

import shared

START_S = 120.0


@pytest.fixture(scope="session")
def s3_server() -> str:
    """The URL of a server that speaks S3. All workers of a test run share it; the guard ends it."""
    pytest.importorskip("moto", reason="needs moto: pip install 'moto[server]' s3fs")
    pytest.importorskip("s3fs", reason="needs s3fs: pip install 'moto[server]' s3fs")
    return shared.once("s3", _start)


def _start() -> str:
    command = [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    path = shared.folder() / "s3.log"
    with path.open("w") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    deadline = time.monotonic() + START_S
    while not (found := re.search(r"http://[\d.]+:\d+", path.read_text())):
        assert process.poll() is None, f"the S3 server did not start: {path.read_text()}"
        assert time.monotonic() < deadline, "the S3 server does not say where it listens"
        time.sleep(0.05)
    return found[0]


def _request(server: str, method: str, path: str) -> bytes:
    connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=120)
    with contextlib.closing(connection):
        headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"}
        connection.request(method, path, headers=headers)
        return connection.getresponse().read()


@pytest.fixture
def s3_root(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty root in a bucket of its own; child processes reach it as well."""
    bucket = f"test-{secrets.token_hex(6)}"
    _request(s3_server, "PUT", f"/{bucket}")
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    return f"s3://{bucket}/job"


@pytest.fixture
def fails_fast(s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The S3 clients of this process report an error after one try, those of child processes after a few quick ones."""
    import fsspec.config

    once = {"config_kwargs": {"retries": {"mode": "standard", "max_attempts": 1}}}
    monkeypatch.setenv("FSSPEC_S3", json.dumps(once))
    monkeypatch.setitem(fsspec.config.conf, "s3", once)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)


@pytest.fixture
def unfinished_uploads(s3_server: str, s3_root: str) -> Callable[[], int]:
    """Returns how many uploads were begun at the server, and neither completed nor aborted."""
    bucket = s3_root.split("/")[2]
    return lambda: _request(s3_server, "GET", f"/{bucket}?uploads").count(b"<UploadId>")


@pytest.fixture
def line(s3_server: str, s3_root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    """What lies between S3 clients and the server from now on."""
    with Line(s3_server) as line:
        threading.Thread(target=line.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", line.url)
        try:
            yield line
        finally:
            line.over.set()
            line.shutdown()
