package trinitymq

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"unicode/utf8"

	"github.com/vmihailenco/msgpack/v5"
)

// Content types of the bodies.
const (
	ContentTypeMsgpack     = "application/msgpack"
	ContentTypeJSON        = "application/json"
	ContentTypeExperiences = "application/vnd.trinity-mq.experiences"
	ContentTypeReference   = "application/vnd.trinity-mq.reference"
)

// maxBody is what RabbitMQ takes from 4.0 on; one message over it closes the channel with all that is in flight on it.
const maxBody = 16 << 20

// ParseTask reads a task from JSON. Whole numbers stay whole, and unknown keys are errors: they would be ignored in
// silence at the other end.
func ParseTask(text []byte) (Task, error) {
	var task Task
	from := json.NewDecoder(bytes.NewReader(text))
	from.UseNumber()
	from.DisallowUnknownFields()
	if err := from.Decode(&task); err != nil {
		return Task{}, invalid(`%v; wanted an object like {"raw_task": {"question": "1+1=", "answer": "2"}}`, err)
	}
	if _, err := from.Token(); err != io.EOF {
		return Task{}, invalid("something follows the JSON object")
	}
	for _, values := range []map[string]any{
		task.RawTask, task.FormatArgs, task.RolloutArgs, task.WorkflowArgs, task.RewardFnArgs, task.Index,
	} {
		for key, value := range values {
			number, err := numbers(value)
			if err != nil {
				return Task{}, invalid("%s: %v", key, err)
			}
			values[key] = number
		}
	}
	return task, nil
}

// numbers replaces each json.Number in value by an int64, uint64 or float64.
func numbers(value any) (any, error) {
	var err error
	switch value := value.(type) {
	case json.Number:
		if whole, err := strconv.ParseInt(string(value), 10, 64); err == nil {
			return whole, nil
		}
		if whole, err := strconv.ParseUint(string(value), 10, 64); err == nil {
			return whole, nil
		}
		found, err := value.Float64()
		if err != nil || math.IsInf(found, 0) {
			return nil, fmt.Errorf("the number %s does not fit 64 bits", value)
		}
		return found, nil
	case map[string]any:
		for key := range value {
			if value[key], err = numbers(value[key]); err != nil {
				return nil, err
			}
		}
	case []any:
		for number := range value {
			if value[number], err = numbers(value[number]); err != nil {
				return nil, err
			}
		}
	}
	return value, nil
}

// EncodeSubmission returns the msgpack body of a submission, checked as far as the other end would refuse it: there it
// would be parked without an answer.
func EncodeSubmission(submission TaskSubmission) ([]byte, error) {
	if submission.Task.RepeatTimes < 0 {
		return nil, invalid("repeat_times is %d, wanted at least 1, or 0 for the run's own", submission.Task.RepeatTimes)
	}
	submission.Kind, submission.VersionNumber = KindSubmission, bodyVersion
	body, err := msgpack.Marshal(&submission)
	if err != nil {
		return nil, invalid("msgpack cannot hold it: %v", err)
	}
	if len(body) > maxBody {
		return nil, invalid("it takes %d bytes, a broker takes at most %d; send a reference to what is large", len(body), maxBody)
	}
	if _, err := unpack(body, noExtensions); err != nil {
		return nil, invalid("%v", err)
	}
	return body, nil
}

// DecodeOutcome reads the outcome in a body.
func DecodeOutcome(body []byte, contentType string) (*SubmissionOutcome, error) {
	outcome := SubmissionOutcome{Kind: KindOutcome, VersionNumber: bodyVersion}
	if err := decodeBody(body, contentType, &outcome); err != nil {
		return nil, err
	}
	if err := checkKind(outcome.Kind, outcome.VersionNumber, KindOutcome); err != nil {
		return nil, err
	}
	if outcome.SubmissionID == "" || outcome.Outcome == "" || outcome.Experiences < 0 {
		return nil, decodeError("submission_id %s, outcome %s and experiences %d, wanted the first two given and a count",
			short(outcome.SubmissionID), short(outcome.Outcome), outcome.Experiences)
	}
	return &outcome, nil
}

// DecodeReference reads the reference in a body of ContentTypeReference.
func DecodeReference(body []byte) (*Reference, error) {
	reference := Reference{Kind: KindReference, VersionNumber: bodyVersion, Experiences: 1}
	if err := decodeBody(body, ContentTypeMsgpack, &reference); err != nil {
		return nil, err
	}
	if err := checkKind(reference.Kind, reference.VersionNumber, KindReference); err != nil {
		return nil, err
	}
	if sum, err := hex.DecodeString(reference.SHA256); err != nil || len(sum) != sha256.Size || reference.URL == "" {
		return nil, decodeError("url %s with sha256 %s, wanted both", short(reference.URL), short(reference.SHA256))
	}
	return &reference, nil
}

func checkKind(kind string, version int, wanted string) error {
	if kind != wanted || version != bodyVersion {
		return decodeError("body is %s version %d, wanted %s version %d", short(kind), version, wanted, bodyVersion)
	}
	return nil
}

func decodeBody(body []byte, contentType string, into any) error {
	if contentType == ContentTypeJSON {
		if !utf8.Valid(body) {
			return decodeError("the JSON is not UTF-8")
		}
		if err := json.Unmarshal(body, into); err != nil {
			return decodeError("%v", err)
		}
		return nil
	}
	containers := maxContainers
	if err := scan(body, &containers); err != nil {
		return err
	}
	if err := msgpack.Unmarshal(body, into); err != nil {
		return decodeError("%v", err)
	}
	return nil
}
