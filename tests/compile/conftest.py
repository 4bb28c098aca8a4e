"""The S3 server, the line to it, and the file systems that the tests of checkpoints have."""

from file_systems import read_only, small_disk  # noqa: F401

from object_store import line, s3_root, s3_server  # noqa: F401
