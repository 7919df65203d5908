"""The load generator of `tokenmill bench`: Tokenmill and any OpenAI-compatible server, measured alike."""
