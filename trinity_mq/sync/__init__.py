"""Weight sync: the gate, its drivers on the bus, and the channels that carry the weights."""
