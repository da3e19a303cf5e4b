"""The bus on RabbitMQ. The only package that imports the AMQP client."""
