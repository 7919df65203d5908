"""Between text and token ids: chat templates, token bytes, detokenization and stop strings."""
