"""A Slurm for the whole session."""

from collections.abc import Iterator

import pytest
from slurm import Slurm


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A running Slurm of one node; its tests need scontrol, slurmctld, slurmd and munged."""
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        yield cluster.start()
    finally:
        cluster.stop()
