"""Connect a run to Ray: to the cluster in ``RAY_ADDRESS``, or to a private instance.

Without ``RAY_ADDRESS`` the run starts its own instance below this process, on loopback, in a private folder; it ends
with this process, even after SIGKILL.  With ``RAY_ADDRESS`` the run is a guest and neither starts nor ends anything
there.  Output of Ray's workers appears on this process's standard output and error.

A worker can import the same modules as this process and finds the experiment's files: see `astuner_ray.worker`.  Ray
shows a runtime environment to all users of the cluster, so it never contains secrets: `worker_environ` passes those as
arguments of actors.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner import DISABLE_PLUGINS, find_optional_part, process_start_time
from astuner.contracts.errors import MissingDependency, RunError
from astuner.contracts.secrets import is_secret
from astuner_ray import shared
from astuner_ray import worker as ray_worker
from astuner_ray.worker import relocate as relocate

if TYPE_CHECKING:
    from astuner import Config
    from astuner.contracts.parts import DebuggerPart

ADDRESS_VARIABLE = "RAY_ADDRESS"
_LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch to use 127.0.0.1, meant for macOS; without it, Ray replaces 127.0.0.1 with the machine's external
address."""
NODES_TIMEOUT = 600.0
"""Seconds to wait until a cluster has the configured number of nodes."""
FREE_TIMEOUT = 20.0
"""Seconds to wait for resources that another run has just released."""
PLACEMENT_TIMEOUT = 30.0
"""Seconds that a reservation may be pending.  Ray places one immediately if it fits, and otherwise waits forever."""
_GENERAL = re.compile(r"ASTUNER_|HF_|HUGGING_FACE_|(https?|all|no)_proxy$", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FOLDER = "astuner-ray-"
_LONGEST_FOLDER = 40
"""Ray appends ``/session_<time>_<pid>/sockets/plasma_store``, 67 characters; a socket path has at most 107."""
_GIB = 2**30
_SLOW = "the limit is 30 s: on a busy machine, free processors, memory or /dev/shm and run the command again"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The cluster that a run is connected to."""

    address: str
    """``host:port``."""
    nodes: int
    cpus: int
    gpus: int
    own: bool
    """Whether it is the run's private instance, which ends with the run."""

    def __str__(self) -> str:
        size = f"{self.nodes} node{'s' * (self.nodes != 1)}, {self.cpus} CPUs, {self.gpus} GPUs"
        return f"{'private Ray instance' if self.own else f'Ray cluster at {self.address}'}: {size}"

    def require(self, *, gpus: int, cpus: int) -> None:
        """Check that the cluster is large enough.

        :raises RunError: The cluster has fewer GPUs or CPUs than the run needs.
        """
        if self.gpus < gpus:
            raise RunError(
                f"the run needs {gpus} GPUs, but there are fewer ({self}). Set astuner.trainer_common.n_gpus_per_node "
                "and nnodes to match the cluster, or run `astuner doctor`"
            )
        if self.cpus < cpus:
            raise RunError(
                f"the run needs {cpus} CPUs, but there are fewer ({self}). Ray only counts CPUs to place processes, so "
                f"a machine may declare more than it has: ray stop, then ray start --head --num-cpus={cpus} (or this "
                "number on all machines together)"
            )


@contextlib.contextmanager
def connected(
    config: Config,
    *,
    env: Mapping[str, str] | None = None,
    gpus: int = 0,
    cpus: int = 0,
    logical_gpus: int | None = None,
    log: Path,
    namespace: str | None = None,
    set_up: str = "",
    model: str = "",
    writes: Path | None = None,
) -> Iterator[Cluster]:
    """Connect to Ray until the block ends.  Call from the main thread: Ray's processes end with the thread.

    :param env: Variables that every worker starts with (``VERL_*`` and the like), without names that look like secrets,
        which `worker_environ` passes.
    :param gpus: GPUs that the run's processes reserve on all machines.
    :param cpus: CPUs likewise. A private instance declares at least this number: Ray counts CPUs to place processes,
        and with too few they would wait forever instead of sharing the machine's.
    :param logical_gpus: GPUs that a private instance declares; None: as many as the machine has.
    :param log: File that receives this process's output meanwhile; error messages name it.
    :param namespace: Namespace of named actors; None: a private one.
    :param set_up: Function, ``module.name``, that each worker calls first.
    :param model: Folder or name on the hub that all machines must have; empty: none.
    :param writes: Folder that machines with GPUs must share with this one.
    :raises MissingDependency: Ray is not installed.
    :raises RunError: The cluster does not answer, has too few nodes, GPUs or CPUs, the experiment's folder is too
        large, or a machine lacks the model or the shared folder. Within the block: reserved resources do not fit, or a
        process died.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise MissingDependency(
            "Ray is not installed; install the backbone that needs it: pip install astuner-verl, or in a "
            "separate environment: pip install astuner-trinity"
        ) from None
    if ray.is_initialized():
        raise RunError("this process is already connected to Ray; call ray.shutdown() before the run")
    switches = {name: value for name, value in (env or {}).items() if not is_secret(name)}
    switches |= {name: value for name, value in os.environ.items() if name.startswith("ASTUNER_DEBUG_")}
    if disabled := os.environ.get(DISABLE_PLUGINS):
        switches[DISABLE_PLUGINS] = disabled
    address = os.environ.get(ADDRESS_VARIABLE, "")
    own = address in ("", "local")
    with contextlib.ExitStack() as stack:
        if not own:
            stack.enter_context(_with_variables({}, loopback=os.environ.get(_LOOPBACK_VARIABLE) == "0"))
            stack.callback(ray.shutdown)
            _join(ray, address, config, switches, log, namespace, set_up)
        else:
            if threading.current_thread() is not threading.main_thread():
                raise RunError("Ray ends with the thread that starts it; start the run in the main thread")
            stack.enter_context(_with_variables(private_variables(), loopback=True))
            folder = private_folder()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)  # its processes may still write there
            stack.callback(ray.shutdown)
            with _explained("Ray could not be started", log, _SLOW):
                ray.init(
                    address="local",  # never an instance that happens to run on this machine
                    num_cpus=max(os.cpu_count() or 1, cpus),
                    num_gpus=logical_gpus,
                    include_dashboard=False,
                    object_store_memory=object_store_bytes(),
                    namespace=namespace,
                    runtime_env=ray_worker.runtime_env(config, switches, set_up=set_up),
                    logging_level="warning",
                    _temp_dir=str(folder),
                )
        cluster = _look(ray, own=own)
        cluster.require(gpus=gpus, cpus=cpus)
        if cluster.nodes > 1 and model:
            shared.require(model, writes)
        _wait_until_free(ray, cluster, gpus=gpus, cpus=cpus)
        debugger: type[DebuggerPart] | None = find_optional_part(config.plugins, "debugger")
        with (
            debugger.hearing_workers() if debugger else contextlib.nullcontext(),
            _named(log),
            _refusing_what_never_fits(cluster),
        ):
            yield cluster


def worker_environ(config: Config) -> dict[str, str]:
    """Return variables of this process that a worker needs and that may be secret; pass them as an argument.

    These are ``ASTUNER_*``, ``HF_*``, proxies, Hugging Face's variables, and those named by ``…_env`` keys.
    """
    named = set(_variables(config.as_dict()))
    ours = ray_worker.VARIABLE
    return {n: v for n, v in os.environ.items() if (n in named or _GENERAL.match(n)) and n != ours}


def last_words(error: Exception) -> str:
    """Return an error of Ray in one line: the reason of an exit, or its last line, which names the cause."""
    lines = [line.strip() for line in _COLOUR.sub("", str(error)).splitlines() if line.strip()]
    exits = [line for line in lines if line.startswith(("The actor is dead because", "Worker exit"))]
    return (exits or lines[-1:] or ["no message"])[0].partition(" Some common causes")[0][:300]


def private_variables() -> dict[str, str]:
    """Return variables that make a cluster private to this user, for its processes and those that join it.

    They select loopback, disable metrics without a dashboard and idle workers per CPU (which cost a minute on a small
    machine), and set a token against other users of the machine (supported by Ray since 2.53). A token or mode that
    the user has set takes precedence.
    """
    variables = {
        _LOOPBACK_VARIABLE: "0",
        "RAY_enable_metrics_collection": "false",
        "RAY_prestart_worker_first_driver": "false",
        "RAY_enable_worker_prestart": "false",
    }
    if os.environ.get("RAY_AUTH_MODE", "token") == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or _token()}
    return variables


def private_folder() -> Path:
    """Return a new folder with a short name for Ray's sockets and logs; remove folders of processes that are gone."""
    parent = Path(tempfile.gettempdir())
    if len(f"{parent}/{_FOLDER}1234567-12345678") > _LONGEST_FOLDER:
        parent = Path("/tmp")
    for left in parent.glob(f"{_FOLDER}*-*"):
        owner = left.name.removeprefix(_FOLDER).partition("-")[0]
        with contextlib.suppress(FileNotFoundError):  # another run cleans up at the same time
            if owner.isdigit() and left.stat().st_uid == os.getuid() and process_start_time(int(owner)) is None:
                shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir=parent))


def object_store_bytes() -> int:
    """Return a tenth of the free memory, between 256 MiB and 16 GiB, limited by the free shared memory.

    Prompts, batch rows and metrics pass through the object store; weights do not.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    shared = Path("/dev/shm")
    room = shutil.disk_usage(shared).free * 9 // 10 if shared.is_dir() else free
    return max(min(free // 10, 16 * _GIB, room), _GIB // 4)


# ---------------------------------------------------------------- private


@functools.lru_cache(maxsize=1)
def _token() -> str:
    """Return one token per process, because Ray reads it once."""
    return secrets.token_hex(32)


def _join(
    ray: Any,
    address: str,
    config: Config,
    switches: Mapping[str, str],
    log: Path,
    namespace: str | None,
    set_up: str,
) -> None:
    """Connect to an existing cluster; twice, because the workers' environment depends on the number of nodes."""
    if "://" in address:
        raise RunError(
            f"{ADDRESS_VARIABLE} is {address}, but a run cannot train through a Ray client. Start it on a machine of "
            f"the cluster with {ADDRESS_VARIABLE}=HOST:PORT"
        )
    failed = f"the Ray cluster at {ADDRESS_VARIABLE}={address} cannot be joined from this machine"
    advice = f"start the run on one of its machines, or: unset {ADDRESS_VARIABLE}"
    with _explained(failed, log, advice):
        ray.init(address=address, logging_level="warning", log_to_driver=False)
    home, nodes = ray.get_runtime_context().get_node_id(), _wait_for_nodes(ray, address, config)
    ray.shutdown()
    with (
        ray_worker.files_for_other_nodes(config) if nodes > 1 else contextlib.nullcontext() as files,
        _explained(failed, log, advice),
    ):
        environment = ray_worker.runtime_env(config, switches, files, home=home, set_up=set_up)
        ray.init(address=address, namespace=namespace, runtime_env=environment, logging_level="warning")


def _wait_for_nodes(ray: Any, address: str, config: Config) -> int:
    wanted, deadline = config.astuner.trainer_common.nnodes, time.monotonic() + NODES_TIMEOUT
    while (nodes := _look(ray, own=False).nodes) < wanted:
        if time.monotonic() > deadline:
            raise RunError(
                f"after {NODES_TIMEOUT:g} s the cluster at {address} has {nodes} nodes, but "
                f"astuner.trainer_common.nnodes is {wanted}; on the other machines run: ray start --address={address}"
            )
        time.sleep(1.0)
    return nodes


def _look(ray: Any, *, own: bool) -> Cluster:
    resources = ray.cluster_resources()
    return Cluster(
        address=ray.get_runtime_context().gcs_address,
        nodes=sum(node["Alive"] for node in ray.nodes()),
        cpus=int(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
        own=own,
    )


def _wait_until_free(ray: Any, cluster: Cluster, *, gpus: int, cpus: int) -> None:
    deadline = time.monotonic() + FREE_TIMEOUT
    while (free := ray.available_resources()).get("GPU", 0) < gpus or free.get("CPU", 0) < cpus:
        if time.monotonic() > deadline:
            raise RunError(
                f"the run needs {gpus} GPUs and {cpus} CPUs, but only {free.get('GPU', 0):g} GPUs and "
                f"{free.get('CPU', 0):g} CPUs are free ({cluster}). Wait for other users to finish (see: ray status)"
            )
        time.sleep(1.0)


@contextlib.contextmanager
def _refusing_what_never_fits(cluster: Cluster) -> Iterator[None]:
    """Cancel reservations of this process that Ray cannot place, so that waiting code fails with an explanation."""
    import ray
    from ray.util import placement_group_table, remove_placement_group
    from ray.util.placement_group import PlacementGroup

    job: str = ray.get_runtime_context().get_job_id()  # suffix of its reservations' labels
    waiting: dict[str, float] = {}
    refused: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(2.0):
            try:
                table = placement_group_table()
            except Exception:  # Ray is gone, which ends the run anyway
                return
            for label, group in table.items():
                since = waiting.setdefault(label, time.monotonic()) if group["state"] == "PENDING" else None
                if since is None or not label.endswith(job) or time.monotonic() - since < PLACEMENT_TIMEOUT:
                    continue
                wanted = ", ".join(map(_spelled, group["bundles"].values()))
                there = "; ".join(_spelled(node["Resources"]) for node in ray.nodes() if node["Alive"])
                refused.append(
                    f"Ray could not place the run's reservation within {PLACEMENT_TIMEOUT:g} s ({group['strategy']}: "
                    f"{wanted}); {cluster} (machines: {there}). Others use part of it (see: ray status), or no single "
                    "machine is large enough: set astuner.trainer_common.n_gpus_per_node and nnodes to match the "
                    "cluster"
                )
                remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(label))))

    thread = threading.Thread(target=watch, name="astuner-placement", daemon=True)
    thread.start()
    try:
        yield
    except Exception as e:
        if refused:
            raise RunError(refused[0]) from e
        raise
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _named(log: Path) -> Iterator[None]:
    """Convert the death or failed start of a process into an error with its name, location and cause."""
    from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, WorkerCrashedError

    try:
        yield
    except (NodeDiedError, OutOfMemoryError, RayActorError, WorkerCrashedError) as e:
        facts: dict[str, str] = dict(re.findall(r"^\s*(class_name|pid|ip): (\S+)$", str(e), re.MULTILINE))
        making = re.search(r"ray::(\w+)\.__init__", str(e))
        who = facts.get("class_name", making[1] if making else "a process of the run").rpartition(".")[2]
        where = f" (pid {facts['pid']} on {facts.get('ip', 'another machine')})" if "pid" in facts else ""
        if isinstance(e, RayActorError) and e.actor_init_failed:
            raise RunError(f"{who}{where} could not start: {last_words(e)}; see {log}") from e
        cause = "It crashed or was killed, most often because memory ran out (see: dmesg)"
        if isinstance(e, NodeDiedError) or "node has died" in str(e):
            cause = "Its machine left the cluster (see: ray status); restart Ray there or on another machine"
        raise RunError(f"{who}{where} died: {last_words(e).rstrip('.')}. {cause}; see {log}") from e


def _spelled(resources: Mapping[str, float]) -> str:
    return " + ".join(f"{resources[name]:g} {name}" for name in ("GPU", "CPU") if resources.get(name))


@contextlib.contextmanager
def _explained(what: str, log: Path, advice: str) -> Iterator[None]:
    """Convert any error of Ray's start or connection to a `RunError`; a slow node raises a plain `Exception`."""
    try:
        yield
    except Exception as e:
        raise RunError(f"{what}: {type(e).__name__}: {str(e).strip()}; {advice}; see {log}") from e


@contextlib.contextmanager
def _with_variables(variables: Mapping[str, str], *, loopback: bool) -> Iterator[None]:
    """Set variables for Ray in this process and its children, including those that Ray reads on import."""
    from ray._private import ray_constants
    from ray._raylet import Config

    before = {name: os.environ.get(name) for name in (*variables, "RAY_AUTH_MODE")}
    os.environ.update(variables)
    cluster_before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = cluster_before and not loopback
    Config.initialize("")
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = cluster_before
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _variables(value: Any, key: str = "") -> Iterator[str]:
    """Yield the names of variables that a config's ``…_env`` keys refer to."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from _variables(below, str(name))
    elif isinstance(value, (list, tuple)):
        for below in value:
            yield from _variables(below, key)
    elif key.endswith("_env") and isinstance(value, str) and value:
        yield value
