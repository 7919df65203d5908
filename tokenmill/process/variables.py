"""The names of all environment variables of Tokenmill, and suggestions for unknown ones.

Every process gets the whole environment but reads only its own settings, so each needs all names to find
unknown variables. A test compares them with the settings.
"""

from collections.abc import Iterable
from difflib import get_close_matches

PREFIX = "TOKENMILL_"
_NAMES = """
AGEING_SECONDS
API_KEY
API_KEYS
API_KEYS_FILE
ASYNC_SCHEDULING
ATTENTION
BLOCK_SIZE
CACHE_DIR
CHUNKED_PREFILL
DECODE_GRAPHS
DETERMINISTIC
DEVICE
DTYPE
FAIR_SHARING
GENERATION_CONFIG
GRACE_SECONDS
HEARTBEAT_SECONDS
HOLD_UNUSABLE
HOST
HTTP_GRACE_SECONDS
HTTP_READ_SECONDS
HTTP_THREADS
HTTP_WRITE_SECONDS
LEASE_SECONDS
LOAD_SECONDS
MAX_BODY_BYTES
MAX_CHUNK_TOKENS
MAX_CONNECTIONS_PER_ADDRESS
MAX_MODEL_LEN
MAX_NUM_BATCHED_TOKENS
MAX_NUM_PREFILL_SEQS
MAX_NUM_SEQS
MAX_PREEMPTIONS
MAX_SKIP_AHEAD
MAX_STREAMS
MAX_TASK_SECONDS
MAX_WAITING_SECONDS
MAX_WAITING_TASKS
MAX_WAITING_TOKENS
METRICS_HOST
METRICS_PORT
MODEL
NUM_KV_BLOCKS
POLICY
PORT
PREFILL_RESERVE
PREFIX_CACHING
QUANTIZATION
RETENTION_SECONDS
SERVED_MODEL_NAME
STALL_SECONDS
STATE_DIR
URL
WEBHOOK_ALLOW_PRIVATE
WEBHOOK_SECRET
WORKERS
"""
NAMES = frozenset(PREFIX + name for name in _NAMES.split())


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Those of `names` that have the prefix but are not settings."""
    return sorted(name for name in names if name.startswith(PREFIX) and name not in NAMES)


def warnings(names: Iterable[str]) -> list[str]:
    """A line for each unknown variable, with the most similar known one."""
    return [
        f"{name} is not a setting and is ignored{hint(name, NAMES, PREFIX)}"
        for name in unknown_variables(names)
    ]


def hint(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Suggest the most similar name, or "". `prefix`: common to all names, so not compared."""
    own = name.removeprefix(prefix)
    close = get_close_matches(own, sorted(each.removeprefix(prefix) for each in known), n=1, cutoff=0.7)
    return f"; did you mean {prefix}{close[0]}?" if close else ""
