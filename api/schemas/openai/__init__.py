"""Request and reply bodies of the OpenAI-compatible routes."""
