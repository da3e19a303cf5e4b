package trinitymq

const (
	maxExperiences = 1 << 16
	tensorSlots    = 1 << 19 // tensors a body may be cut into, beside those that every experience has

	documentTensors  = "documents"
	multiModalInputs = "multi_modal_inputs"

	extTensor, extArray = 1, 2
)

// fieldRule says what a tensor field may be.
type fieldRule struct {
	dtypes     []string
	dimensions int
}

var (
	tokenRule  = fieldRule{[]string{"int32"}, 1}
	floatRule  = fieldRule{[]string{"float32", "bfloat16", "float16"}, 1}
	fieldRules = map[string]fieldRule{
		"tokens": tokenRule, "chosen": tokenRule, "rejected": tokenRule,
		"logprobs": floatRule, "token_level_reward": floatRule, "advantages": floatRule, "returns": floatRule,
		"teacher_logprobs": floatRule,
		"action_mask":      {[]string{"bool"}, 1},
		"routed_experts":   {[]string{"uint8"}, 3},
	}
)

func (r fieldRule) fits(one entry) bool {
	for _, name := range r.dtypes {
		if name == one.dtype {
			return len(one.shape) == r.dimensions
		}
	}
	return false
}

// DecodeExperiences returns the experiences in a body of ContentTypeExperiences, compressed or not. Anything but one
// whole, undamaged body is an error that wraps ErrDecode.
func DecodeExperiences(body []byte) (*Batch, error) {
	packedHead, packedTail, err := openFrame(body)
	if err != nil {
		return nil, err
	}
	unpacked, err := unpack(packedHead, noExtensions)
	if err != nil {
		return nil, err
	}
	head, _ := unpacked.(map[string]any)
	count, counted := head["n"].(int64)
	named, ok := head["columns"].(map[string]any)
	said, also := head["tensors"].(map[string]any)
	if !counted || !ok || !also || count < 0 || count > maxExperiences {
		return nil, decodeError("the head is %s with n %s, wanted n (at most %d), columns and tensors",
			short(unpacked), short(head["n"]), maxExperiences)
	}
	entries, err := readTail(packedTail)
	if err != nil {
		return nil, err
	}
	if count > 0 && said["tokens"] == nil { // also bounds what constant columns can claim
		return nil, decodeError("no tokens for %d experiences", count)
	}
	parts := pieces{said: said, slots: tensorSlots + len(fieldRules)*int(count)}
	if err := parts.check(entries, int(count)); err != nil {
		return nil, err
	}
	parts.experiences = make([]Experience, count)
	for _, one := range entries {
		if err := parts.take(one); err != nil {
			return nil, err
		}
	}
	if count > 0 {
		containers := maxContainers
		err = fill(parts.experiences, columns{named, int(count), &containers}, parts.extension)
	}
	if err != nil {
		return nil, err
	}
	return &Batch{Experiences: parts.experiences}, nil
}

// pieces cuts the tensors of the tail into those of experiences and documents, as the head says.
type pieces struct {
	said        map[string]any
	slots       int
	experiences []Experience
	documents   []*Tensor
}

// check counts what is to be made before any of it is.
func (p *pieces) check(entries []entry, count int) error {
	if len(entries) != len(p.said) {
		return decodeError("the head names %d tensors, the tail has %d", len(p.said), len(entries))
	}
	made := 0
	for _, one := range entries {
		said, _ := p.said[one.name].(map[string]any)
		lengths, ok := said["lengths"].([]byte)
		if !ok {
			return decodeError("the head says nothing of tensor %s", short(one.name))
		}
		made += len(lengths) / 4
		field, ok := said["field"].(string)
		if !ok {
			return decodeError("the head says of tensor %s that its field is %s", short(one.name), short(said["field"]))
		}
		if _, known := fieldRules[field]; (known || field == multiModalInputs) && len(lengths) != 4*count {
			return decodeError("tensor %s has lengths for %d experiences of %d", short(one.name), len(lengths)/4, count)
		}
	}
	if made > p.slots {
		return decodeError("more than %d tensors in one body", p.slots)
	}
	return nil
}

// take cuts one tensor and hands the pieces out.
func (p *pieces) take(one entry) error {
	said := p.said[one.name].(map[string]any) // check has seen to it
	lengths, err := packed(said["lengths"], 4, -1, one.name, toInt32)
	if err != nil {
		return err
	}
	field, _ := said["field"].(string)
	key, keyed := said["key"].(string)
	scalar, _ := said["scalar"].(bool)
	rule, known := fieldRules[field]
	switch {
	case field == documentTensors:
		if p.documents == nil {
			p.documents = make([]*Tensor, len(lengths))
		}
		if len(lengths) != len(p.documents) {
			return decodeError("documents have %d tensors and %d", len(p.documents), len(lengths))
		}
	case field == multiModalInputs && !keyed:
		return decodeError("tensor %s has no key, wanted one for %s", short(one.name), multiModalInputs)
	case field == multiModalInputs:
	case !known:
		return nil // a later release may have added it
	case scalar || !rule.fits(one):
		return decodeError("%s is %s of shape %v, wanted %d dimensions of %v",
			short(one.name), one.dtype, one.shape, rule.dimensions, rule.dtypes)
	}
	return one.split(lengths, scalar, func(number int, tensor *Tensor) error {
		switch field {
		case documentTensors:
			if p.documents[number] == nil {
				p.documents[number] = tensor
				return nil
			}
		case multiModalInputs:
			if put(&p.experiences[number].MultiModalInputs, key, tensor) {
				return nil
			}
		default:
			if put(&p.experiences[number].Tensors, field, tensor) {
				return nil
			}
		}
		return decodeError("%s gives item %d a second tensor", short(one.name), number)
	})
}

// put sets a key that is not there yet.
func put(tensors *map[string]*Tensor, key string, tensor *Tensor) bool {
	if *tensors == nil {
		*tensors = make(map[string]*Tensor)
	}
	if (*tensors)[key] != nil {
		return false
	}
	(*tensors)[key] = tensor
	return true
}

// split hands out the tensors that an entry is made of, by lengths of which -1 means none.
func (e entry) split(lengths []int32, scalar bool, give func(number int, tensor *Tensor) error) error {
	if len(e.shape) == 0 || (scalar && len(e.shape) != 1) {
		return decodeError("%s has shape %v, wanted the concatenation of tensors", short(e.name), e.shape)
	}
	stride, taken := 1, 0
	for _, size := range e.shape[1:] {
		stride *= size
	}
	for number, length := range lengths {
		if length < 0 && length != -1 || int(length) > e.shape[0]-taken || scalar && length > 1 {
			return decodeError("the lengths of %s do not add up to shape %v", short(e.name), e.shape)
		}
		if length < 0 {
			continue
		}
		if scalar && length != 1 {
			return decodeError("%s is marked scalar with a length of %d", short(e.name), length)
		}
		end := taken + int(length)
		tensor := &Tensor{DType: e.dtype, Shape: []int{}, Data: e.values.cut(taken*stride, end*stride)}
		if !scalar {
			tensor.Shape = append([]int{int(length)}, e.shape[1:]...)
		}
		if err := give(number, tensor); err != nil {
			return err
		}
		taken = end
	}
	if taken != e.shape[0] {
		return decodeError("the lengths of %s do not add up to shape %v", short(e.name), e.shape)
	}
	return nil
}

// extension makes a tensor of a document's reference to it.
func (p *pieces) extension(code int8, data []byte) (any, error) {
	if (code != extTensor && code != extArray) || len(data) != 4 {
		return nil, decodeError("unknown msgpack extension %d of %d bytes", code, len(data))
	}
	number := le.Uint32(data)
	if uint64(number) >= uint64(len(p.documents)) || p.documents[number] == nil {
		return nil, decodeError("a document refers to tensor %d of %d", number, len(p.documents))
	}
	if code == extArray {
		return Array{p.documents[number]}, nil
	}
	return p.documents[number], nil
}
