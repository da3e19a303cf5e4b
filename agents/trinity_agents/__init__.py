"""The daemons, each short: build the parts, run them."""
