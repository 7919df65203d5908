"""Everything that computes: models, attention, sampling, tokenizers. The only room that imports torch."""
