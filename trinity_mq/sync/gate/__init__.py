"""The weight-sync gate: pure state machines of coordinator and member, and their drivers on the bus."""
