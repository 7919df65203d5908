"""Turns logits into token ids and log-probabilities."""
