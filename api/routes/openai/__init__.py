"""Routes that OpenAI's clients call. Each completion is a task, which `/v1/tasks` shows too."""
