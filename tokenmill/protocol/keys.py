"""Every Redis key of ours. `docs/redis-keys.md` tells owners and lifetimes; RQ's own keys are RQ's.

No key has literal braces: one deployment lives in one database, standalone or behind Sentinel.
"""

LEASES = "tokenmill:leases"
"""Sorted set: claimed task -> when its lease lapses (Redis time, seconds)."""

WORKERS = "tokenmill:workers"
"""Sorted set: worker name -> when its record lapses (Redis time, seconds)."""

OUTBOX = "tokenmill:outbox"
"""Stream: ended tasks whose webhooks are to be delivered now."""

OUTBOX_DUE = "tokenmill:outbox:due"
"""Sorted set: ended task -> when its webhook is tried again (Redis time, seconds)."""

WATCHED = "tokenmill:watched"
"""Sorted set: task that ends with its last reader -> when the last has lapsed (Redis time, seconds)."""

DAMAGED = "tokenmill:damaged"
"""Set, expiring: models of which a script found an index missing or of the wrong type."""

AUDITED = "tokenmill:audited"
"""String, expiring: an audit of all tasks was made in this period."""

ASIDE = "tokenmill:aside"
"""Sorted set, expiring: record that the reaper could not treat -> when it is treated again (Redis time,
seconds).
"""

OUTAGE = "tokenmill:outage"
"""String, expiring: when Redis last failed a process that takes lapsed tasks back (Redis time, seconds)."""

CONTROL = "tokenmill:control"
"""Channel: JSON commands to every worker, `{"cancel": task id}`."""


def run(task_id: str) -> str:
    """Hash: what is known of a task beside its RQ job. `docs/redis-keys.md` lists its fields."""
    return f"tokenmill:run:{task_id}"


def log(task_id: str) -> str:
    """Stream: all messages of a task, entry `0-(seq+1)`. Never trimmed."""
    return f"tokenmill:log:{task_id}"


def readers(task_id: str) -> str:
    """Sorted set: reader of a task that ends with its last one -> when it lapses (Redis time, seconds)."""
    return f"tokenmill:readers:{task_id}"


def channel(task_id: str) -> str:
    """Channel: the messages as they are appended to the log."""
    return f"tokenmill:tok:{task_id}"


def queues(slug: str) -> str:
    """Sorted set: RQ queue of a model that holds waiting tasks -> acceptance of its head (microseconds)."""
    return f"tokenmill:queues:{slug}"


def lines(group: str) -> str:
    """Sorted set of a model's class: `<acceptance of the head, 20 digits><queue>` -> its tenant's counter.

    `group`: `<slug>:<class>`.
    """
    return f"tokenmill:lines:{group}"


def heads(group: str) -> str:
    """Sorted set of a model's class: queue -> acceptance of its head (microseconds)."""
    return f"tokenmill:heads:{group}"


def unserved(slug: str) -> str:
    """Sorted set: queue of a model -> acceptance of its head, or its last claim if later (microseconds)."""
    return f"tokenmill:unserved:{slug}"


def rule(slug: str) -> str:
    """Hash: `ageing_us`, `max_waiting_us`, `fair` of the order of claims, as last claimed with; `turn`."""
    return f"tokenmill:rule:{slug}"


def shares(slug: str) -> str:
    """Sorted set: tenant that waits -> its counter, estimated tokens that it was served."""
    return f"tokenmill:shares:{slug}"


def away(slug: str) -> str:
    """Sorted set, expiring: tenant that does not wait -> its counter. `:last`: that of the last to wait."""
    return f"tokenmill:away:{slug}"


def waiting(slug: str) -> str:
    """Hash: `tasks:<class>`, `tokens:<class>` -> how many wait, and their estimated tokens."""
    return f"tokenmill:waiting:{slug}"


def tenants(slug: str) -> str:
    """Hash: `tasks:<tenant>`, `tokens:<tenant>` -> the tenant's waiting tasks, and their estimated tokens."""
    return f"tokenmill:tenants:{slug}"


def shown(slug: str) -> str:
    """Sorted set: RQ queue of a model that RQ's tools show -> when its registries are tidied next."""
    return f"tokenmill:shown:{slug}"


def sweep(slug: str) -> str:
    """String: where the search for claimed tasks without a valid lease resumes, `<queue>` and
    `<id>:<owner>`.
    """
    return f"tokenmill:sweep:{slug}"


def clock(slug: str) -> str:
    """String: microseconds of the last acceptance, so that they rise even when Redis's clock steps back."""
    return f"tokenmill:clock:{slug}"


def order(queue: str) -> str:
    """Sorted set: waiting task of `queue` -> microseconds of its acceptance (Redis time, strictly rising)."""
    return f"tokenmill:order:{queue}"


def cost(queue: str) -> str:
    """Hash: waiting task of `queue` -> its cost in estimated tokens.

    `<level>:<block>`: the sum of those accepted in a block of time, see `sums.lua`; `:total`: of all.
    """
    return f"tokenmill:cost:{queue}"


def deadlines(slug: str) -> str:
    """Sorted set: waiting task of a model -> when its first own limit passes (Redis time, seconds)."""
    return f"tokenmill:deadlines:{slug}"


def totals(slug: str) -> str:
    """Hash: counters of a model that only grow, written in the transactions that they count."""
    return f"tokenmill:totals:{slug}"


def pace(slug: str) -> str:
    """Hash, expiring: how fast a model's waiting tasks are worked off, see `served.lua`."""
    return f"tokenmill:pace:{slug}"


def wake(slug: str) -> str:
    """Channel: something can be claimed."""
    return f"tokenmill:wake:{slug}"


def ready(slug: str) -> str:
    """Sorted set: ready worker of a model -> when its record lapses (Redis time, seconds)."""
    return f"tokenmill:ready:{slug}"


def worker(name: str) -> str:
    """String, expiring: the worker's JSON record (state, model, progress)."""
    return f"tokenmill:worker:{name}"


def model_card(slug: str) -> str:
    """String, persistent: the JSON card that the last worker of a model published."""
    return f"tokenmill:model:{slug}"


def idempotency(tenant: str, key_digest: str) -> str:
    """String: `<body digest>:<task id>` of the submission made under an Idempotency-Key."""
    return f"tokenmill:idem:{tenant}:{key_digest}"
