"""Files and batches, in the shapes of the OpenAI API."""
