module trinitymq

go 1.19

require (
	github.com/klauspost/compress v1.15.12
	github.com/rabbitmq/amqp091-go v1.5.0
	github.com/vmihailenco/msgpack/v5 v5.3.5
)

require github.com/vmihailenco/tagparser/v2 v2.0.0 // indirect
