"""Reads Trinity-RFT's experience bodies (``TRXP`` and pickles) in a child process that executes no code from them."""
