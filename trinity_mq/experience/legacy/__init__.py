"""Reads Trinity-RFT's experience bodies, pickles included, without running anything in them."""
