"""The documented Scheduler: a client that schedules tasks and waits for their statuses and experiences."""
