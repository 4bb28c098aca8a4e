"""What the agent needs of torchelastic, and whether this torch has it: not all of it is promised to stay as it is.

`agent.Agent` is a `SimpleElasticAgent`, as its documentation proposes. Beyond the methods that it says to implement, it
uses `_rendezvous` and `_initialize_workers`, and the fields `_worker_group` and `_remaining_restarts`. From here are
torchrun's options, the rendezvous, what workers find in their environment, and torchrun's files of output.
"""

import inspect
import os
import re
import signal
import socket
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from string import Template
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerGroup, WorkerSpec
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.elastic.utils import macros  # type: ignore[attr-defined]
from torch.distributed.launcher.api import LaunchConfig

from headway.errors import InputError

TESTED = ("2.13",)
"""The versions of torch that the tests run with."""

METHODS = {"_rendezvous": ("self", "worker_group"), "_initialize_workers": ("self", "worker_group")}
BACKENDS = ("c10d", "static")
TOGETHER_S = 3.0
"""How long the nodes of an attempt wait for each other before they look for others."""
ALONE = "localhost:0"
"""The endpoint of a node that waits for no other."""


def check_version() -> str:
    """What to say of a torch that this was not tested with; empty if it was. InputError if it cannot work."""
    for name, expected in METHODS.items():
        found = tuple(inspect.signature(getattr(SimpleElasticAgent, name, lambda: None)).parameters)
        if found != expected:
            raise InputError(
                f"torch {torch.__version__} has another SimpleElasticAgent.{name} than headway knows: `headway run` "
                f"works with torch {', '.join(TESTED)}. Use one of these, or `headway exec torchrun …`."
            )
    version = ".".join(str(torch.__version__).split(".")[:2])
    return "" if version in TESTED else f"torch {torch.__version__} is not one this was tested with ({TESTED[-1]})."


def launch_config(args: Namespace, scratch: str) -> tuple[LaunchConfig, list[str]]:
    """What torchrun would make of its options: the configuration, and the command of a worker. What nobody asked for
    goes to a scratch folder."""
    _check(args)
    if args.log_dir is None and args.redirects == args.tee == "0":
        args.log_dir = scratch  # torchrun leaves a folder for error files in /tmp
    alone = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (alone and torchrun.parse_min_max_nnodes(args.nnodes)[1] == 1):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", ALONE, str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500
    try:
        config, command, words = torchrun.config_from_args(args)
        if config.rdzv_backend == "static":
            _check_port(config.rdzv_endpoint)
    except (ValueError, AssertionError, OSError, KeyError) as error:
        raise InputError(f"torchrun's options do not fit together: {error}") from error
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    if callable(command):  # --run-path: in this interpreter, which is what a worker of ours does anyway
        return config, [sys.executable, "-u", *words]
    return config, [command, *words]


def _check(args: Namespace) -> None:
    """InputError for what torch would only notice later, or not explain."""
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", args.nnodes):
        raise InputError(f"--nnodes {args.nnodes} is neither a number of nodes nor MIN:MAX.")
    for name in (name.strip() for name in args.signals_to_handle.split(",")):
        if name and not isinstance(getattr(signal, name, None), signal.Signals):
            raise InputError(f"--signals-to-handle: there is no signal {name}.")
    if args.nproc_per_node.isdecimal() and int(args.nproc_per_node) < 1:
        raise InputError("--nproc-per-node 0: at least one worker is needed.")
    if args.numa_binding and not torch.cuda.is_available():
        raise InputError("--numa-binding binds workers to the processors near their GPU, and torch sees no GPU here.")


def _check_port(endpoint: str) -> None:
    port = endpoint.rpartition(":")[2]
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{port} is no port")


def rendezvous(config: LaunchConfig, next_attempt: Callable[[int], int]) -> "FreshStore":
    """The rendezvous that the configuration names; on a single node that names none, none is needed."""
    if config.rdzv_backend not in BACKENDS:
        raise InputError(
            f"--rdzv-backend {config.rdzv_backend} is not supported: `headway run` needs a store that its agents can "
            f"talk through, and knows {' and '.join(BACKENDS)}."
        )
    if config.rdzv_endpoint == ALONE:
        return FreshStore(None, config, next_attempt)
    # Else torch tells its first round's address once, and a node that joins later waits for it in vain.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    parameters = RendezvousParameters(
        backend=config.rdzv_backend, endpoint=config.rdzv_endpoint, run_id=config.run_id, min_nodes=config.min_nodes,
        max_nodes=config.max_nodes, local_addr=config.local_addr, **config.rdzv_configs,
    )  # fmt: skip
    try:
        handler = rendezvous_registry.get_rendezvous_handler(parameters)
    except (ValueError, TypeError) as error:
        raise InputError(f"there can be no rendezvous at {config.rdzv_endpoint}: {error}") from error
    return FreshStore(handler, config, next_attempt)


class FreshStore(RendezvousHandler):
    """A rendezvous that gives each attempt's workers a store and a port of their own.

    Torch lets them use the store of the agents again, where they find the addresses of the attempt before. The first
    agent is the server here: its port is bound before any worker starts, and outlives a worker that dies.
    """

    def __init__(
        self, inner: RendezvousHandler | None, config: LaunchConfig, next_attempt: Callable[[int], int]
    ) -> None:
        self._inner, self._next_attempt = inner, next_attempt
        self._run_id = config.run_id
        self._endpoint, self._node = config.rdzv_endpoint, config.rdzv_configs.get("rank", 0)
        self._address = config.local_addr or "localhost"
        self._timeout = timedelta(seconds=int(config.rdzv_configs.get("timeout", 900)))
        self._server: TCPStore | None = None
        self._last: RendezvousInfo | None = None
        self._round = self._again = 0
        self.attempt = -1
        self.members_change = False
        """Whether a node wants to join, or has left: then all must meet anew."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the other nodes; the first of them numbers the attempt and serves its store."""
        inner = self._meet() if self._inner else None
        self._round += 1
        self._server = None
        # A dynamic rendezvous gives each round a store of its own; a static one has always the same nodes.
        key = f"headway/store/{self._round if self.get_backend() == 'static' else self._again}"
        if inner is None or inner.rank == 0:
            self.attempt = self._next_attempt(self.attempt)
            self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
            port = self._server.port
            if inner is not None:
                inner.store.set(key, f"{port} {self.attempt}")
        else:
            port, self.attempt = (int(word) for word in self._told(inner.store, key).split())
        if inner is None:
            assert self._server is not None
            return RendezvousInfo(self._server, 0, 1, RendezvousStoreInfo(self._address, port))
        address = inner.bootstrap_store_info.master_addr if inner.bootstrap_store_info else self._address
        return RendezvousInfo(inner.store, inner.rank, inner.world_size, RendezvousStoreInfo(address, port))

    def _told(self, store: Any, key: str) -> bytes:
        """What the first node tells. Waited for in Python, where a signal can end the wait."""
        until = time.monotonic() + self._timeout.total_seconds()
        while not store.check([key]) and time.monotonic() < until:
            time.sleep(0.01)
        return bytes(store.get(key))

    def _meet(self) -> RendezvousInfo:
        assert self._inner is not None
        if self._last is None and self.get_backend() == "static":
            self._await_host()
        with suppress(RendezvousError):
            self.members_change |= self._last is not None and self.num_nodes_waiting() > 0
        if self._last is None or not self._is_complete(self._last):
            self._last, self._again = self._inner.next_rendezvous(), 0
        self.members_change = False
        return self._last

    def _await_host(self) -> None:
        """Waits, in Python as well, until the node that hosts a static rendezvous is there."""
        if self._node == 0:
            return
        host, _, port = self._endpoint.rpartition(":")
        until = time.monotonic() + self._timeout.total_seconds()
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=5):
                return
            time.sleep(0.1)

    def _is_complete(self, info: RendezvousInfo) -> bool:
        """Whether the nodes of the last attempt are all here again: then they need not find each other anew, which
        takes torch a second or more. All come to the same answer, the first that anybody gave."""
        self._again += 1
        here = f"headway/again/{self._again}/"
        everyone = [f"{here}{rank}" for rank in range(info.world_size)]
        try:
            if not self.members_change:
                info.store.set(everyone[info.rank], "")
            until = time.monotonic() + (0.0 if self.members_change else TOGETHER_S)
            while not (complete := info.store.check(everyone)) and time.monotonic() < until:
                if info.store.check([f"{here}answer"]):
                    break
                time.sleep(0.01)
            return bool(info.store.compare_set(f"{here}answer", "", str(complete)) == b"True")
        except RuntimeError:  # whoever served the store is gone
            return False

    def get_backend(self) -> str:
        """As `--rdzv-backend` says."""
        return self._inner.get_backend() if self._inner else "c10d"

    @property
    def use_agent_store(self) -> bool:
        """Workers are clients of the store that an agent serves."""
        return True

    def is_closed(self) -> bool:
        """Whether nobody may join any more."""
        return self._inner.is_closed() if self._inner else False

    def set_closed(self) -> None:
        """Nobody may join any more."""
        if self._inner:
            self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        """How many nodes want to join."""
        return int(self._inner.num_nodes_waiting()) if self._inner else 0

    def get_run_id(self) -> str:
        """As `--rdzv-id` says."""
        return str(self._run_id)

    def shutdown(self) -> bool:
        """Leaves the rendezvous, and closes it for all."""
        return self._inner.shutdown() if self._inner else True


def worker_environments(group: WorkerGroup, spec: WorkerSpec, restarts: int) -> dict[int, dict[str, str]]:
    """What torchrun tells each worker through its environment, by local rank."""
    return {
        worker.local_rank: {
            "RANK": str(worker.global_rank),
            "GROUP_RANK": str(group.group_rank),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "WORLD_SIZE": str(worker.world_size),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(True),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            **_local_rank(worker.local_rank, spec.virtual_local_rank),
        }
        for worker in group.workers
    }


def _local_rank(local_rank: int, virtual: bool) -> dict[str, str]:
    """`LOCAL_RANK`; with virtual ranks it is always 0, and each worker sees one device only."""
    if not virtual:
        return {"LOCAL_RANK": str(local_rank)}
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = devices.split(",") if devices is not None else [str(number) for number in range(local_rank + 1)]
    if local_rank >= len(visible):
        raise InputError(
            f"--virtual-local-rank: worker {local_rank} has no device in CUDA_VISIBLE_DEVICES={devices}. "
            f"Name one for each worker, or start {len(visible)} with --nproc-per-node."
        )
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": visible[local_rank].strip()}


class Logs:
    """Log files as torchrun's options ask for them: redirected, copied to the console, filtered."""

    def __init__(self, config: LaunchConfig, spec: WorkerSpec) -> None:
        self._config, self._spec = config, spec
        self._tails: list[TailLog] = []

    def open(self, environments: dict[int, dict[str, str]], group: WorkerGroup) -> Any:
        """Where each worker's output and error file go; sets what tells the workers so."""
        specs, config = self._config.logs_specs, self._config
        assert specs is not None
        self.dest = dest = specs.reify(environments)
        prefixes = self._prefixes(group)
        name = self._spec.role
        self._tails = [
            TailLog(name, dest.tee_stdouts, sys.stdout, prefixes),
            TailLog(name, dest.tee_stderrs, sys.stderr, prefixes),
        ]
        for words, tees, path in (
            (config.duplicate_stdout_filters, dest.tee_stdouts, dest.filtered_stdout),
            (config.duplicate_stderr_filters, dest.tee_stderrs, dest.filtered_stderr),
        ):
            if words:
                file = open(path, "w", errors="replace", buffering=1)
                self._tails.append(TailLog(name, tees, file, prefixes, log_line_filter=_any_of(words)))
        return dest

    def start(self) -> None:
        """Begins to copy, once the files are there."""
        for tail in self._tails:
            tail.start()

    def close(self) -> None:
        """Copies the rest."""
        for tail in self._tails:
            tail.stop()
        self._tails.clear()

    def _prefixes(self, group: WorkerGroup) -> dict[int, str] | None:
        template = self._config.log_line_prefix_template
        if not template:
            return None
        return {
            worker.local_rank: Template(template).safe_substitute(
                role_name=self._spec.role, rank=worker.global_rank, local_rank=worker.local_rank
            )
            for worker in group.workers
        }


def _any_of(words: list[str]) -> Callable[[str], bool]:
    return lambda line: any(word in line for word in words)


def with_local_rank(words: list[str], local_rank: int) -> list[str]:
    """A worker's arguments, with torchrun's macros filled in."""
    return list(macros.substitute(words, str(local_rank)))


def worker_spec(config: LaunchConfig, command: list[str], handler: FreshStore) -> WorkerSpec:
    """What torch's agents are made from."""
    return WorkerSpec(
        role=config.role, local_world_size=config.nproc_per_node, entrypoint=command[0], args=tuple(command[1:]),
        rdzv_handler=handler, max_restarts=config.max_restarts, monitor_interval=config.monitor_interval,
        local_addr=config.local_addr, event_log_handler=config.event_log_handler, numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters, virtual_local_rank=config.virtual_local_rank,
    )  # fmt: skip
