"""Where the processes of a run are: on this machine, in docker compose, in Kubernetes."""
