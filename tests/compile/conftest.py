"""The S3 server and the file systems that the tests of checkpoints have."""

import runpy
from pathlib import Path

_there = runpy.run_path(str(Path(__file__).parent.parent / "checkpoint" / "conftest.py"))
s3_server, s3_root, line = _there["s3_server"], _there["s3_root"], _there["line"]
small_disk, read_only = _there["small_disk"], _there["read_only"]
