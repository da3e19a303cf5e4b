package trinitymq

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/vmihailenco/msgpack/v5"
)

func outcomeReply(t *testing.T, id string, experiences int) amqp.Delivery {
	t.Helper()
	body, err := msgpack.Marshal(&SubmissionOutcome{
		Kind: KindOutcome, VersionNumber: 1, SubmissionID: id, Outcome: "finished", Experiences: experiences,
	})
	if err != nil {
		t.Fatal(err)
	}
	return amqp.Delivery{
		Headers: amqp.Table{"kind": KindOutcome}, CorrelationId: id, ContentType: ContentTypeMsgpack, Body: body,
	}
}

func partReply(id, message string) amqp.Delivery {
	return amqp.Delivery{
		Headers: amqp.Table{"kind": KindPart}, CorrelationId: id, MessageId: message, ContentType: ContentTypeExperiences,
	}
}

func TestRepliesAreTakenOnceAndInAnyOrder(t *testing.T) {
	client := &Client{calls: make(map[string]*call)}
	waited := &call{id: "a", want: true, seen: make(map[string]bool), done: make(chan struct{})}
	if !client.expect(waited) || client.expect(waited) {
		t.Fatal("one id is waited for once")
	}
	broken := outcomeReply(t, "a", 2)
	broken.Body = broken.Body[:5]
	strange := outcomeReply(t, "b", 0)
	strange.CorrelationId = "a"
	for _, step := range []struct {
		reply   amqp.Delivery
		dropped string
	}{
		{partReply("b", "p1"), "nobody waits"},
		{partReply("a", "p1"), ""},
		{partReply("a", "p1"), "repeated"},
		{partReply("a", ""), "without message id"},
		{broken, "does not decode"},
		{strange, `an outcome of "b"`},
		{amqp.Delivery{CorrelationId: "a", Body: []byte("\xc1 rubbish")}, "does not decode"},
		{outcomeReply(t, "a", 2), ""},
		{outcomeReply(t, "a", 2), "a second outcome"},
	} {
		if why := client.take(step.reply); (why == "") != (step.dropped == "") || !strings.Contains(why, step.dropped) {
			t.Fatalf("dropped because %q, wanted %q", why, step.dropped)
		}
		select {
		case <-waited.done:
			t.Fatal("complete too early")
		default:
		}
	}
	if why := client.take(partReply("a", "p2")); why != "" {
		t.Fatal(why)
	}
	<-waited.done
	if why := client.take(partReply("a", "p3")); !strings.Contains(why, "nobody waits") {
		t.Fatal(why)
	}
}

func TestTasksKeepWholeNumbersWhole(t *testing.T) {
	task, err := ParseTask([]byte(`{"raw_task": {"n": 7, "big": 18446744073709551615, "x": [1.0, {"y": -3}]}, "repeat_times": 2}`))
	if err != nil {
		t.Fatal(err)
	}
	body, err := EncodeSubmission(TaskSubmission{Task: task, SubmissionID: "s"})
	if err != nil {
		t.Fatal(err)
	}
	value, err := unpack(body, noExtensions)
	if err != nil {
		t.Fatal(err)
	}
	raw := value.(map[string]any)["task"].(map[string]any)["raw_task"].(map[string]any)
	list := raw["x"].([]any)
	if raw["n"] != int64(7) || raw["big"] != ^uint64(0) || list[0] != 1.0 || list[1].(map[string]any)["y"] != int64(-3) {
		t.Errorf("%#v", raw)
	}
}

func TestTasksThatWouldBeParkedAreRefusedHere(t *testing.T) {
	for _, text := range []string{`[]`, `{"rawtask": {}}`, `{"repeat_times": 1.5}`, `{} {}`, `{"raw_task": {"a": 1e999}}`, ``} {
		if _, err := ParseTask([]byte(text)); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", text, err)
		}
	}
	deep := any(nil)
	for level := 0; level < maxNesting; level++ {
		deep = []any{deep}
	}
	for name, task := range map[string]Task{
		"a negative count": {RepeatTimes: -1},
		"a bad text":       {RawTask: map[string]any{"a": "\xff"}},
		"too deep":         {RawTask: map[string]any{"a": deep}},
		"a channel":        {RawTask: map[string]any{"a": make(chan int)}},
		"too large":        {RawTask: map[string]any{"a": make([]byte, maxBody)}},
	} {
		if _, err := EncodeSubmission(TaskSubmission{Task: task}); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestConnectTellsWhatIsWrong(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	for _, url := range []string{"http://u:s3cr3t@127.0.0.1", "amqp://u:s3cr3t@127.0.0.1:x/", "amqp://u:s3cr3t@127.0.0.1:1/%2F", "%"} {
		_, err := Connect(ctx, url, "run")
		if err == nil || strings.Contains(err.Error(), "s3cr3t") {
			t.Errorf("%s: %v", url, err)
		}
	}
	if _, err := Connect(ctx, "amqp://127.0.0.1", "No Run"); !errors.Is(err, ErrInvalid) {
		t.Error(err)
	}
}
