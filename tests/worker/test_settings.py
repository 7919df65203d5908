"""The settings of a worker are those that its engine and its watchdog take."""

from dataclasses import fields

from engine.config import POLICIES, EngineConfig
from engine.execution.loading.attention_backends import ATTENTION
from engine.execution.loading.limits import CUDA_LIMITS
from tokenmill.settings.declarations import EngineSettings, Timing, WorkerSettings
from tokenmill.settings.setting import settings_of
from worker.watchdog import WatchdogProcess

CHOSEN_WHILE_LOADING = {"max_model_len", "num_kv_blocks", "max_num_prefill_seqs", "max_chunk_tokens"}


def test_the_longest_stall_can_be_watched_for() -> None:
    timing = Timing.load({"TOKENMILL_STALL_SECONDS": "1e9"})
    watchdog = WatchdogProcess()
    watchdog.arm(timing.stall_seconds)
    watchdog.close()


def test_the_engine_has_a_setting_for_each_of_its_fields_and_takes_their_bounds() -> None:
    assert set(EngineSettings.model_fields) == {one.name for one in fields(EngineConfig)}
    environ = {
        "TOKENMILL_MAX_MODEL_LEN": "2",
        "TOKENMILL_NUM_KV_BLOCKS": "1",
        "TOKENMILL_AGEING_SECONDS": "1e9",
        "TOKENMILL_MAX_WAITING_SECONDS": "1e9",
        "TOKENMILL_PREFILL_RESERVE": "0.9",
    }
    EngineConfig(**EngineSettings.load(environ).engine_limits())


def test_the_words_to_choose_from_are_those_of_the_engine() -> None:
    declared = settings_of(WorkerSettings)
    assert declared["policy"].words == POLICIES
    assert declared["attention"].words == ATTENTION


def test_the_documented_defaults_are_those_of_the_engine() -> None:
    engine = EngineConfig(max_model_len=2, num_kv_blocks=1)
    shown = {name: one.shown_default for name, one in settings_of(EngineSettings).items()}

    for name, text in shown.items():
        default = getattr(engine, name)
        if name in CUDA_LIMITS:
            assert text == f"{default}; {CUDA_LIMITS[name]} on CUDA"
        elif name not in CHOSEN_WHILE_LOADING:
            assert text in (str(default).lower(), f"{default:g}" if isinstance(default, float) else ""), name
