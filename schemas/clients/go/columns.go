package trinitymq

import (
	"math"
	"unicode/utf8"
)

// values is one column of the head: per experience a value or none. A nil one has none at all.
type values[T any] struct {
	all     *T      // the same for all
	each    []T     // else one per experience, or the distinct ones that codes points into
	codes   []int32 // -1 for none
	missing []byte  // not 0 for none
}

// at returns a pointer to the value of an experience, nil for none.
func (v *values[T]) at(number int) *T {
	switch {
	case v == nil:
		return nil
	case v.all != nil:
		return v.all
	case v.codes != nil:
		if v.codes[number] < 0 {
			return nil
		}
		return &v.each[v.codes[number]]
	case v.missing != nil && v.missing[number] != 0:
		return nil
	}
	return &v.each[number]
}

// packed returns little-endian numbers of size bytes each; count -1 takes any number of them.
func packed[T any](data any, size, count int, name string, convert func([]byte) T) ([]T, error) {
	raw, ok := data.([]byte)
	if !ok || len(raw)%size != 0 {
		return nil, decodeError("%s: %s, wanted packed numbers of %d bytes", name, short(data), size)
	}
	if count >= 0 && len(raw) != count*size {
		return nil, decodeError("%s: %d values, wanted %d", name, len(raw)/size, count)
	}
	found := make([]T, len(raw)/size)
	for number := range found {
		found[number] = convert(raw[number*size:])
	}
	return found, nil
}

func toInt32(b []byte) int32     { return int32(le.Uint32(b)) }
func toInt64(b []byte) int64     { return int64(le.Uint64(b)) }
func toFloat64(b []byte) float64 { return math.Float64frombits(le.Uint64(b)) }

// columns are those of the head, for count experiences.
type columns struct {
	named      map[string]any
	count      int
	containers *int // that the documents may still hold
}

func (c columns) get(name string) (map[string]any, error) {
	if c.named[name] == nil {
		return nil, nil
	}
	column, ok := c.named[name].(map[string]any)
	if !ok {
		return nil, decodeError("%s: %s, wanted a column", name, short(c.named[name]))
	}
	return column, nil
}

func (c columns) ints(name string) (*values[int64], error) {
	column, err := c.get(name)
	if column == nil {
		return nil, err
	}
	if constant, same := column["c"]; same {
		whole, ok := constant.(int64)
		if !ok {
			return nil, decodeError("%s: the constant is %s, wanted a whole number of 64 bits", name, short(constant))
		}
		return &values[int64]{all: &whole}, nil
	}
	return numeric(c, column, "i", name, toInt64)
}

func (c columns) floats(name string) (*values[float64], error) {
	column, err := c.get(name)
	if column == nil {
		return nil, err
	}
	return numeric(c, column, "f", name, toFloat64)
}

func numeric[T any](c columns, column map[string]any, key, name string, convert func([]byte) T) (*values[T], error) {
	each, err := packed(column[key], 8, c.count, name, convert)
	if err != nil {
		return nil, err
	}
	found := &values[T]{each: each}
	if missing, some := column["n"]; some {
		if found.missing, err = packed(missing, 1, c.count, name, func(b []byte) byte { return b[0] }); err != nil {
			return nil, err
		}
	}
	return found, nil
}

func (c columns) texts(name string) (*values[string], error) {
	column, err := c.get(name)
	if column == nil {
		return nil, err
	}
	if constant, same := column["c"]; same {
		text, ok := constant.(string)
		if !ok {
			return nil, decodeError("%s: the constant is %s, wanted text", name, short(constant))
		}
		return &values[string]{all: &text}, nil
	}
	codes, distinct := column["k"]
	count := c.count
	if distinct {
		count = -1
	}
	parts, err := cut(column, "s", count, name)
	if err != nil {
		return nil, err
	}
	found := &values[string]{each: make([]string, len(parts)), missing: make([]byte, len(parts))}
	for number, part := range parts {
		if part == nil {
			found.missing[number] = 1
		} else if !utf8.Valid(part) {
			return nil, decodeError("%s: a text is not UTF-8", name)
		}
		found.each[number] = string(part)
	}
	if !distinct {
		return found, nil
	}
	if found.codes, err = packed(codes, 4, c.count, name, toInt32); err != nil {
		return nil, err
	}
	for number, code := range found.codes {
		if code < -1 || int(code) >= len(parts) {
			return nil, decodeError("%s: refers to text %d of %d", name, code, len(parts))
		}
		if code >= 0 && parts[code] == nil {
			found.codes[number] = -1
		}
	}
	return found, nil
}

// documents returns a column of free-form values.
func (c columns) documents(name string, extensions extension) (*values[any], error) {
	column, err := c.get(name)
	if column == nil {
		return nil, err
	}
	parts, err := cut(column, "d", c.count, name)
	if err != nil {
		return nil, err
	}
	found := &values[any]{each: make([]any, len(parts)), missing: make([]byte, len(parts))}
	for number, part := range parts {
		if part == nil {
			found.missing[number] = 1
		} else if found.each[number], err = unpackSome(part, extensions, c.containers); err != nil {
			return nil, decodeError("%s of experience %d: %v", name, number, err)
		}
	}
	return found, nil
}

// ids returns a column of ids: numbers, texts, or both as documents.
func (c columns) ids(name string) (*values[ID], error) {
	column, err := c.get(name)
	if column == nil {
		return nil, err
	}
	found := &values[ID]{each: make([]ID, c.count)}
	_, mixed := column["d"]
	_, texts := column["s"]
	if _, constant := column["c"].(string); constant {
		texts = true
	}
	var value func(number int) (ID, bool)
	switch {
	case mixed:
		each, err := c.documents(name, noExtensions)
		if err != nil {
			return nil, err
		}
		value = func(number int) (ID, bool) {
			one := each.at(number)
			if one == nil {
				return ID{}, false
			}
			id, err := idOf(*one, name)
			return id, err == nil
		}
	case texts:
		each, err := c.texts(name)
		if err != nil {
			return nil, err
		}
		value = func(number int) (ID, bool) {
			one := each.at(number)
			if one == nil {
				return ID{}, false
			}
			return ID{Text: *one, IsText: true}, true
		}
	default:
		each, err := c.ints(name)
		if err != nil {
			return nil, err
		}
		value = func(number int) (ID, bool) {
			one := each.at(number)
			if one == nil {
				return ID{}, false
			}
			return ID{Number: *one}, true
		}
	}
	for number := range found.each {
		id, ok := value(number)
		if !ok {
			return nil, decodeError("%s of experience %d is missing or neither number nor text", name, number)
		}
		found.each[number] = id
	}
	return found, nil
}

// versions returns rows (first token, generation, step) per experience, nil for none.
func (c columns) versions(name string) ([][][3]int64, error) {
	found := make([][][3]int64, c.count)
	column, err := c.get(name)
	if column == nil {
		return found, err
	}
	counts, err := packed(column["l"], 4, c.count, name, toInt32)
	if err != nil {
		return nil, err
	}
	flat, err := packed(column["i"], 8, -1, name, toInt64)
	if err != nil {
		return nil, err
	}
	rows := make([][3]int64, len(flat)/3)
	for number := range rows {
		copy(rows[number][:], flat[3*number:])
	}
	taken := 0
	for number, count := range counts {
		if count < -1 || int(count) > len(rows)-taken {
			return nil, decodeError("%s: the lengths do not add up to %d numbers", name, len(flat))
		}
		if count > 0 {
			found[number] = rows[taken : taken+int(count) : taken+int(count)]
			taken += int(count)
		}
	}
	if 3*taken != len(flat) {
		return nil, decodeError("%s: the lengths do not add up to %d numbers", name, len(flat))
	}
	return found, nil
}

// cut returns the pieces of a column of texts or documents, nil for none; count -1 takes any number of them.
func cut(column map[string]any, key string, count int, name string) ([][]byte, error) {
	lengths, err := packed(column["l"], 4, count, name, toInt32)
	if err != nil {
		return nil, err
	}
	data, ok := column[key].([]byte)
	if !ok {
		return nil, decodeError("%s: %s, wanted bytes", name, short(column[key]))
	}
	parts := make([][]byte, len(lengths))
	for number, length := range lengths {
		if length < -1 || int(length) > len(data) {
			return nil, decodeError("%s: the lengths do not add up to the data", name)
		}
		if length >= 0 {
			parts[number], data = data[:length:length], data[length:]
		}
	}
	if len(data) != 0 {
		return nil, decodeError("%s: the lengths do not add up to the data", name)
	}
	return parts, nil
}
