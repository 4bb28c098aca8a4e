"""ml-goodput-measurement without its cloud: it needs a billed project, and its best case is to have none.

As in its own tests, the client is a mock. Its handler, which would queue, serialise and send, is a list's `append`, so
what is measured is the library's own code and nothing of the network's.
"""

from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any
from unittest import mock

from bench.measure import INSTALL


def library() -> ModuleType:
    """The package; SystemExit if it is not installed."""
    try:
        from ml_goodput_measurement.src import goodput
    except ImportError:
        raise SystemExit(f"ml-goodput-measurement is missing: {INSTALL}") from None
    return goodput


def recorder_with_handler(kept: list[Any]) -> Any:
    """Its recorder and its logger; only the cloud's handler is replaced."""
    with mock.patch("google.cloud.logging.Client"):
        logger = library()._CloudLogger("job", "log")
    logger._async_handler.emit = kept.append
    return library().GoodputRecorder("job", "log", True, logger)


class InMemoryLog:
    """Stands in for its whole logger, for less than its own tests' stand-in costs."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.write_cloud_logging_entry = self.entries.append

    def read_cloud_logging_entries(
        self, start_time: Any = None, end_time: Any = None, last_entry_info: Any = None
    ) -> tuple[list[dict[str, Any]], tuple[datetime, int]]:
        """The entries since the last call."""
        begin = last_entry_info[1] if last_entry_info else 0
        return self.entries[begin:], (datetime.now(UTC), len(self.entries))


def recorder_in_memory(log: InMemoryLog) -> Any:
    """Its recorder, without any logger."""
    return library().GoodputRecorder("job", "log", True, log)


def job_of(steps: int, log: InMemoryLog) -> datetime:
    """Records a job of equal steps that ran until a minute ago; returns when its next step would begin."""
    recorder, each = recorder_in_memory(log), timedelta(seconds=0.1)
    at = datetime.now(UTC) - timedelta(seconds=60) - steps * each
    recorder.record_job_start_time(at)
    for step in range(steps):
        recorder.record_step_start_time(step, at + step * each)
    return at + steps * each
