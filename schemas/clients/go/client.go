// Package trinitymq submits tasks to a running trinity-mq, waits for what became of them and decodes the experiences
// they gave. It needs nothing of trinity-mq but its broker: docs/protocol.md describes the messages.
package trinitymq

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/url"
	"regexp"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	heartbeat    = 10 * time.Second
	closeGrace   = 2 * time.Second
	dialTimeout  = 30 * time.Second
	replyBacklog = 32 // unacknowledged replies: bounds what waits in memory here
)

var runName = regexp.MustCompile(`^[a-z0-9-]{1,40}$`)

// Option changes how a client connects.
type Option func(*settings)

type settings struct {
	name string
	tls  *tls.Config
	log  func(string)
}

// WithName names the connection in the broker's list of connections.
func WithName(name string) Option { return func(s *settings) { s.name = name } }

// WithTLS is used for amqps URLs.
func WithTLS(config *tls.Config) Option { return func(s *settings) { s.tls = config } }

// WithLog is told of each reply that is dropped and why: strangers, repeats and bodies that do not decode.
func WithLog(log func(line string)) Option { return func(s *settings) { s.log = log } }

// Client is one connection to the broker of one run. It is safe for concurrent use. It does not reconnect: when the
// connection is lost every call returns ErrLost, and the caller connects again.
type Client struct {
	run      string
	settings settings
	conn     *amqp.Connection
	socket   net.Conn
	replies  string

	lost   chan struct{} // closed when the connection is gone
	reason error         // why; set before lost is closed
	once   sync.Once

	publishing sync.Mutex // held while the publishing channel is looked up or opened
	publisher  *publisher

	waiting sync.Mutex
	calls   map[string]*call
}

// Connect opens a connection for the tasks of a run. The run need not be there yet. ctx bounds the connecting only.
func Connect(ctx context.Context, brokerURL, run string, options ...Option) (*Client, error) {
	if !runName.MatchString(run) {
		return nil, invalid("run name %q must be 1 to 40 of a-z, 0-9 and '-'", run)
	}
	client := &Client{
		run:      run,
		settings: settings{name: "trinitymq-go", log: func(string) {}},
		replies:  fmt.Sprintf("tmq.%s.replies.submit.%s", run, randomID()),
		lost:     make(chan struct{}),
		calls:    make(map[string]*call),
	}
	for _, option := range options {
		option(&client.settings)
	}
	if err := client.dial(ctx, brokerURL); err != nil {
		return nil, err
	}
	if err := client.listen(); err != nil {
		client.Close()
		return nil, fmt.Errorf("no reply queue: %w", err)
	}
	return client, nil
}

// Close ends the connection; calls that still wait return ErrLost.
func (c *Client) Close() error {
	c.end(errors.New("closed by the caller"))
	// a socket that takes nothing more would hold the goodbye for ever
	timer := time.AfterFunc(closeGrace, func() { c.socket.Close() })
	defer timer.Stop()
	if err := c.conn.Close(); err != nil && !errors.Is(err, amqp.ErrClosed) {
		return err
	}
	return nil
}

func (c *Client) end(reason error) {
	c.once.Do(func() {
		c.reason = reason
		close(c.lost)
	})
}

func (c *Client) lostError() error { return fmt.Errorf("%w: %v", ErrLost, c.reason) }

func (c *Client) dial(ctx context.Context, brokerURL string) error {
	where, err := amqp.ParseURI(brokerURL)
	if err != nil {
		// the URL holds a password: none of it is repeated
		var detail *url.Error
		if errors.As(err, &detail) {
			err = detail.Err
		}
		return fmt.Errorf("broker URL does not parse (%v), wanted amqp://user:password@host:port/vhost", err)
	}
	at := net.JoinHostPort(where.Host, fmt.Sprint(where.Port))
	properties := amqp.NewConnectionProperties()
	properties["connection_name"] = c.settings.name
	connected := make(chan struct{})
	defer close(connected)
	c.conn, err = amqp.DialConfig(brokerURL, amqp.Config{
		Heartbeat:       heartbeat,
		Locale:          "en_US",
		Properties:      properties,
		TLSClientConfig: c.settings.tls,
		Dial: func(network, address string) (net.Conn, error) {
			socket, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			c.socket = socket
			go func() { // the library's handshake knows no context
				select {
				case <-connected:
				case <-ctx.Done():
					select {
					case <-connected: // first: what becomes of ctx is no concern of the connection
					default:
						socket.Close()
					}
				}
			}()
			return socket, socket.SetDeadline(time.Now().Add(dialTimeout))
		},
	})
	if err == nil {
		go c.watch(c.conn.NotifyClose(make(chan *amqp.Error, 1)))
		return nil
	}
	if c.socket != nil {
		c.socket.Close()
	}
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("no answer from RabbitMQ at %s: %w", at, ctx.Err())
	case errors.Is(err, amqp.ErrCredentials):
		return fmt.Errorf("RabbitMQ at %s: wrong user name or password (the run's broker.url holds them)", at)
	case errors.Is(err, amqp.ErrVhost):
		return fmt.Errorf("RabbitMQ at %s does not open virtual host %q", at, where.Vhost)
	}
	return fmt.Errorf("no RabbitMQ at %s: %w", at, err)
}

// watch waits for the end of the connection. It closes the socket first of all: the library waits for writers that hang
// in it.
func (c *Client) watch(closed <-chan *amqp.Error) {
	reason, abnormal := <-closed
	c.socket.Close()
	if abnormal {
		c.end(reason)
	}
	c.end(amqp.ErrClosed)
}

// listen declares the reply queue, which goes with this connection, and takes from it.
func (c *Client) listen() error {
	channel, err := c.conn.Channel()
	if err != nil {
		return err
	}
	if _, err := channel.QueueDeclare(c.replies, false, false, true, false, nil); err != nil {
		return err
	}
	if err := channel.Qos(replyBacklog, 0, false); err != nil {
		return err
	}
	deliveries, err := channel.Consume(c.replies, "", false, true, false, false, nil)
	if err != nil {
		return err
	}
	go func() {
		for delivery := range deliveries {
			if why := c.take(delivery); why != "" {
				c.settings.log(fmt.Sprintf("reply %q dropped: %s", delivery.MessageId, why))
			}
			if err := delivery.Ack(false); err != nil {
				break
			}
		}
		c.end(fmt.Errorf("the reply queue %s is gone", c.replies))
		c.socket.Close()
	}()
	return nil
}

func randomID() string {
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		panic(err) // the system has no randomness: nothing can be told apart
	}
	return hex.EncodeToString(id)
}
