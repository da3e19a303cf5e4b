package trinitymq

import (
	"encoding/base64"
	"encoding/json"
	"reflect"
	"strconv"
	"time"
)

const maxSafe = 1<<53 - 1 // whole numbers beyond it are no longer exact in many JSON readers

// MarshalJSON gives the form of the golden bodies in schemas/golden: absent fields are left out, numbers that JSON
// readers lose are texts, and what JSON has no word for is {"$tensor": ...}, {"$array": ...}, {"$bytes": base64} or
// {"$timestamp": ...}.
func (e *Experience) MarshalJSON() ([]byte, error) {
	found := map[string]any{
		"eid":             e.EID,
		"experience_type": e.Type,
		"prompt_length":   e.PromptLength,
		"info":            jsonValue(e.Info),
		"metrics":         jsonValue(e.Metrics),
		"tensors":         jsonTensors(e.Tensors),
	}
	for name, number := range map[string]*float64{"reward": e.Reward, "temperature": e.Temperature} {
		if number != nil {
			found[name] = jsonFloat(*number)
		}
	}
	for name, text := range map[string]*string{
		"truncate_status": e.TruncateStatus, "prompt_text": e.PromptText, "response_text": e.ResponseText,
		"taskset": e.Taskset,
	} {
		if text != nil {
			found[name] = *text
		}
	}
	for name, list := range map[string][]any{
		"messages": e.Messages, "tools": e.Tools, "chosen_messages": e.ChosenMessages,
		"rejected_messages": e.RejectedMessages,
	} {
		if list != nil {
			found[name] = jsonValue(list)
		}
	}
	if e.Index != nil {
		found["index"] = jsonValue(*e.Index)
	}
	if e.Versions != nil {
		found["versions"] = e.Versions
	}
	if e.CustomFields != nil {
		customs := make([][3]string, len(e.CustomFields))
		for number, field := range e.CustomFields {
			customs[number] = [3]string{field.Source, field.Destination, field.DType}
		}
		found["custom_fields"] = customs
	}
	if e.MultiModalInputs != nil {
		found["multi_modal_inputs"] = jsonTensors(e.MultiModalInputs)
	}
	return json.Marshal(found)
}

func jsonTensors(tensors map[string]*Tensor) map[string]any {
	found := make(map[string]any, len(tensors))
	for name, tensor := range tensors {
		found[name] = jsonTensor(tensor)
	}
	return found
}

func jsonTensor(tensor *Tensor) map[string]any {
	values := reflect.ValueOf(tensor.Data)
	data := make([]any, values.Len())
	for number := range data {
		one := values.Index(number)
		switch {
		case one.CanInt():
			data[number] = jsonValue(one.Int())
		case one.CanUint():
			data[number] = jsonValue(one.Uint())
		case one.CanFloat():
			data[number] = jsonFloat(one.Float())
		default:
			data[number] = one.Bool()
		}
	}
	return map[string]any{"dtype": tensor.DType, "shape": tensor.Shape, "data": data}
}

func jsonValue(value any) any {
	switch value := value.(type) {
	case int64:
		if value > maxSafe || value < -maxSafe {
			return strconv.FormatInt(value, 10)
		}
	case uint64:
		if value > maxSafe {
			return strconv.FormatUint(value, 10)
		}
	case float64:
		return jsonFloat(value)
	case []byte:
		return map[string]any{"$bytes": base64.StdEncoding.EncodeToString(value)}
	case time.Time:
		return map[string]any{"$timestamp": map[string]int64{
			"seconds": value.Unix(), "nanoseconds": int64(value.Nanosecond()),
		}}
	case *Tensor:
		return map[string]any{"$tensor": jsonTensor(value)}
	case Array:
		return map[string]any{"$array": jsonTensor(value.Tensor)}
	case []any:
		found := make([]any, len(value))
		for number, item := range value {
			found[number] = jsonValue(item)
		}
		return found
	case map[string]any:
		found := make(map[string]any, len(value))
		for key, item := range value {
			found[key] = jsonValue(item)
		}
		return found
	}
	return value
}
