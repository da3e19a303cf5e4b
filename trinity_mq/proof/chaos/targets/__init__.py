"""Access to the processes of a run: on this machine, in docker compose, in Kubernetes."""
