"""The weight-sync gate, its drivers on the bus, and the channels that carry the weights."""
