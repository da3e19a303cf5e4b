"""Compatibility with Trinity-RFT: configurations and files of experiences."""
