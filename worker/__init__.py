"""The worker: claims tasks from Redis, runs them in the engine, and publishes their tokens."""
