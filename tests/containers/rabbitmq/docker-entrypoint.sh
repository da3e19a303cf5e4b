#!/bin/sh
# Starts the broker as process 1 of the container, which a SIGTERM then stops cleanly; any other command is run as it is.
# The server itself reads RABBITMQ_DEFAULT_USER, RABBITMQ_DEFAULT_PASS and RABBITMQ_DEFAULT_VHOST.
set -eu

if [ "${1:-}" = rabbitmq-server ]; then
    shift
    cd /var/lib/rabbitmq
    # The start script then becomes the server instead of waiting for it.
    export RUNNING_UNDER_SYSTEMD=true
    exec /usr/lib/rabbitmq/bin/rabbitmq-server "$@"
fi
exec "$@"
