"""Sends live events to the clients that follow them."""
