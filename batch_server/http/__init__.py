"""What clients speak with: OpenAI's files and batches, over HTTP."""
