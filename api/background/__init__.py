"""Threads that run beside the HTTP server: reaper, index audit, Redis checks, webhook delivery."""
