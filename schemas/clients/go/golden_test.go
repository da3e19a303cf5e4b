package trinitymq

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

// goldens returns the golden bodies that match a pattern, each with the JSON beside it.
func goldens(t testing.TB, pattern string) map[string][2][]byte {
	t.Helper()
	folder := os.Getenv("TRINITY_MQ_GOLDEN")
	if folder == "" {
		folder = filepath.Join("..", "..", "golden")
	}
	names, err := filepath.Glob(filepath.Join(folder, pattern))
	if err != nil || len(names) == 0 {
		t.Fatalf("no golden bodies %s in %s: %v", pattern, folder, err)
	}
	found := make(map[string][2][]byte)
	for _, name := range names {
		body, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(strings.TrimSuffix(name, filepath.Ext(name)) + ".json")
		if err != nil {
			t.Fatal(err)
		}
		found[filepath.Base(name)] = [2][]byte{body, text}
	}
	return found
}

// comparable returns JSON as a value in which equal things are equal: 1.0 and 1, and whole numbers beyond 2^53 whether
// written as numbers or as texts.
func comparable(t testing.TB, text []byte) any {
	t.Helper()
	from := json.NewDecoder(bytes.NewReader(text))
	from.UseNumber()
	var value any
	if err := from.Decode(&value); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return same(value)
}

func same(value any) any {
	switch value := value.(type) {
	case json.Number:
		if whole, err := strconv.ParseInt(string(value), 10, 64); err == nil && (whole > maxSafe || whole < -maxSafe) {
			return string(value)
		}
		number, _ := value.Float64()
		return strconv.FormatFloat(number, 'g', -1, 64) + " as number"
	case []any:
		for number := range value {
			value[number] = same(value[number])
		}
	case map[string]any:
		for key := range value {
			value[key] = same(value[key])
		}
	}
	return value
}

// filled returns a comparable map without what a default fills in again.
func filled(value any) any {
	found, ok := value.(map[string]any)
	if !ok {
		return value
	}
	for key, item := range found {
		item = filled(item)
		empty, isMap := item.(map[string]any)
		if item == nil || item == "" || item == false || item == "0 as number" || isMap && len(empty) == 0 {
			delete(found, key)
		}
	}
	return found
}

func asJSON(t testing.TB, value any) []byte {
	t.Helper()
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestGoldenExperiences(t *testing.T) {
	for name, golden := range goldens(t, "experiences/v1.*.tmqx") {
		t.Run(name, func(t *testing.T) {
			batch, err := DecodeExperiences(golden[0])
			if err != nil {
				t.Fatal(err)
			}
			found := make([]*Experience, 0)
			for number := range batch.Experiences {
				found = append(found, &batch.Experiences[number])
			}
			got := comparable(t, asJSON(t, map[string]any{"n": len(found), "experiences": found}))
			if want := comparable(t, golden[1]); !reflect.DeepEqual(got, want) {
				t.Errorf("got  %s\nwant %s", asJSON(t, got), asJSON(t, want))
			}
		})
	}
}

func TestGoldenOutcomes(t *testing.T) {
	for name, golden := range goldens(t, "control/submission_outcome.v1.*.msgpack") {
		t.Run(name, func(t *testing.T) {
			packed, err := DecodeOutcome(golden[0], ContentTypeMsgpack)
			if err != nil {
				t.Fatal(err)
			}
			text, err := DecodeOutcome(golden[1], ContentTypeJSON)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(filled(comparable(t, asJSON(t, packed))), filled(comparable(t, asJSON(t, text)))) {
				t.Errorf("msgpack %+v\nJSON %+v", packed, text)
			}
			got, want := filled(comparable(t, asJSON(t, packed))), filled(comparable(t, golden[1]))
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got  %s\nwant %s", asJSON(t, got), asJSON(t, want))
			}
		})
	}
}

func TestGoldenReferences(t *testing.T) {
	for name, golden := range goldens(t, "control/experience_reference.v1.*.msgpack") {
		reference, err := DecodeReference(golden[0])
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		want := comparable(t, golden[1]).(map[string]any)
		if want["experiences"] == nil {
			want["experiences"] = "1 as number"
		}
		if got := comparable(t, asJSON(t, reference)); !reflect.DeepEqual(got, any(want)) {
			t.Errorf("%s: got %s, wanted %s", name, asJSON(t, got), asJSON(t, want))
		}
	}
}

func TestReferencesDecodeWhatTheyMeanOnly(t *testing.T) {
	body := goldens(t, "experiences/v1.tiny.tmqx")["v1.tiny.tmqx"][0]
	sum := sha256.Sum256(body)
	reference := Reference{URL: "file:///x", Bytes: int64(len(body)), SHA256: hex.EncodeToString(sum[:])}
	if batch, err := reference.Decode(body); err != nil || len(batch.Experiences) != 1 {
		t.Error(err)
	}
	other := goldens(t, "experiences/v1.mixed.tmqx")["v1.mixed.tmqx"][0]
	if _, err := reference.Decode(other); !errors.Is(err, ErrDecode) {
		t.Error(err)
	}
}

func TestGoldenSubmissions(t *testing.T) {
	for name, golden := range goldens(t, "control/task_submission.v1.*.msgpack") {
		t.Run(name, func(t *testing.T) {
			var submission TaskSubmission
			if err := msgpack.Unmarshal(golden[0], &submission); err != nil {
				t.Fatal(err)
			}
			body, err := EncodeSubmission(submission)
			if err != nil {
				t.Fatal(err)
			}
			for _, one := range [][]byte{golden[0], body} {
				value, err := unpack(one, noExtensions)
				if err != nil {
					t.Fatal(err)
				}
				got, want := filled(comparable(t, asJSON(t, jsonValue(value)))), filled(comparable(t, golden[1]))
				if !reflect.DeepEqual(got, want) {
					t.Errorf("got  %s\nwant %s", asJSON(t, got), asJSON(t, want))
				}
			}
		})
	}
}

func TestTypedSlices(t *testing.T) {
	golden := goldens(t, "experiences/v1.tiny.tmqx")["v1.tiny.tmqx"]
	batch, err := DecodeExperiences(golden[0])
	if err != nil {
		t.Fatal(err)
	}
	one := batch.Experiences[0]
	if !reflect.DeepEqual(one.Tokens(), []int32{11, 12, 13}) || !reflect.DeepEqual(one.Logprobs(), []float32{-0.5, -1.25}) {
		t.Errorf("tokens %v, logprobs %v", one.Tokens(), one.Logprobs())
	}
	if !reflect.DeepEqual(one.ActionMask(), []bool{true, true}) || one.Advantages() != nil {
		t.Errorf("action_mask %v, advantages %v", one.ActionMask(), one.Advantages())
	}
}
