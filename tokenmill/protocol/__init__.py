"""The words between API, worker and readers: messages, keys and scripts. Standard library only."""
