"""Builds the demo model: corpus, vocabulary, token file, evaluation sets. The server imports nothing from here."""
