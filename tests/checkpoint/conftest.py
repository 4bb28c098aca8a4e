"""A real S3 server on loopback, a line to it that can be broken, and file systems of many kinds."""

import contextlib
import ctypes
import http.client
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from broken_line import Line
from file_systems import bound, mounted
from keeping import end_keepers

from headway.storage import Storage, open_storage

# --- an object store -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of a server that speaks S3, in a process of its own."""
    pytest.importorskip("moto", reason="needs moto: pip install 'moto[server]' s3fs")
    pytest.importorskip("s3fs", reason="needs s3fs: pip install 'moto[server]' s3fs")
    command = [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=_die_with_the_tests
    ) as process:
        assert process.stdout
        told = next((found[0] for line in process.stdout if (found := re.search(r"http://[\d.]+:\d+", line))), None)
        assert told, "the S3 server did not start"
        threading.Thread(target=process.stdout.read, daemon=True).start()
        try:
            yield told
        finally:
            process.kill()


def _die_with_the_tests() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: tests that are killed tidy nothing up


def _request(server: str, method: str, path: str) -> bytes:
    connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=30)
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
def unfinished_uploads(s3_server: str, s3_root: str) -> Callable[[], int]:
    """How many uploads the server holds that were begun, and neither completed nor aborted."""
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


# --- file systems ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    with mounted(tmp_path / "small", "size=1m,mode=700") as folder:
        yield folder


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A file system that cannot be written, not even by root."""
    with mounted(tmp_path / "read-only", "size=1m,mode=700") as folder:
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        yield folder


@pytest.fixture(params=["disk", "tmpfs", "fuse"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on each of the kinds of file systems that treat direct writes differently."""
    if request.param == "disk":
        (tmp_path / "disk").mkdir()
        yield tmp_path / "disk"
    elif request.param == "tmpfs":
        with mounted(tmp_path / "tmpfs", "size=64m,mode=700") as folder:
            yield folder
    else:
        (tmp_path / "below").mkdir()
        with bound(tmp_path / "below", tmp_path / "above") as folder:
            yield folder


# --- roots -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path, home: Path) -> Iterator[Path]:
    """A folder for checkpoints. Whoever keeps some of it in memory ends with the test."""
    yield tmp_path / "checkpoints"
    end_keepers(tmp_path)


@pytest.fixture(params=["folder", "s3", "memory"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty root in a folder, in S3, and in a store that knows no whole puts."""
    if request.param == "folder":
        return open_storage(tmp_path / "root")
    if request.param == "s3":
        return open_storage(request.getfixturevalue("s3_root"))
    return open_storage(f"memory://{secrets.token_hex(6)}/job")
