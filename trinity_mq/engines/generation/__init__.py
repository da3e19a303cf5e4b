"""Parts of generation that all engines share: requests, token streams, pauses, stop conditions, text."""
