"""The wire between API, worker and clients: messages, keys, records, task store. Standard library only."""
