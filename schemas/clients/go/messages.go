package trinitymq

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"math"
	"strconv"

	"github.com/vmihailenco/msgpack/v5"
)

// Kinds of the bodies below; each body repeats its kind and version.
const (
	KindSubmission = "task_submission"
	KindOutcome    = "submission_outcome"
	KindPart       = "experience_part"
	KindReference  = "experience_reference"

	bodyVersion = 1
)

// Task is what a workflow is made from. What is left empty takes the run's default.
type Task struct {
	// Workflow is a registered name or dotted path; empty means the taskset's default.
	Workflow string `json:"workflow,omitempty" msgpack:"workflow,omitempty"`
	// RawTask is the record as a dataset would give it.
	RawTask map[string]any `json:"raw_task,omitempty" msgpack:"raw_task,omitempty"`
	// RepeatTimes is the number of runs, the group size of group-relative algorithms; 0 leaves it to the run.
	RepeatTimes  int            `json:"repeat_times,omitempty" msgpack:"repeat_times,omitempty"`
	FormatArgs   map[string]any `json:"format_args,omitempty" msgpack:"format_args,omitempty"`
	RolloutArgs  map[string]any `json:"rollout_args,omitempty" msgpack:"rollout_args,omitempty"`
	WorkflowArgs map[string]any `json:"workflow_args,omitempty" msgpack:"workflow_args,omitempty"`
	RewardFn     string         `json:"reward_fn,omitempty" msgpack:"reward_fn,omitempty"`
	RewardFnArgs map[string]any `json:"reward_fn_args,omitempty" msgpack:"reward_fn_args,omitempty"`
	// IsEval tasks are not trained on.
	IsEval bool `json:"is_eval,omitempty" msgpack:"is_eval,omitempty"`
	// Index is {"taskset": name, "index": position} of the record, where it has one.
	Index map[string]any `json:"index,omitempty" msgpack:"index,omitempty"`
}

// TaskSubmission is the body that carries a task from outside.
type TaskSubmission struct {
	Kind          string `json:"kind" msgpack:"kind"`
	VersionNumber int    `json:"version_number" msgpack:"version_number"`
	Task          Task   `json:"task" msgpack:"task"`
	// SubmissionID de-duplicates: a task of the same id is done once.
	SubmissionID string `json:"submission_id,omitempty" msgpack:"submission_id,omitempty"`
	// WantExperiences asks for the experiences too, after the outcome.
	WantExperiences bool `json:"want_experiences,omitempty" msgpack:"want_experiences,omitempty"`
	// ExactRuns says that RepeatTimes is meant as it is; else 1 stands for the group size of the run.
	ExactRuns bool `json:"exact_runs,omitempty" msgpack:"exact_runs,omitempty"`
}

// SubmissionOutcome is the answer to a TaskSubmission.
type SubmissionOutcome struct {
	Kind          string `json:"kind" msgpack:"kind"`
	VersionNumber int    `json:"version_number" msgpack:"version_number"`
	SubmissionID  string `json:"submission_id" msgpack:"submission_id"`
	Batch         ID     `json:"batch" msgpack:"batch"`
	Ticket        string `json:"ticket" msgpack:"ticket"`
	// Outcome is finished, partial, failed, cancelled, poisoned or late.
	Outcome       string  `json:"outcome" msgpack:"outcome"`
	CompletedRuns int     `json:"completed_runs" msgpack:"completed_runs"`
	TotalRuns     int     `json:"total_runs" msgpack:"total_runs"`
	Metrics       Metrics `json:"metrics" msgpack:"metrics"`
	// Message says what failed, where something did.
	Message string `json:"message,omitempty" msgpack:"message"`
	// Experiences is the number of experience parts sent along.
	Experiences int `json:"experiences" msgpack:"experiences"`
}

// OK tells whether any run of the task finished.
func (o *SubmissionOutcome) OK() bool { return o.Outcome == "finished" || o.Outcome == "partial" }

// Reference stands for an experience part that is too large for a message: its body lies in the run's blob store.
type Reference struct {
	Kind          string `json:"kind" msgpack:"kind"`
	VersionNumber int    `json:"version_number" msgpack:"version_number"`
	URL           string `json:"url" msgpack:"url"`
	// Bytes and SHA256 are those of the body.
	Bytes       int64  `json:"bytes" msgpack:"bytes"`
	SHA256      string `json:"sha256" msgpack:"sha256"`
	Experiences int    `json:"experiences" msgpack:"experiences"`
}

// Decode returns the experiences in the body that was fetched from URL, if it is the one meant.
func (r *Reference) Decode(body []byte) (*Batch, error) {
	sum := sha256.Sum256(body)
	if int64(len(body)) != r.Bytes || hex.EncodeToString(sum[:]) != r.SHA256 {
		return nil, decodeError("%d bytes with sha256 %x, wanted %d with %s: not what %s was",
			len(body), sum, r.Bytes, r.SHA256, r.URL)
	}
	return DecodeExperiences(body)
}

// ID is a batch or task id: a whole number or a text such as "3/gsm8k".
type ID struct {
	Number int64
	Text   string
	IsText bool
}

func (id ID) String() string {
	if id.IsText {
		return id.Text
	}
	return strconv.FormatInt(id.Number, 10)
}

// MarshalJSON gives a number or a text.
func (id ID) MarshalJSON() ([]byte, error) {
	if id.IsText {
		return json.Marshal(id.Text)
	}
	return json.Marshal(id.Number)
}

// UnmarshalJSON takes a number or a text.
func (id *ID) UnmarshalJSON(data []byte) error {
	if len(data) > 0 && data[0] == '"' {
		*id = ID{IsText: true}
		return json.Unmarshal(data, &id.Text)
	}
	*id = ID{}
	return json.Unmarshal(data, &id.Number)
}

// EncodeMsgpack gives a number or a text.
func (id ID) EncodeMsgpack(to *msgpack.Encoder) error {
	if id.IsText {
		return to.EncodeString(id.Text)
	}
	return to.EncodeInt(id.Number)
}

// DecodeMsgpack takes a number or a text.
func (id *ID) DecodeMsgpack(from *msgpack.Decoder) error {
	value, err := readValue(from, noExtensions)
	if err != nil {
		return err
	}
	*id, err = idOf(value, "batch")
	return err
}

func idOf(value any, name string) (ID, error) {
	switch value := value.(type) {
	case string:
		return ID{Text: value, IsText: true}, nil
	case int64:
		return ID{Number: value}, nil
	}
	return ID{}, decodeError("%s is %v, wanted a whole number of 64 bits or a text", name, short(value))
}

// Metrics are numbers by name.
type Metrics map[string]float64

// MarshalJSON writes what JSON has no number for as "NaN", "Infinity" and "-Infinity".
func (m Metrics) MarshalJSON() ([]byte, error) {
	plain := make(map[string]any, len(m))
	for name, value := range m {
		plain[name] = jsonFloat(value)
	}
	return json.Marshal(plain)
}

// UnmarshalJSON reads what MarshalJSON writes.
func (m *Metrics) UnmarshalJSON(data []byte) error {
	var found map[string]any
	if err := json.Unmarshal(data, &found); err != nil {
		return err
	}
	*m = make(Metrics, len(found))
	for name, value := range found {
		switch value := value.(type) {
		case float64:
			(*m)[name] = value
		case string:
			number, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return err
			}
			(*m)[name] = number
		default:
			return decodeError("metric %s is %s, wanted a number", short(name), short(value))
		}
	}
	return nil
}

func jsonFloat(value float64) any {
	switch {
	case math.IsNaN(value):
		return "NaN"
	case math.IsInf(value, 1):
		return "Infinity"
	case math.IsInf(value, -1):
		return "-Infinity"
	}
	return value
}
