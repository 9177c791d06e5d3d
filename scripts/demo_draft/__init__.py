"""Makes the demo draft: training text, training, export, acceptance. The server imports nothing from here."""
