"""Builds the demo model: corpus, vocabulary, token file, evaluation sets. Plain Python; nothing here is imported by the server."""
