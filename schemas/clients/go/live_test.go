package trinitymq

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/vmihailenco/msgpack/v5"
)

// broker returns the URL of a real one; the tests below are run by tests/broker/test_clients.py.
func broker(t *testing.T) string {
	t.Helper()
	url := os.Getenv("TRINITY_MQ_TEST_BROKER_URL")
	if url == "" {
		t.Skip("needs a broker: TRINITY_MQ_TEST_BROKER_URL")
	}
	return url
}

func must[T any](t *testing.T) func(T, error) T {
	return func(value T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

// explorer answers each task of a new run with the n in it. Those with a negative n it only names.
func explorer(t *testing.T, url string) (run string, unanswered <-chan string) {
	t.Helper()
	run = "go-" + randomID()
	named := make(chan string, 2)
	conn := must[*amqp.Connection](t)(amqp.Dial(url))
	t.Cleanup(func() { conn.Close() })
	channel := must[*amqp.Channel](t)(conn.Channel())
	exchange := "tmq." + run + ".tasks"
	if err := channel.ExchangeDeclare(exchange, "topic", false, true, false, false, nil); err != nil {
		t.Fatal(err)
	}
	queue := must[amqp.Queue](t)(channel.QueueDeclare("", false, false, true, false, nil))
	if err := channel.QueueBind(queue.Name, "submit", exchange, false, nil); err != nil {
		t.Fatal(err)
	}
	tasks := must[<-chan amqp.Delivery](t)(channel.Consume(queue.Name, "", true, true, false, false, nil))
	go func() {
		for task := range tasks {
			value, _ := unpack(task.Body, noExtensions)
			n := value.(map[string]any)["task"].(map[string]any)["raw_task"].(map[string]any)["n"].(int64)
			if n < 0 {
				named <- task.MessageId
				continue
			}
			body, _ := msgpack.Marshal(&SubmissionOutcome{
				Kind: KindOutcome, VersionNumber: 1, SubmissionID: task.MessageId, Outcome: "finished",
				Metrics: Metrics{"n": float64(n)},
			})
			channel.PublishWithContext(context.Background(), "", task.ReplyTo, false, false, amqp.Publishing{
				Headers: amqp.Table{"kind": KindOutcome}, CorrelationId: task.CorrelationId, Body: body,
			})
		}
	}()
	return run, named
}

func numbered(n int) Task { return Task{RawTask: map[string]any{"n": n}} }

func TestLiveSubmissionsOfManyAtOnce(t *testing.T) {
	url := broker(t)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	run, _ := explorer(t, url)
	client := must[*Client](t)(Connect(ctx, url, run))
	defer client.Close()
	const many = 500
	failures := make(chan error, many)
	var group sync.WaitGroup
	for n := 0; n < many; n++ {
		group.Add(1)
		go func(n int) {
			defer group.Done()
			result, err := client.Submit(ctx, numbered(n), SubmitOptions{})
			if err == nil && result.Outcome.Metrics["n"] != float64(n) {
				err = fmt.Errorf("task %d got %v", n, result.Outcome.Metrics)
			}
			if err != nil {
				failures <- err
			}
		}(n)
	}
	group.Wait()
	close(failures)
	for err := range failures {
		t.Error(err)
	}
}

func TestLiveClientWaitsForItsRunToStart(t *testing.T) {
	url := broker(t)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	client := must[*Client](t)(Connect(ctx, url, "go-"+randomID()))
	defer client.Close()
	for round := 0; round < 3; round++ { // each closes the publishing channel
		if _, err := client.Publish(ctx, numbered(1), ""); !errors.Is(err, ErrNoRun) {
			t.Fatal(err)
		}
	}
	client.run, _ = explorer(t, url)
	if _, err := client.Submit(ctx, numbered(1), SubmitOptions{}); err != nil {
		t.Fatal(err)
	}
}

func TestLiveCloseEndsWhatIsPending(t *testing.T) {
	url := broker(t)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	run, unanswered := explorer(t, url)
	client := must[*Client](t)(Connect(ctx, url, run))
	short, cancelShort := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancelShort()
	result, err := client.Submit(short, numbered(-1), SubmitOptions{ID: "late"})
	if !errors.Is(err, context.DeadlineExceeded) || result.Outcome != nil {
		t.Fatalf("%+v, %v", result, err)
	}
	pending := make(chan error)
	go func() {
		_, err := client.Submit(ctx, numbered(-1), SubmitOptions{ID: "pending"})
		pending <- err
	}()
	if late := <-unanswered; late != "late" {
		t.Error(late)
	}
	if _, err := client.Submit(ctx, numbered(1), SubmitOptions{ID: <-unanswered}); !errors.Is(err, ErrPending) {
		t.Error(err)
	}
	if err := client.Close(); err != nil {
		t.Error(err)
	}
	if err := <-pending; !errors.Is(err, ErrLost) {
		t.Error(err)
	}
	cancel()
	if _, err := client.Publish(context.Background(), numbered(1), ""); !errors.Is(err, ErrLost) {
		t.Error(err)
	}
}

func TestLiveConnectContextIsForConnectingOnly(t *testing.T) {
	url := broker(t)
	run, _ := explorer(t, url)
	for round := 0; round < 20; round++ {
		connecting, cancel := context.WithCancel(context.Background())
		client := must[*Client](t)(Connect(connecting, url, run))
		cancel()
		if _, err := client.Submit(context.Background(), numbered(round), SubmitOptions{}); err != nil {
			t.Fatal(err)
		}
		client.Close()
	}
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Connect(gone, url, run); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
