"""One Triton server for one deployment, from the backend directory to the last trace of it removed."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tritone.cache import default_cache
from tritone.checkpoints import Progress
from tritone.checkpoints.progress import silent
from tritone.compiler import BuildError
from tritone.deployment import ENVIRONMENT, OWN_VOICE, Deployment
from tritone.errors import TritoneError
from tritone.progress import loaded_bytes
from tritone.supervisor import control
from tritone.supervisor.backend_directory import build_backend_directory
from tritone.supervisor.guard import Guard, build_guard
from tritone.supervisor.installation import PROJECT, Installation, libpython_directory
from tritone.supervisor.log import failure_reason, loaded_models
from tritone.supervisor.orphans import end_processes, processes_of
from tritone.supervisor.ports import choose_ports
from tritone.supervisor.process import ChildProcess
from tritone.supervisor.repositories import Repositories, check_repositories
from tritone.supervisor.run_directory import RunDirectory, check_shared_memory, remove_stale
from tritone.supervisor.status import write_status
from tritone.supervisor.warm_up import REQUESTS, warm_up
from tritone.supervisor.watch import StageState, StageWatch, unready_models
from tritone.voices import known_voices

START_SECONDS = 300.0
GRACE_SECONDS = 3.0
"""A stage process sees the end of a killed server within a second, unless it hangs."""
KEPT_LOGS = 20
POLL_SECONDS = 0.1
DRAIN_POLL_SECONDS = 0.4
log = logging.getLogger(__name__)

STAGE_ENVIRONMENT = {
    # Idle compute threads give up their cores soon, for other stages want them; but waking one takes longer than most parallel
    # parts of a step, so they spin a little first. Measured on two cores: chat with one user 1.3 x of a count of 0, with eight
    # 1.1 x; with speech beside it 0.95 to 1.05 x; from 10000 on a busy neighbour stops the step.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "TOKENIZERS_PARALLELISM": "false",
    # The supervisor has resolved everything to directories; a stage never goes to the network.
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    # Every thread of the server takes its own share of freed memory and keeps it; with few shares it stays small.
    "MALLOC_ARENA_MAX": "2",
}


class StartError(TritoneError):
    """The server did not become ready; the message holds the failed model's own error and the log's path."""

    code = "UNAVAILABLE"


def _served_models(deployment: Deployment) -> tuple[str, ...]:
    if deployment.voice is None:
        return ("chat",)
    return ("omni", "chat") if deployment.voice == OWN_VOICE else ("omni", "chat", "speech")


class Server:
    """A context manager: ``with Server(deployment) as server:`` is ready to be asked and leaves nothing behind.

    ``deployment`` is a resolved one (see ``resolve_deployment``); its ports may be 0. ``models`` are loaded at the start,
    with the steps they consist of; by default ``omni``, ``chat`` and ``speech``, without ``speech`` where the voice is the
    checkpoint's own, or only ``chat`` where it is null.
    ``shared_memory`` tells how many bytes of /dev/shm the deployment's pools take.
    """

    def __init__(
        self,
        deployment: Deployment,
        *,
        models: Sequence[str] | None = None,
        repositories: Sequence[Path] = (PROJECT / "model_repository", PROJECT / "ensembles"),
        backends: Path = PROJECT / "backends",
        cache: Path | None = None,
        logs: Path = PROJECT / "out" / "logs",
        shared_memory: Callable[[Deployment], int] | None = None,
        environment: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.deployment = deployment
        self._wanted = deployment.server
        self.models = tuple(models or _served_models(deployment))
        self.log: Path | None = None
        self._repositories = tuple(Path(path).resolve() for path in repositories)
        self._backends = Path(backends)
        self._cache = default_cache() if cache is None else Path(cache)
        self._logs = Path(logs)
        self._shared_memory = shared_memory
        self._environment = dict(environment or {})
        self._progress: Progress = progress or silent
        self._run: RunDirectory | None = None
        self._child: ChildProcess | None = None
        self._guard: Guard | None = None
        self._watch: StageWatch | None = None
        self._warm = False
        """Whether every ensemble has answered once."""
        self._installation: Installation | None = None
        self._backend_directory = Path()
        self._copies: Repositories | None = None

    # -- addresses -----------------------------------------------------------------------------------------------------

    @property
    def _http_address(self) -> str:
        return self._address(self.deployment.server.http_port)

    @property
    def _metrics_address(self) -> str:
        return self._address(self.deployment.server.metrics_port)

    @property
    def http_url(self) -> str:
        """``http://host:port``."""
        return f"http://{self._address(self.deployment.server.http_port)}"

    @property
    def grpc_url(self) -> str:
        """``host:port``, as tritonclient and :class:`tritone.client.Client` take it."""
        return self._address(self.deployment.server.grpc_port)

    @property
    def metrics_url(self) -> str:
        return f"http://{self._address(self.deployment.server.metrics_port)}/metrics"

    def _address(self, port: int) -> str:
        host = self.deployment.server.host
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def run_directory(self) -> Path:
        if self._run is None:
            raise TritoneError("the server is not running", "UNAVAILABLE")
        return self._run.path

    @property
    def pid(self) -> int:
        if self._child is None:
            raise TritoneError("the server is not running", "UNAVAILABLE")
        return self._child.pid

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self, timeout: float = START_SECONDS) -> Server:
        """Starts and waits until every model is ready. Raises StartError, or TritoneError for what can be seen before."""
        if self._child is not None:
            raise TritoneError("the server is running already", "UNAVAILABLE")
        self._installation = Installation.find()
        check_repositories(self._repositories)
        remove_stale()
        if self._shared_memory is not None:
            check_shared_memory(self._shared_memory(self.deployment))
        library = _find_guard()
        self._backend_directory = build_backend_directory(self._backends, self._cache, self._installation, library)
        self.deployment = self.deployment.model_copy(update={"server": choose_ports(self._wanted)})
        self._run = RunDirectory.create(self.deployment)
        try:
            self._copies = Repositories(self._repositories, self._run.path / "models")
            for model in {"omni", "speech"}.intersection(self.models):
                if voices := known_voices(self.deployment):
                    self._copies.describe(model, {"voices": ", ".join(voices.names), "default_voice": voices.default})
            if library is not None:
                guarded = self._backend_directory / "python" / self._installation.library.name
                self._guard = Guard(self._run.path, guarded, self._installation.library)
            self.log = self._new_log()
            if self._guard is not None:
                self._guard.set_unready(self.models)
            begun = time.monotonic()
            self._launch()
            self._wait_for("/v2/health/live", begun, timeout)
            # Before the first request, which a stage that dies would leave without an end.
            self._watch = StageWatch(self._run.path, self._end_stage, self._load_stage, self._tell_states)
            self._warm_up(begun, timeout)
            self._wait_for("/v2/health/ready", begun, timeout)
        except BaseException:
            self.stop()
            raise
        return self

    def _wait_for(self, path: str, begun: float, timeout: float) -> None:
        """Until the server answers there; raises StartError when it ends or time runs out. Alive, it has loaded its models."""
        assert self._child is not None and self.log is not None
        # The page of metrics is the last to come.
        while not (control.answers(self._http_address, path) and control.answers(self._metrics_address, "/metrics")):
            code = self._child.wait(POLL_SECONDS)
            if code is not None:
                raise StartError(f"the server did not start:\n{failure_reason(self.log)}\nits log: {self.log}")
            done, total = loaded_models(self.log.read_text(errors="replace"))
            loaded, size = loaded_bytes(self.run_directory)
            if loaded < size:
                self._progress("loading weights", loaded, size)
            elif total:
                self._progress("loading models", done, total)
            if time.monotonic() > begun + timeout:
                raise StartError(
                    f"the server was not ready after {timeout:.0f} s ({done} of {total} models loaded); its log: {self.log}"
                )

    def _warm_up(self, begun: float, timeout: float) -> None:
        asked = [model for model in self.models if model in REQUESTS]
        for number, model in enumerate(asked):
            self._progress("warming up", number, len(asked))
            try:
                warm_up(self._http_address, model, begun + timeout)
            except TritoneError as error:
                raise StartError(
                    f"the server was not ready after {time.monotonic() - begun:.0f} s (at most {timeout:.0f}): "
                    f"{model} does not answer: {error.message}\nits log: {self.log}"
                ) from error
        self._warm = True
        assert self._watch is not None
        self._tell_states(self._watch.states)

    def is_ready(self) -> bool:
        """Whether the server says that it and all models are ready."""
        if self._child is None or self._child.exit_code is not None:
            return False
        return control.is_ready(self._http_address)

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits for the server to end by itself; its exit code, or None after ``timeout`` seconds."""
        assert self._child is not None
        return self._child.wait(timeout)

    def drain(self) -> None:
        """Refuses new requests and returns once the running ones have ended, or their time is over."""
        if self._guard is None or self._child is None or self._child.exit_code is not None:
            return
        self._guard.drain()
        deadline = time.monotonic() + self.deployment.server.drain_seconds
        idle = 0
        # Twice: the gauges are a little late.
        while idle < 2 and time.monotonic() < deadline and self._child.wait(DRAIN_POLL_SECONDS) is None:
            idle = 0 if control.holds_requests(self._metrics_address) else idle + 1

    def stop(self) -> None:
        """Ends the server (SIGTERM; SIGKILL once no stage is left or its exit timeout is over) and removes its directory."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        try:
            if self._child is not None:
                self._child.stop(self.deployment.server.exit_timeout_seconds + 4.0, self._stages_have_ended)
        finally:
            self._child = None
            self._warm = False
            if self._guard is not None:
                self._guard.close()
                self._guard = None
            if self._run is not None:
                end_processes(self._run.path, GRACE_SECONDS)
                self._run.remove()
                self._run = None

    def _stages_have_ended(self) -> bool:
        """Requests leave references to their ensembles behind in Triton, which would wait its whole exit timeout for them."""
        assert self._child is not None
        return processes_of(self.run_directory) in ([], [self._child.pid])

    def __enter__(self) -> Server:
        return self.start() if self._child is None else self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    # -- stages that die -----------------------------------------------------------------------------------------------

    def _end_stage(self, stage: str) -> None:
        if self._guard is not None:
            self._guard.end(stage)
        elif self._child is not None:
            # Its requests would hang for ever; this way they end, and whoever keeps the server starts it again.
            log.error("stage %s died: without the guard the server ends with it", stage)
            self._child.kill()

    def _load_stage(self, stage: str) -> None:
        child = self._child
        assert self._copies is not None and self._guard is not None and child is not None
        self._copies.touch(stage)
        self._guard.load(stage, lambda: child.exit_code is None)

    def _tell_states(self, states: Mapping[str, StageState]) -> None:
        assert self._copies is not None
        unready = unready_models(states, self._copies.steps()).union(() if self._warm else self.models)
        if self._guard is not None:
            self._guard.set_unready(unready)
        write_status(self, states, unready)

    # -- parts of a start ----------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        assert self.log is not None
        self._child = ChildProcess(self._command(), self._child_environment(), self.log, PROJECT)

    def _command(self) -> list[str]:
        assert self._installation is not None and self._copies is not None
        server = self.deployment.server
        command = [str(self._installation.server), f"--backend-directory={self._backend_directory}"]
        command += [f"--model-repository={path}" for path in self._copies.paths]
        # Explicit: only what this deployment needs is loaded, and a single model can be loaded again later.
        command += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in self.models)]
        command += [f"--{kind}-address={server.host}" for kind in ("http", "grpc", "metrics")]
        command += [
            f"--http-port={server.http_port}",
            f"--grpc-port={server.grpc_port}",
            f"--metrics-port={server.metrics_port}",
            f"--exit-timeout-secs={server.exit_timeout_seconds}",
            # Pinned host memory is of use to GPUs only.
            "--pinned-memory-pool-byte-size=0",
        ]
        return command

    def _child_environment(self) -> dict[str, str]:
        environment = dict(os.environ) | STAGE_ENVIRONMENT | self._environment
        # The stub finds the virtual environment by the first python3 in PATH; it ignores VIRTUAL_ENV and PYTHONPATH.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
        library = libpython_directory()
        if library is not None:
            known = environment.get("LD_LIBRARY_PATH")
            environment["LD_LIBRARY_PATH"] = f"{library}{os.pathsep}{known}" if known else str(library)
        assert self._run is not None
        environment[ENVIRONMENT] = str(self._run.path)
        if self._guard is not None:
            environment |= self._guard.environment(environment.get("LD_PRELOAD"))
        return environment

    def _new_log(self) -> Path:
        self._logs.mkdir(parents=True, exist_ok=True)
        old = sorted(self._logs.glob("tritonserver-*.log"), key=lambda path: path.stat().st_mtime)
        for path in old[: max(0, len(old) - KEPT_LOGS + 1)]:
            path.unlink(missing_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return self._logs / f"tritonserver-{stamp}-{self.deployment.server.http_port}.log"


def _find_guard() -> Path | None:
    try:
        return build_guard()
    except (BuildError, OSError) as error:
        log.warning("without a C compiler the death of one stage ends the whole server: %s", error)
        return None
