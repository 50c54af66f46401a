//! RabbitMQ source (AMQP 0-9-1).
