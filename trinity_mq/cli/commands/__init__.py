"""Commands that consist of a single module each."""
