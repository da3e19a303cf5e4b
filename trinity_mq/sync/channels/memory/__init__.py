"""The memory channel: engines stream weights over HTTP from a copy in the trainer's memory."""
