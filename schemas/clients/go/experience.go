package trinitymq

// Batch is what an experience body holds.
type Batch struct {
	Experiences []Experience
}

// EID is the identity of an experience.
type EID struct {
	Batch  ID     `json:"batch"`
	Task   ID     `json:"task"`
	Run    int64  `json:"run"`
	Step   int64  `json:"step"`
	Suffix string `json:"suffix"`
}

// CustomField carries Info[Source] into the training batch as Destination of DType.
type CustomField struct{ Source, Destination, DType string }

// Types of an experience.
const (
	SingleTurn = "single_turn"
	MultiTurn  = "multi_turn"
	DPO        = "dpo"
)

// Experience is one sampled sequence with what is known about it. Pointers are nil, maps and slices nil or empty, where
// the sender gave nothing. Experiences of one batch share memory: treat them as read-only.
type Experience struct {
	EID EID
	// Type is SingleTurn, MultiTurn or DPO.
	Type string
	// PromptLength is the number of tokens before the response.
	PromptLength   int
	Reward         *float64
	Temperature    *float64
	TruncateStatus *string
	PromptText     *string
	ResponseText   *string
	Taskset        *string
	Index          *int64
	// Info and Metrics hold nil, bool, int64, uint64, float64, string, []byte, []any, map[string]any, time.Time,
	// *Tensor and Array.
	Info, Metrics                    map[string]any
	Messages, Tools                  []any
	ChosenMessages, RejectedMessages []any
	CustomFields                     []CustomField
	// Versions are rows (first token in the response, generation, step): from that token on, that policy sampled.
	Versions [][3]int64
	// Tensors are tokens, logprobs, action_mask, token_level_reward, advantages, returns, teacher_logprobs, chosen,
	// rejected and routed_experts: those that there are.
	Tensors map[string]*Tensor
	// MultiModalInputs are tensors by the name the model gives them.
	MultiModalInputs map[string]*Tensor
}

// Tokens are the token ids of prompt and response (of the prompt alone in a DPO experience).
func (e *Experience) Tokens() []int32 { return typed[int32](e, "tokens") }

// Logprobs has one value per response token, nil where there are none.
func (e *Experience) Logprobs() []float32 { return typed[float32](e, "logprobs") }

// ActionMask is true for the response tokens that are trained on, nil where there is none.
func (e *Experience) ActionMask() []bool { return typed[bool](e, "action_mask") }

// Advantages has one value per response token, nil where there are none.
func (e *Experience) Advantages() []float32 { return typed[float32](e, "advantages") }

func typed[T any](e *Experience, name string) []T {
	if tensor := e.Tensors[name]; tensor != nil {
		found, _ := tensor.Data.([]T) // decoding has seen to it
		return found
	}
	return nil
}

// length of a tensor's first dimension, -1 where there is no such tensor.
func (e *Experience) length(name string) int {
	if tensor := e.Tensors[name]; tensor != nil {
		return tensor.Shape[0]
	}
	return -1
}

var responseFields = []string{
	"logprobs", "action_mask", "token_level_reward", "advantages", "returns", "teacher_logprobs",
}

// check holds an experience against the rules that tie its fields together, so that callers may index by them.
func (e *Experience) check() error {
	tokens, prompt, mask := e.length("tokens"), e.PromptLength, e.length("action_mask")
	if tokens < 1 || prompt < 1 {
		return decodeError("%d tokens with prompt_length %d, wanted at least 1 each", tokens, prompt)
	}
	if rows := e.length("routed_experts"); rows >= 0 && rows != tokens-1 {
		return decodeError("routed_experts has %d rows for %d tokens, wanted one less", rows, tokens)
	}
	if e.TruncateStatus != nil && *e.TruncateStatus != "prompt_truncated" && *e.TruncateStatus != "response_truncated" {
		return decodeError("truncate_status is %s", short(*e.TruncateStatus))
	}
	response := tokens - prompt
	switch e.Type {
	case DPO:
		if prompt != tokens || e.length("chosen") < 1 || e.length("rejected") < 1 {
			return decodeError("a dpo experience with prompt_length %d of %d tokens, %d chosen and %d rejected",
				prompt, tokens, e.length("chosen"), e.length("rejected"))
		}
		response = -1
	case SingleTurn, MultiTurn:
		if mask < 0 {
			return decodeError("no action_mask in a %s experience", e.Type)
		}
		if e.TruncateStatus != nil && *e.TruncateStatus == "prompt_truncated" {
			response = mask // a cut prompt leaves no response: the fields only agree with the mask
		} else if response < 1 {
			return decodeError("%d tokens with prompt_length %d, wanted a response", tokens, prompt)
		}
	default:
		return decodeError("experience_type is %s", short(e.Type))
	}
	for _, name := range responseFields {
		if length := e.length(name); length >= 0 && length != response {
			return decodeError("%s has %d values for a response of %d tokens in a %s experience", name, length, response, e.Type)
		}
	}
	return e.checkVersions(response)
}

func (e *Experience) checkVersions(response int) error {
	previous := int64(-1)
	for number, row := range e.Versions {
		first := row[0]
		if (number == 0 && first != 0) || first <= previous || row[1] < 0 || row[2] < 0 ||
			(e.Type != DPO && first > 0 && first >= int64(response)) {
			return decodeError("versions has the row %v, wanted rising starts from 0 within the response of %d tokens", row, response)
		}
		previous = first
	}
	return nil
}
