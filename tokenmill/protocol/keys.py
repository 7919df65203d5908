"""The Redis keys of Tokenmill. `docs/redis-keys.md` lists their writers and lifetimes.

No key has literal braces: a deployment uses one database, standalone or behind Sentinel.
"""

LEASES = "tokenmill:leases"
"""Sorted set: claimed task -> end of its lease (Redis time, seconds)."""

WORKERS = "tokenmill:workers"
"""Sorted set: worker name -> expiry of its record (Redis time, seconds)."""

OUTBOX = "tokenmill:outbox"
"""Stream: ended tasks whose webhooks are due."""

OUTBOX_DUE = "tokenmill:outbox:due"
"""Sorted set: ended task -> next attempt of its webhook (Redis time, seconds)."""

WATCHED = "tokenmill:watched"
"""Sorted set: task that is cancelled with its last reader -> when that lapses (Redis time, seconds)."""

DAMAGED = "tokenmill:damaged"
"""Set, expiring: models with an index that a script found missing or of the wrong type."""

AUDITED = "tokenmill:audited"
"""String, expiring: exists if an audit ran in this period."""

ASIDE = "tokenmill:aside"
"""Sorted set, expiring: record that the reaper could not process -> next attempt (Redis time, seconds)."""

OUTAGE = "tokenmill:outage"
"""String, expiring: when Redis last failed a process that runs the reaper (Redis time, seconds)."""

ENDED = "tokenmill:ended"
"""Sorted set: `<tenant hash>:<task>` of an ended task -> when its keys expire (Redis time, seconds)."""
BATCHES = "tokenmill:batches"
"""Sorted set: batch that has not ended -> when a runner may take it (Redis time, seconds)."""

FILES_EXPIRING = "tokenmill:files:expiring"
"""Sorted set: file -> when it expires (Redis time, seconds)."""

CONTROL = "tokenmill:control"
"""Channel: JSON commands to all workers, `{"cancel": task id}`."""


def run(task_id: str) -> str:
    """Hash: the record of a task besides its RQ job. `docs/redis-keys.md` lists its fields."""
    return f"tokenmill:run:{task_id}"


def log(task_id: str) -> str:
    """Stream: all events of a task, entry ids `0-(seq+1)`. Never trimmed."""
    return f"tokenmill:log:{task_id}"


def readers(task_id: str) -> str:
    """Sorted set: reader of a task that is cancelled with its last one -> expiry (Redis time, seconds)."""
    return f"tokenmill:readers:{task_id}"


def channel(task_id: str) -> str:
    """Channel: the events of a task as JSON, published when they are appended to the log."""
    return f"tokenmill:tok:{task_id}"


def tasks(tenant: str) -> str:
    """Sorted set: task of a tenant -> acceptance (microseconds). `tenant`: `naming.tenant_hash`."""
    return f"tokenmill:tasks:{tenant}"


def queues(slug: str) -> str:
    """Sorted set: non-empty queue of a model -> acceptance of its head (microseconds)."""
    return f"tokenmill:queues:{slug}"


def lines(group: str) -> str:
    """Sorted set: `<acceptance of the head, 20 digits><queue>` -> counter of its tenant, see `shares`.

    `group`: `<slug>:<class>`.
    """
    return f"tokenmill:lines:{group}"


def heads(group: str) -> str:
    """Sorted set: non-empty queue of a class -> acceptance of its head (microseconds)."""
    return f"tokenmill:heads:{group}"


def unserved(slug: str) -> str:
    """Sorted set: non-empty queue -> acceptance of its head, or its last claim if later (microseconds)."""
    return f"tokenmill:unserved:{slug}"


def rule(slug: str) -> str:
    """Hash: `ageing_us`, `max_waiting_us` and `fair` of the last claim; `turn`, see `claim_order.lua`."""
    return f"tokenmill:rule:{slug}"


def shares(slug: str) -> str:
    """Sorted set: tenant with waiting tasks -> counter of the estimated tokens served to it."""
    return f"tokenmill:shares:{slug}"


def away(slug: str) -> str:
    """Sorted set, expiring: tenant without waiting tasks -> counter; `:last`: of the last to be added."""
    return f"tokenmill:away:{slug}"


def waiting(slug: str) -> str:
    """Hash: `tasks:<class>`, `tokens:<class>` -> waiting tasks of a class and their estimated tokens."""
    return f"tokenmill:waiting:{slug}"


def tenants(slug: str) -> str:
    """Hash: `tasks:<tenant>`, `tokens:<tenant>` -> waiting tasks of a tenant and their estimated tokens."""
    return f"tokenmill:tenants:{slug}"


def shown(slug: str) -> str:
    """Sorted set: queue of a model that RQ's tools show -> when its registries are tidied next."""
    return f"tokenmill:shown:{slug}"


def sweep(slug: str) -> str:
    """String: where the search for claims without a valid lease resumes, `<queue> <id>:<owner>`."""
    return f"tokenmill:sweep:{slug}"


def clock(slug: str) -> str:
    """String: last acceptance (microseconds), so that the next is later even if Redis's clock is set back."""
    return f"tokenmill:clock:{slug}"


def order(queue: str) -> str:
    """Sorted set: waiting task of `queue` -> acceptance (Redis time, microseconds, strictly increasing)."""
    return f"tokenmill:order:{queue}"


def cost(queue: str) -> str:
    """Hash: waiting task of `queue` -> cost in estimated tokens.

    `<level>:<block>`: the sum over a block of acceptance time, see `cost_sums.lua`; `:total`: over all.
    """
    return f"tokenmill:cost:{queue}"


def deadlines(slug: str) -> str:
    """Sorted set: waiting task of a model -> when its first time limit passes (Redis time, seconds)."""
    return f"tokenmill:deadlines:{slug}"


def totals(slug: str) -> str:
    """Hash: monotonic counters of a model, updated by the scripts whose changes they count."""
    return f"tokenmill:totals:{slug}"


def pace(slug: str) -> str:
    """Hash, expiring: how fast a model's waiting tasks are processed, see `drain_rate.lua`."""
    return f"tokenmill:pace:{slug}"


def wake(slug: str) -> str:
    """Channel: the name of a queue with a task to claim."""
    return f"tokenmill:wake:{slug}"


def ready(slug: str) -> str:
    """Sorted set: ready worker of a model -> expiry of its record (Redis time, seconds)."""
    return f"tokenmill:ready:{slug}"


def worker(name: str) -> str:
    """String, expiring: the worker's JSON record (state, model, load)."""
    return f"tokenmill:worker:{name}"


def steps(name: str) -> str:
    """Stream, capped and expiring: a worker's steps, see `tokenmill/protocol/steps.py`."""
    return f"tokenmill:steps:{name}"


def steps_watched(name: str) -> str:
    """String, expiring: exists while a client follows the steps of a worker."""
    return f"tokenmill:steps:watched:{name}"


def model_card(slug: str) -> str:
    """String: the JSON model card that the last worker of a model published."""
    return f"tokenmill:model:{slug}"


def idempotency(tenant: str, key_digest: str) -> str:
    """String: `<body digest>:<task id>` of the submission with an Idempotency-Key."""
    return f"tokenmill:idem:{tenant}:{key_digest}"


def file(file_id: str) -> str:
    """Hash: the record of a file (`record`, JSON), its `tenant` and the number of its `uses`."""
    return f"tokenmill:file:{file_id}"


def files(tenant: str) -> str:
    """Sorted set: the files of a tenant. Their ids sort by time."""
    return f"tokenmill:files:of:{tenant}"


def batch(batch_id: str) -> str:
    """Hash: the record of a batch (`record`, JSON) and its progress."""
    return f"tokenmill:batch:{batch_id}"


def batch_lines(batch_id: str) -> str:
    """String: one bit for each line of a running batch, set once its result is recorded."""
    return f"tokenmill:batch:lines:{batch_id}"


def batch_segments(batch_id: str) -> str:
    """List: the stored pieces of the results of a running batch, as JSON."""
    return f"tokenmill:batch:segments:{batch_id}"


def batch_index(tenant: str) -> str:
    """Sorted set: the batches of a tenant. Their ids sort by time."""
    return f"tokenmill:batches:of:{tenant}"


def open_batches(tenant: str) -> str:
    """Set: the batches of a tenant that have not ended."""
    return f"tokenmill:batches:open:{tenant}"
