"""`python -m worker`: reads the settings, loads the model, and runs a `BatchWorker`. Wiring only.

Exit status: 0 stopped on request; SIGTERM (143 as process 1) stopped on request while loading; 1 the watchdog
ended a stalled process; 69 Redis was away until the deadline of loading; 70 the engine or a thread failed and
the tasks were handed back; 78 a setting or the model cannot be used, so a restart does not help.
"""

from tokenmill.process.startup_signals import exit_on_signals

if __name__ == "__main__":
    # Before anything else: the imports below take seconds, and loading a model takes minutes.
    exit_on_signals()

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import redis
import structlog
from prometheus_client import CollectorRegistry

from engine.checkpoint.check import check_source
from engine.errors import InvalidParameter, UnsupportedModel
from monitoring.engine import EngineMetrics
from monitoring.http import serve_metrics
from monitoring.worker import WorkerMetrics
from tokenmill.process import logs
from tokenmill.process.hold_unusable import hold_unusable
from tokenmill.process.redis_outages import OutageLog
from tokenmill.process.temporary_directory import NoTemporaryDirectory, check_temporary_directory
from tokenmill.protocol.records import ModelCard, WorkerRecord
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import VARIABLES, WorkerSettings
from tokenmill.settings.errors import SettingError
from tokenmill.settings.unknown import warnings
from worker.batch_worker import BatchWorker
from worker.connections import connect
from worker.context import WorkerContext, new_worker_name
from worker.errors import settings_message
from worker.loading import Loading, cache_errors_as_settings, gc_paused, machine_errors_as_settings
from worker.preparation import ServedModel
from worker.watchdog import arm_watchdog, disarm_watchdog

if TYPE_CHECKING:
    from engine.execution.build import Execution

_log = structlog.get_logger("worker")

EXIT_NO_REDIS = 69
EXIT_UNUSABLE = 78
REDIS_RETRY_SECONDS = 0.5


class Process:
    """A worker process, from its settings to its exit status."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._slug = settings.slug
        self._name = new_worker_name()
        logs.bind(worker=self._name)
        self._registry = CollectorRegistry()
        self._metrics = WorkerMetrics(self._registry, model=settings.public_model)
        self._worker: BatchWorker | None = None

    def run(self) -> int:
        settings = self._settings
        self._serve_metrics()
        client = self._connect("loading")
        if not _try_until(client.ping, client, settings.load_seconds):
            return EXIT_NO_REDIS
        arm_watchdog(settings.load_seconds)
        with Loading(client, self._loading_record(), self._metrics) as loading, machine_errors_as_settings():
            execution = _load(settings, loading)
        store, card = TaskStore(client), self._card(execution)
        # A short outage of Redis must not cost the loaded model.
        if not _try_until(lambda: store.put_model_card(self._slug, card), client, settings.load_seconds):
            return EXIT_NO_REDIS
        client.close()
        self._worker = self._make_worker(execution, card)
        self._worker.handle_signals()
        return self._worker.work()

    def _serve_metrics(self) -> None:
        """Raises `SettingError` if the address cannot be used."""
        host, port = self._settings.metrics_host, self._settings.metrics_port
        try:
            server = serve_metrics(self._registry, host, port, self._is_ready)
        except OSError as error:
            raise SettingError(
                f"TOKENMILL_METRICS_HOST and TOKENMILL_METRICS_PORT: cannot listen on {host}:{port}: {error}"
            ) from error
        _log.debug("serving metrics", url=f"http://{host}:{server.port}/metrics")

    def _connect(self, thread: str) -> Any:
        return connect(self._settings.redis_url, f"{self._name}:{thread}")

    def _is_ready(self) -> bool:
        return self._worker is not None and self._worker.state == "ready"

    def _loading_record(self) -> WorkerRecord:
        return WorkerRecord(
            name=self._name,
            model=self._settings.public_model,
            slug=self._slug,
            state="loading",
            started_at=time.time(),
        )

    def _card(self, execution: "Execution") -> ModelCard:
        return ModelCard(
            model=self._settings.public_model,
            vocab_size=execution.vocab_size,
            max_model_len=execution.config.max_model_len,
            max_prompt_tokens=execution.config.max_prompt_tokens,
            max_prompt_bytes=execution.tokenizer.max_prompt_bytes,
            default_sampling=execution.default_sampling,
            has_chat_template=execution.tokenizer.has_chat_template,
            tool_format=execution.tokenizer.tool_format,
            fingerprint=execution.fingerprint,
        )

    def _make_worker(self, execution: "Execution", card: ModelCard) -> BatchWorker:
        settings = self._settings
        engine_metrics = EngineMetrics(
            self._registry,
            model=settings.public_model,
            max_model_len=execution.config.max_model_len,
        )
        model = ServedModel(
            name=settings.public_model,
            slug=self._slug,
            fingerprint=execution.fingerprint,
            tokenizer=execution.tokenizer,
            default_sampling=execution.default_sampling,
            max_sequence_tokens=execution.max_sequence_tokens,
        )
        context = WorkerContext(
            model=model,
            connect=self._connect,
            metrics=self._metrics,
            name=self._name,
            card=card,
            timing=settings,
            fair_sharing=settings.fair_sharing,
            observers=(engine_metrics,),
        )
        return BatchWorker(execution.new_engine(), context)


def _load(settings: WorkerSettings, loading: Loading) -> "Execution":
    # This import takes seconds. By now bad settings are reported, and the record shows that the worker loads.
    with gc_paused():
        from engine.execution.build import build_execution

    return build_execution(
        settings.model,
        cache_dir=settings.cache_dir,
        dtype=settings.dtype,
        device=settings.device,
        attention=settings.attention,
        quantization=settings.quantization,
        decode_graphs=settings.decode_graphs,
        async_scheduling=settings.async_scheduling,
        deterministic=settings.deterministic,
        generation_config=settings.generation_config,
        progress=loading.progress,
        **settings.engine_limits(),
    )


def _try_until(call: Callable[[], object], client: Any, seconds: float) -> bool:
    """Repeat `call`, which uses `client`, until Redis accepts it. False if it never did within `seconds`."""
    deadline = time.monotonic() + seconds
    outages = OutageLog(_log, "worker")
    while time.monotonic() < deadline:
        try:
            call()
        except redis.RedisError as error:
            outages.failed(error)
            # After a failover an old connection may lead to a read-only replica.
            client.connection_pool.disconnect()
            time.sleep(REDIS_RETRY_SECONDS)
        else:
            return True
    return False


def _unusable(reason: str) -> int:
    _log.critical(reason)
    # Its deadline is that of loading, and the process may be held for longer.
    disarm_watchdog()
    hold_unusable(os.environ, _log.critical)
    return EXIT_UNUSABLE


def main() -> int:
    logs.start("worker")
    for line in warnings(os.environ, VARIABLES):
        _log.warning(line)
    try:
        settings = WorkerSettings.load(os.environ)
        check_temporary_directory()
        # Before the libraries are imported, which takes seconds.
        check_source(settings.model)
        with cache_errors_as_settings(settings.cache_dir):
            return Process(settings).run()
    except NoTemporaryDirectory as error:
        return _unusable(str(error))
    except (SettingError, InvalidParameter, UnsupportedModel) as error:
        return _unusable(settings_message(error))
    except Exception:  # noqa: BLE001 - it is logged
        _log.critical("the worker failed", exc_info=True)
        return 1


if __name__ == "__main__":
    status = main()
    logs.flush()
    # Not sys.exit: a thread that is stuck in native code would keep the process alive, or crash its exit.
    os._exit(status)
