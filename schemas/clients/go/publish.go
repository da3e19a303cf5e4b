package trinitymq

import (
	"context"
	"errors"
	"fmt"
	"sync"

	amqp "github.com/rabbitmq/amqp091-go"
)

// publisher is a channel in confirm mode. Its bookkeeping is its own: the library's deferred confirmations miss a
// confirm that is faster than the return of the publish.
type publisher struct {
	channel *amqp.Channel

	sending sync.Mutex // held while a message is written, so that tags follow the order on the wire
	tag     uint64

	mutex   sync.Mutex // held for moments: the reader of confirms needs it while a writer hangs
	pending map[uint64]*publication
	dead    error
}

type publication struct {
	id       string
	returned bool
	done     chan error // gets one value
}

func newPublisher(conn *amqp.Connection) (*publisher, error) {
	channel, err := conn.Channel()
	if err != nil {
		return nil, err
	}
	if err := channel.Confirm(false); err != nil {
		return nil, err
	}
	p := &publisher{channel: channel, pending: make(map[uint64]*publication)}
	// Without buffers: the broker sends a return before its confirm, and so each is handled before the next is read.
	returns := channel.NotifyReturn(make(chan amqp.Return))
	confirms := channel.NotifyPublish(make(chan amqp.Confirmation))
	closed := channel.NotifyClose(make(chan *amqp.Error, 1))
	go p.answers(returns, confirms, closed)
	return p, nil
}

func (p *publisher) answers(returns <-chan amqp.Return, confirms <-chan amqp.Confirmation, closed <-chan *amqp.Error) {
	for confirms != nil {
		select {
		case returned, open := <-returns:
			if !open {
				returns = nil
				continue
			}
			p.unroutable(returned.MessageId)
		case confirm, open := <-confirms:
			if !open {
				confirms = nil
				continue
			}
			p.settle(confirm)
		}
	}
	var reason error = amqp.ErrClosed
	if err, abnormal := <-closed; abnormal {
		reason = err
	}
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.dead = reason
	for tag, one := range p.pending {
		delete(p.pending, tag)
		one.done <- reason
	}
}

func (p *publisher) unroutable(id string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for _, one := range p.pending {
		if one.id == id {
			one.returned = true
		}
	}
}

func (p *publisher) settle(confirm amqp.Confirmation) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	one, found := p.pending[confirm.DeliveryTag]
	if !found {
		return
	}
	delete(p.pending, confirm.DeliveryTag)
	switch {
	case one.returned:
		one.done <- ErrNoRun
	case !confirm.Ack:
		one.done <- ErrNotConfirmed
	default:
		one.done <- nil
	}
}

// send writes a message; what becomes of it comes on the publication's done.
func (p *publisher) send(exchange, key string, message amqp.Publishing, one *publication) {
	p.sending.Lock()
	defer p.sending.Unlock()
	p.mutex.Lock()
	if p.dead != nil {
		one.done <- p.dead
		p.mutex.Unlock()
		return
	}
	p.tag++
	tag := p.tag
	p.pending[tag] = one
	p.mutex.Unlock()
	if err := p.channel.PublishWithContext(context.Background(), exchange, key, true, false, message); err != nil {
		p.channel.Close() // if it is not closed already: answers then tells all that are pending why
	}
}

// publish sends a submission and waits for the broker's confirm. The error is nil or wraps ErrNoRun, ErrLost,
// ErrNotConfirmed or the context's.
func (c *Client) publish(ctx context.Context, id string, body []byte, replyTo string) error {
	exchange := "tmq." + c.run + ".tasks"
	message := amqp.Publishing{
		Headers:      amqp.Table{"kind": KindSubmission, "version": int32(bodyVersion), "run": c.run},
		ContentType:  ContentTypeMsgpack,
		DeliveryMode: amqp.Persistent,
		MessageId:    id,
		Body:         body,
	}
	if replyTo != "" {
		message.ReplyTo, message.CorrelationId = replyTo, id
	}
	one := &publication{id: id, done: make(chan error, 1)}
	go func() { // a blocked socket takes nothing and knows no context
		publisher, err := c.openPublisher()
		if err != nil {
			one.done <- err
			return
		}
		publisher.send(exchange, "submit", message, one)
	}()
	select {
	case err := <-one.done:
		return c.explained(id, err)
	case <-c.lost:
		return fmt.Errorf("task %s: %w", id, c.lostError())
	case <-ctx.Done():
		return fmt.Errorf("task %s: no confirm from the broker (is it blocked by a memory or disk alarm?): %w", id, ctx.Err())
	}
}

// explained says what an error of the publishing channel means.
func (c *Client) explained(id string, err error) error {
	var fault *amqp.Error
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrNoRun), errors.As(err, &fault) && fault.Code == amqp.NotFound:
		return fmt.Errorf("%w: run %q; was it ever started there? (trinity-mq run ...)", ErrNoRun, c.run)
	case errors.Is(err, ErrNotConfirmed):
		return fmt.Errorf("task %s: %w: refused for now, publish it again under the same id", id, ErrNotConfirmed)
	}
	select {
	case <-c.lost:
		return fmt.Errorf("task %s: %w", id, c.lostError())
	default:
		return fmt.Errorf("task %s: %w: %v", id, ErrNotConfirmed, err)
	}
}

// openPublisher returns the publishing channel, a new one where a missing exchange has closed the last.
func (c *Client) openPublisher() (*publisher, error) {
	c.publishing.Lock()
	defer c.publishing.Unlock()
	if c.publisher == nil || c.publisher.channel.IsClosed() {
		publisher, err := newPublisher(c.conn)
		if err != nil {
			return nil, err
		}
		c.publisher = publisher
	}
	return c.publisher, nil
}
