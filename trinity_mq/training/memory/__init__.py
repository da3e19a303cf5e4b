"""The memory of trainer and engines: an estimate before the start, and the use of the device while training."""
