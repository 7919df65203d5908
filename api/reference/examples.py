"""Examples of replies, by the name of their schema. A body's example is declared with its model."""

from typing import Any

_ID = "01a2298e2dd8e6a488c31b3a6b1f8cbb"
_MODEL = "SmolLM2-135M-Instruct"
_URL = f"/v1/tasks/{_ID}"
_CREATED = 1796121274
_USAGE = {"prompt_tokens": 37, "completion_tokens": 8, "total_tokens": 45, "cached_tokens": 0}
_TEXT = "The capital of France is Paris."
_TIMINGS = {"queue_seconds": 0.013902, "ttft_seconds": 0.05493, "total_seconds": 0.125604}
_SUMMARY: dict[str, Any] = {
    "id": _ID,
    "object": "task",
    "status": "completed",
    "created_at": 1796121274.389,
    "model": _MODEL,
    "priority": 2,
    "usage": _USAGE,
    "timings": _TIMINGS,
    "error": None,
    "urls": {"self": _URL, "events": f"{_URL}/events", "cancel": f"{_URL}/cancel"},
    "metadata": {"user": "42"},
    "request_id": "req-77",
    "webhook": None,
}
_OUTPUT = {
    "index": 0,
    "text": _TEXT,
    "token_ids": [504, 3575, 282, 4649, 314, 7042, 30, 2],
    "finish_reason": "stop",
    "logprobs": None,
}
TASK: dict[str, Any] = {
    **_SUMMARY,
    "queue": None,
    "outputs": [_OUTPUT],
    "prompt_logprobs": None,
    "output_limit": {"max_tokens": 256, "requested": 256, "bound_by": "max_tokens"},
    "request": None,
}
_WORKER = {
    "name": "gpu1-812-9157c682",
    "model": _MODEL,
    "state": "ready",
    "detail": "",
    "started_at": 1796121260.047,
    "running": 1,
    "waiting": 0,
    "max_num_seqs": 64,
}
_OPENAI_USAGE = {
    "prompt_tokens": 37,
    "completion_tokens": 8,
    "total_tokens": 45,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_EVENT = {"v": 1, "id": _ID, "index": 0}
_MODEL_VIEW = {
    "id": _MODEL,
    "object": "model",
    "created": _CREATED,
    "owned_by": "tokenmill",
    "max_model_len": 8192,
}
_MESSAGE = {"role": "assistant", "content": _TEXT, "refusal": None, "tool_calls": None}

_RESPONSE_ID = f"resp_{_ID}"
_STEP = {"step": 4711, "at": 1796121274.4, "seconds": {"total": 0.021}, "kv": {"used": 12, "total": 8289}}
_BUDGET = {"tokens": 512, "used": 1, "seqs": 1, "max_seqs": 64}
_LANE = {"task": _ID, "index": 0, "state": "decode", "tokens": 1, "reason": None}
_CHUNK = {"id": f"chatcmpl-{_ID}", "object": "chat.completion.chunk", "created": _CREATED, "model": _MODEL}
_MESSAGE_ITEM = {
    "id": f"msg_{_ID}",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": _TEXT, "annotations": [], "logprobs": []}],
}
_RESPONSE = {
    "id": _RESPONSE_ID,
    "object": "response",
    "created_at": _CREATED,
    "model": _MODEL,
    "status": "completed",
    "background": True,
    "output": [_MESSAGE_ITEM],
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": None,
    "top_p": None,
    "truncation": "disabled",
    "usage": {
        "input_tokens": 37,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 45,
    },
}
_INPUT_ITEM = {
    "id": f"msg_{_ID}_in0",
    "type": "message",
    "role": "user",
    "status": "completed",
    "content": [{"type": "input_text", "text": "What is the capital of France?"}],
}

_FILE = {
    "id": "file-0197c2e0a1b30123456789abcdef0123",
    "object": "file",
    "bytes": 130,
    "created_at": _CREATED,
    "expires_at": _CREATED + 2_592_000,
    "filename": "requests.jsonl",
    "purpose": "batch",
    "status": "processed",
    "status_details": None,
}
_BATCH = {
    "id": "batch_0197c2e0a1b30123456789abcdef0124",
    "object": "batch",
    "endpoint": "/v1/chat/completions",
    "model": _MODEL,
    "errors": None,
    "input_file_id": _FILE["id"],
    "completion_window": "24h",
    "status": "in_progress",
    "output_file_id": None,
    "error_file_id": None,
    "created_at": _CREATED,
    "in_progress_at": _CREATED + 1,
    "expires_at": _CREATED + 86_400,
    "finalizing_at": None,
    "completed_at": None,
    "failed_at": None,
    "expired_at": None,
    "cancelling_at": None,
    "cancelled_at": None,
    "request_counts": {"total": 50_000, "completed": 812, "failed": 0},
    "metadata": None,
}

EXAMPLES: dict[str, Any] = {
    "FileView": _FILE,
    "FileList": {
        "object": "list",
        "data": [_FILE],
        "first_id": _FILE["id"],
        "last_id": _FILE["id"],
        "has_more": False,
    },
    "FileDeleted": {"id": _FILE["id"], "object": "file", "deleted": True},
    "BatchView": _BATCH,
    "BatchList": {
        "object": "list",
        "data": [_BATCH],
        "first_id": _BATCH["id"],
        "last_id": _BATCH["id"],
        "has_more": False,
    },
    "ResponseView": _RESPONSE,
    "InputItemList": {
        "object": "list",
        "data": [_INPUT_ITEM],
        "first_id": _INPUT_ITEM["id"],
        "last_id": _INPUT_ITEM["id"],
        "has_more": False,
    },
    "DeletedResponse": {"id": _RESPONSE_ID, "object": "response", "deleted": True},
    "Trace": {
        "traceEvents": [
            {"ph": "M", "pid": 1, "tid": 0, "name": "thread_name", "args": {"name": "steps"}},
        ],
        "displayTimeUnit": "ms",
    },
    "StepEventView": {**_STEP, "budget": _BUDGET, "lanes": [_LANE]},
    "ChatCompletionChunk": {
        **_CHUNK,
        "choices": [{"index": 0, "delta": {"content": "The"}, "finish_reason": None, "logprobs": None}],
    },
    "CompletionChunk": {
        **_CHUNK,
        "id": f"cmpl-{_ID}",
        "object": "text_completion",
        "choices": [{"index": 0, "text": "The", "finish_reason": None, "logprobs": None}],
    },
    "StreamError": {
        "error": {"type": "server_error", "code": "engine_error", "message": "the step failed", "param": None}
    },
    "ResponseEventView": {"type": "response.output_text.delta", "sequence_number": 5, "delta": "The"},
    "Task": TASK,
    "TaskList": {"object": "list", "data": [_SUMMARY], "has_more": False, "next": None},
    "Queue": {
        "object": "queue",
        "model": _MODEL,
        "waiting": 2,
        "waiting_by_priority": {"0": 0, "1": 0, "2": 2, "3": 0, "4": 0},
        "waiting_tokens": 612,
        "oldest_seconds": 0.21,
        "running": 64,
        "ready_workers": 1,
        "drain_tokens_per_second": 812.5,
    },
    "WorkerList": {"object": "list", "data": [_WORKER]},
    "Readiness": {"state": "ready", "model": _MODEL, "workers": [_WORKER], "warnings": []},
    "Liveness": {"state": "alive"},
    "ModelList": {"object": "list", "data": [_MODEL_VIEW]},
    "ModelView": _MODEL_VIEW,
    "ChatCompletion": {
        "id": f"chatcmpl-{_ID}",
        "object": "chat.completion",
        "created": _CREATED,
        "model": _MODEL,
        "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop", "logprobs": None}],
        "usage": _OPENAI_USAGE,
    },
    "Completion": {
        "id": f"cmpl-{_ID}",
        "object": "text_completion",
        "created": _CREATED,
        "model": _MODEL,
        "choices": [{"index": 0, "text": _TEXT, "finish_reason": "stop", "logprobs": None}],
        "usage": _OPENAI_USAGE,
    },
    "TokenEventView": {**_EVENT, "seq": 0, "token": 504, "text": "The"},
    "EndEventView": {**_EVENT, "seq": 7, "token": None, "text": "", "finish_reason": "stop"},
    "FinishedEventView": {
        **_EVENT,
        "seq": 8,
        "token": None,
        "text": "",
        "finish_reason": "stop",
        "done": True,
        "usage": _USAGE,
        "error": None,
    },
    "TaskEnded": {"type": "task.completed", "timestamp": "2026-12-01T10:34:34.516Z", "data": TASK},
}
