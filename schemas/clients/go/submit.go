package trinitymq

import (
	"context"
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"
)

// SubmitOptions say what is wanted of a submission.
type SubmitOptions struct {
	// ID de-duplicates: a task of the same id is done once, and its answer goes where the first one asked for it. Empty
	// makes a random one.
	ID string
	// WantExperiences waits for the experiences too.
	WantExperiences bool
}

// Result is what came back for a task.
type Result struct {
	ID string
	// Outcome is nil where none came.
	Outcome *SubmissionOutcome
	// Parts are the experience parts in the order of arrival, each once.
	Parts []Part
}

// Part is a piece of a task's experiences as it was sent: a body of ContentTypeExperiences or ContentTypeReference.
type Part struct {
	MessageID   string
	ContentType string
	Headers     map[string]any
	Body        []byte
}

// Decode returns the experiences in the part.
func (p *Part) Decode() (*Batch, error) {
	switch p.ContentType {
	case ContentTypeExperiences:
		return DecodeExperiences(p.Body)
	case ContentTypeReference:
		return nil, decodeError("it is a reference to a body in the blob store: see DecodeReference and fetch it from there")
	}
	return nil, decodeError("content type %s, wanted %s", short(p.ContentType), ContentTypeExperiences)
}

// Experiences returns those of all parts.
func (r *Result) Experiences() ([]Experience, error) {
	var found []Experience
	for number := range r.Parts {
		batch, err := r.Parts[number].Decode()
		if err != nil {
			return nil, fmt.Errorf("part %s: %w", short(r.Parts[number].MessageID), err)
		}
		found = append(found, batch.Experiences...)
	}
	return found, nil
}

// call is a submission that is waited for; guarded by Client.waiting.
type call struct {
	id      string
	want    bool
	outcome *SubmissionOutcome
	parts   []Part
	seen    map[string]bool
	done    chan struct{}
}

func (c *call) complete() bool {
	return c.outcome != nil && (!c.want || len(c.parts) >= c.outcome.Experiences)
}

// Publish hands a task over without waiting for its outcome and returns its id. The broker has confirmed it when the
// error is nil; after ErrNotConfirmed, ErrLost or a context's error it may be published again under the same id.
func (c *Client) Publish(ctx context.Context, task Task, id string) (string, error) {
	if id == "" {
		id = randomID()
	}
	body, err := EncodeSubmission(TaskSubmission{Task: task, SubmissionID: id})
	if err != nil {
		return id, err
	}
	return id, c.publish(ctx, id, body, "")
}

// Submit hands a task over and waits for its outcome, and with WantExperiences for its experience parts. A task that
// failed is no error: see Result.Outcome. The result is never nil; beside an error it holds what had come by then.
func (c *Client) Submit(ctx context.Context, task Task, options SubmitOptions) (*Result, error) {
	id := options.ID
	if id == "" {
		id = randomID()
	}
	result := &Result{ID: id}
	body, err := EncodeSubmission(TaskSubmission{Task: task, SubmissionID: id, WantExperiences: options.WantExperiences})
	if err != nil {
		return result, err
	}
	waited := &call{id: id, want: options.WantExperiences, seen: make(map[string]bool), done: make(chan struct{})}
	if !c.expect(waited) {
		return result, fmt.Errorf("task %s: %w", id, ErrPending)
	}
	err = c.publish(ctx, id, body, c.replies)
	if err == nil {
		select {
		case <-waited.done:
		case <-c.lost:
			err = fmt.Errorf("task %s: %w", id, c.lostError())
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	c.waiting.Lock()
	defer c.waiting.Unlock()
	delete(c.calls, id)
	result.Outcome, result.Parts = waited.outcome, waited.parts
	switch {
	case waited.complete(): // it may have won a race against the deadline
		return result, nil
	case err != ctx.Err():
		return result, err
	case waited.outcome == nil:
		return result, fmt.Errorf("no outcome of task %s in time; it is with run %q and may still be done: %w", id, c.run, err)
	}
	return result, fmt.Errorf("%d of %d experience parts of task %s in time, its outcome is %s: %w",
		len(waited.parts), waited.outcome.Experiences, id, waited.outcome.Outcome, err)
}

func (c *Client) expect(one *call) bool {
	c.waiting.Lock()
	defer c.waiting.Unlock()
	if _, twice := c.calls[one.id]; twice {
		return false
	}
	c.calls[one.id] = one
	return true
}

// take keeps a reply for the call that waits for it, or says why it is dropped. Replies come at least once, and anyone
// can publish to a queue.
func (c *Client) take(reply amqp.Delivery) string {
	c.waiting.Lock()
	defer c.waiting.Unlock()
	one, found := c.calls[reply.CorrelationId]
	if !found || one.complete() {
		return fmt.Sprintf("nobody waits for correlation id %q", reply.CorrelationId)
	}
	kind, _ := reply.Headers["kind"].(string)
	if kind == KindPart || reply.ContentType == ContentTypeExperiences {
		if why := one.addPart(reply); why != "" {
			return why
		}
	} else {
		outcome, err := DecodeOutcome(reply.Body, reply.ContentType)
		switch {
		case err != nil:
			return err.Error()
		case outcome.SubmissionID != one.id:
			return fmt.Sprintf("an outcome of %q", outcome.SubmissionID)
		case one.outcome != nil:
			return "a second outcome"
		}
		one.outcome = outcome
	}
	if one.complete() {
		close(one.done)
	}
	return ""
}

func (c *call) addPart(reply amqp.Delivery) string {
	key := reply.MessageId
	switch {
	case !c.want:
		return "no experiences were asked for"
	case key == "":
		return "a part without message id"
	case c.seen[key]:
		return "a repeated part"
	}
	c.seen[key] = true
	c.parts = append(c.parts, Part{
		MessageID: key, ContentType: reply.ContentType, Headers: reply.Headers, Body: reply.Body,
	})
	return ""
}
